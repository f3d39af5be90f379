// What the three ladders share: random data, the check against the CPU, timing, cuBLAS as the
// baseline, and the command line. A ladder is a list of versions, a version a list of
// configurations, a configuration a function that launches.
//
// Each operation is y = W x in one of its three directions, W (tokens, tokens) lower triangular:
//   forward       y[b, i, c]  = sum over j <= i of W[i, j] x[b, j, c]
//                               (+ bias[i] + residual[b, i, c])
//   grad_input    dx[b, j, c] = sum over i >= j of W[i, j] dy[b, i, c]
//   grad_weight   dW[i, j]    = sum over b, c of dy[b, i, c] x[b, j, c] for j <= i,
//                               exact zeros above the diagonal
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tensor_core.cuh"

// ------------------------------------------------------------------------------------------ errors

[[noreturn]] inline void stop(const std::string& message) {
  fprintf(stderr, "error: %s\n", message.c_str());
  exit(2);
}

inline void check_cuda(cudaError_t status, const char* what, int line) {
  if (status != cudaSuccess)
    stop(std::string(cudaGetErrorString(status)) + " at line " + std::to_string(line) + ": " +
         what);
}
#define CHECK(call) check_cuda((call), #call, __LINE__)

// ------------------------------------------------------------------------------------- the problem

enum Operation { kForward, kGradInput, kGradWeight };
inline const char* operation_name(Operation operation) {
  static const char* const kNames[] = {"forward", "grad_input", "grad_weight"};
  return kNames[operation];
}

// The arguments of every version; all pointers are to device memory. Those that an operation does
// not use are null.
struct Arguments {
  const bf16* weight;  // (tokens, columns), exact zeros above the diagonal and beyond `tokens`
  const bf16* x;       // (batch, tokens, channels), like dy, residual, y and dx
  const bf16* dy;
  const float* bias;     // (tokens), or null
  const bf16* residual;  // or null
  bf16* y;
  bf16* dx;
  float* dweight;  // (tokens, tokens)
  int batch, tokens, channels;
  int columns;  // tokens rounded up to 8: rows of the weight start at multiples of 16 bytes
};

struct Configuration {
  std::string name;
  std::function<cudaError_t(const Arguments&)> launch;
};

struct Version {
  int number;
  std::string adds;  // what is new in it, a few words
  bool hopper;       // needs compute capability 9.0
  std::vector<Configuration> configurations;
  std::string missing = "";  // why it cannot run, and what to do; empty if it can
};

inline const cudaDeviceProp& device() {
  static const cudaDeviceProp properties = [] {
    cudaDeviceProp found;
    CHECK(cudaGetDeviceProperties(&found, 0));
    return found;
  }();
  return properties;
}

// Launches a kernel, after asking for more than 48 KB of shared memory if it needs that.
template <typename... Parameters, typename... Values>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                   Values... values) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  kernel<<<blocks, threads, shared_bytes>>>(values...);
  return cudaGetLastError();
}

// Scratch memory on the device. It is kept and grown between calls; its contents are lost.
inline void* scratch(size_t bytes) {
  static void* memory = nullptr;
  static size_t size = 0;
  if (bytes > size) {
    CHECK(cudaFree(memory));
    CHECK(cudaMalloc(&memory, bytes));
    size = bytes;
  }
  return memory;
}

// Columns (tiles of `tile` channels, of all samples) whose activations fill 25 MB: half of a Hopper
// GPU's L2.
inline int columns_in_cache(const Arguments& a, int tile) {
  const double bytes = 2.0 * a.tokens * tile;
  return std::max(1,
                  std::min(static_cast<int>(25e6 / bytes), a.batch * ceil_div(a.channels, tile)));
}

// -------------------------------------------------------------------------------------------- data

// A standard normal random number for each index and seed.
__device__ inline float random_normal(uint64_t index, uint32_t seed) {
  uint64_t bits =
      (index + 1) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(seed) * 0xd1342543de82ef95ull;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
  bits ^= bits >> 31;
  const float radius = (static_cast<uint32_t>(bits >> 40) + 1) * (1.0f / 16777217.0f);  // in (0, 1)
  const float angle = static_cast<uint32_t>(bits & 0xffffff) * (1.0f / 16777216.0f);
  return sqrtf(-2.0f * logf(radius)) * cosf(6.2831853f * angle);
}

// values[i] = scale * normal; a lower triangular matrix if columns > 0, zero above the diagonal and
// in the padding.
template <typename Value>
__global__ void fill_kernel(Value* values, size_t count, uint32_t seed, float scale, int columns) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const bool keep = columns == 0 || i % columns <= i / columns;
    values[i] = static_cast<Value>(keep ? scale * random_normal(i, seed) : 0.0f);
  }
}

template <typename Value>
Value* random_array(size_t count, uint32_t seed, float scale, int columns = 0) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, count * sizeof(Value)));
  CHECK(launch(fill_kernel<Value>, dim3(1024), dim3(256), 0, static_cast<Value*>(memory), count,
               seed, scale, columns));
  return static_cast<Value*>(memory);
}

template <typename Value>
std::vector<Value> to_host(const Value* values, size_t count) {
  std::vector<Value> host(count);
  CHECK(cudaMemcpy(host.data(), values, count * sizeof(Value), cudaMemcpyDeviceToHost));
  return host;
}

// One problem on the device: several sets of buffers, so that a timed run never finds its data in
// the cache.
struct Data {
  Operation operation;
  std::vector<Arguments> sets;
  size_t output_bytes;

  Data(Operation operation, int batch, int tokens, int channels, bool fused, int set_count)
      : operation(operation) {
    const size_t activations = static_cast<size_t>(batch) * tokens * channels;
    const int columns = round_up(tokens, 8);
    Arguments common = {};
    common.batch = batch, common.tokens = tokens, common.channels = channels,
    common.columns = columns;
    if (operation != kGradWeight) {
      common.weight = random_array<bf16>(static_cast<size_t>(tokens) * columns, 1,
                                         1.0f / std::sqrt(tokens), columns);
    }
    if (fused) common.bias = random_array<float>(tokens, 2, 1.0f);
    output_bytes =
        operation == kGradWeight ? sizeof(float) * tokens * tokens : sizeof(bf16) * activations;
    for (int i = 0; i < set_count; ++i) {
      Arguments set = common;
      void* output = nullptr;
      CHECK(cudaMalloc(&output, output_bytes));
      if (operation != kGradInput) set.x = random_array<bf16>(activations, 10 + i, 1.0f);
      if (operation != kForward) set.dy = random_array<bf16>(activations, 100 + i, 1.0f);
      if (fused) set.residual = random_array<bf16>(activations, 1000 + i, 1.0f);
      if (operation == kForward) set.y = static_cast<bf16*>(output);
      if (operation == kGradInput) set.dx = static_cast<bf16*>(output);
      if (operation == kGradWeight) set.dweight = static_cast<float*>(output);
      sets.push_back(set);
    }
  }

  void* output(int set) const {
    const Arguments& a = sets[set];
    return operation == kForward     ? static_cast<void*>(a.y)
           : operation == kGradInput ? a.dx
                                     : static_cast<void*>(a.dweight);
  }

  size_t bytes_of_set() const {
    const Arguments& a = sets[0];
    const size_t activations = sizeof(bf16) * a.batch * a.tokens * a.channels;
    return output_bytes + activations * (operation == kGradWeight ? 2 : 1);
  }

  // Multiplications and additions that the triangle needs, the same for all three operations.
  double useful_flops() const {
    const Arguments& a = sets[0];
    return static_cast<double>(a.batch) * a.tokens * (a.tokens + 1.0) * a.channels;
  }
};

// ----------------------------------------------------------------------------------- the reference

// Rows of the output, computed in fp64 on the CPU from the same bf16 inputs: all rows of a small
// problem, a sample of a large one. A row is (sample, token) with all its channels, or for dW one
// element (token, token).
class Reference {
 public:
  Reference(const Data& data, bool all) : operation_(data.operation), a_(data.sets[0]) {
    if (operation_ == kGradWeight) {
      choose_elements(all);
      for (const auto& [i, j] : chosen_) expected_.push_back(weight_gradient(i, j));
    } else {
      choose_rows(all);
      weight_ = to_host(a_.weight, static_cast<size_t>(a_.tokens) * a_.columns);
      if (a_.bias != nullptr) bias_ = to_host(a_.bias, a_.tokens);
      for (const auto& [sample, token] : chosen_) product_row(sample, token);
    }
  }

  // Returns an empty string if the device's output is right, else what is wrong. *error: ||output -
  // expected|| / ||expected||.
  std::string compare(bool with_upper_half, double* error) const {
    std::vector<float> found = fetch();
    for (size_t i = 0; i < found.size(); ++i) {
      if (!with_upper_half && above_diagonal(i)) found[i] = 0.0f;
    }
    double difference = 0, norm = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      difference += (found[i] - expected_[i]) * (found[i] - expected_[i]);
      norm += expected_[i] * expected_[i];
    }
    *error = std::sqrt(difference / norm);
    const double mean = std::sqrt(norm / found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      const double gap = std::fabs(found[i] - expected_[i]);
      // A zero above the diagonal must be exact. Elsewhere single elements are checked too, because
      // one wrong element among many right ones hardly changes the relative error.
      const double bound = above_diagonal(i) ? 0 : 0.01 * std::fabs(expected_[i]) + 0.01 * mean;
      if (!(gap <= bound)) return place(i) + describe(found[i], expected_[i]);
    }
    return *error <= 5e-3 ? "" : "relative error " + std::to_string(*error) + " is above 0.005";
  }

 private:
  void choose_rows(bool all) {
    if (all) {
      for (int sample = 0; sample < a_.batch; ++sample) {
        for (int token = 0; token < a_.tokens; ++token) chosen_.push_back({sample, token});
      }
      return;
    }
    std::vector<int> edges = {0, 1, 63, 64, 127, 128, 191, 255, 256};
    for (const int before_end : {1, 2, 64, 65, 128}) edges.push_back(a_.tokens - before_end);
    const int samples[] = {0, a_.batch - 1, a_.batch / 2};
    int count = 0;
    for (const int token : edges) {
      if (token >= 0 && token < a_.tokens) chosen_.push_back({samples[count++ % 3], token});
    }
    for (int i = 0; i < 9; ++i) chosen_.push_back({samples[i % 3], random_below(a_.tokens)});
    std::sort(chosen_.begin(), chosen_.end());
  }

  void choose_elements(bool all) {
    if (all) {
      for (int i = 0; i < a_.tokens; ++i) {
        for (int j = 0; j < a_.tokens; ++j) chosen_.push_back({i, j});
      }
      return;
    }
    for (int i = 0; i < 100; ++i)
      chosen_.push_back({random_below(a_.tokens), random_below(a_.tokens)});
    for (int i = 0; i < 60; ++i) {
      const int token = i < 2 ? i * (a_.tokens - 1) : random_below(a_.tokens);
      chosen_.push_back({token, token});
      chosen_.push_back({token, std::min(token + 1, a_.tokens - 1)});
      chosen_.push_back({token, random_below(token + 1)});
    }
    std::sort(chosen_.begin(), chosen_.end());
  }

  int random_below(int bound) {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(bound));
  }

  void product_row(int sample, int token) {
    const size_t sample_size = static_cast<size_t>(a_.tokens) * a_.channels;
    if (sample != loaded_sample_) {
      loaded_ =
          to_host((operation_ == kForward ? a_.x : a_.dy) + sample * sample_size, sample_size);
      if (a_.residual != nullptr)
        residual_ = to_host(a_.residual + sample * sample_size, sample_size);
      loaded_sample_ = sample;
    }
    std::vector<double> sum(a_.channels, 0.0);
    const int first = operation_ == kForward ? 0 : token;
    const int last = operation_ == kForward ? token : a_.tokens - 1;
    for (int other = first; other <= last; ++other) {
      const size_t index = operation_ == kForward ? static_cast<size_t>(token) * a_.columns + other
                                                  : static_cast<size_t>(other) * a_.columns + token;
      const double factor = __bfloat162float(weight_[index]);
      const bf16* row = &loaded_[static_cast<size_t>(other) * a_.channels];
      for (int c = 0; c < a_.channels; ++c) sum[c] += factor * __bfloat162float(row[c]);
    }
    for (int c = 0; c < a_.channels; ++c) {
      if (!bias_.empty()) sum[c] += bias_[token];
      if (!residual_.empty())
        sum[c] += __bfloat162float(residual_[static_cast<size_t>(token) * a_.channels + c]);
    }
    expected_.insert(expected_.end(), sum.begin(), sum.end());
  }

  double weight_gradient(int i, int j) {
    if (j > i) return 0.0;
    const std::vector<bf16>& left = token_rows(dy_rows_, a_.dy, i);
    const std::vector<bf16>& right = token_rows(x_rows_, a_.x, j);
    double sum = 0;
    for (size_t k = 0; k < left.size(); ++k) {
      sum += static_cast<double>(__bfloat162float(left[k])) * __bfloat162float(right[k]);
    }
    return sum;
  }

  // Row `token` of every sample: (batch, channels).
  const std::vector<bf16>& token_rows(std::map<int, std::vector<bf16>>& cache, const bf16* values,
                                      int token) {
    std::vector<bf16>& rows = cache[token];
    if (rows.empty()) {
      rows.resize(static_cast<size_t>(a_.batch) * a_.channels);
      const size_t width = sizeof(bf16) * a_.channels;
      CHECK(cudaMemcpy2D(rows.data(), width, values + static_cast<size_t>(token) * a_.channels,
                         width * a_.tokens, width, a_.batch, cudaMemcpyDeviceToHost));
    }
    return rows;
  }

  // The chosen rows of the device's output.
  std::vector<float> fetch() const {
    std::vector<float> found;
    if (operation_ == kGradWeight) {
      const std::vector<float> all =
          to_host(a_.dweight, static_cast<size_t>(a_.tokens) * a_.tokens);
      for (const auto& [i, j] : chosen_)
        found.push_back(all[static_cast<size_t>(i) * a_.tokens + j]);
      return found;
    }
    const bf16* output = operation_ == kForward ? a_.y : a_.dx;
    for (const auto& [sample, token] : chosen_) {
      const size_t start = (static_cast<size_t>(sample) * a_.tokens + token) * a_.channels;
      for (const bf16 value : to_host(output + start, a_.channels))
        found.push_back(__bfloat162float(value));
    }
    return found;
  }

  bool above_diagonal(size_t index) const {
    return operation_ == kGradWeight && chosen_[index].second > chosen_[index].first;
  }

  std::string place(size_t index) const {
    const size_t width = operation_ == kGradWeight ? 1 : a_.channels;
    const auto& [first, second] = chosen_[index / width];
    std::string text = "[" + std::to_string(first) + ", " + std::to_string(second);
    return text + (width == 1 ? "]" : ", " + std::to_string(index % width) + "]");
  }

  static std::string describe(double found, double expected) {
    char text[96];
    snprintf(text, sizeof(text), " is %g and should be %g", found, expected);
    return text;
  }

  Operation operation_;
  Arguments a_;
  std::vector<std::pair<int, int>> chosen_;
  std::vector<double> expected_;
  std::vector<bf16> weight_, loaded_, residual_;
  std::vector<float> bias_;
  std::map<int, std::vector<bf16>> dy_rows_, x_rows_;
  int loaded_sample_ = -1;
  uint64_t state_ = 1;
};

// ------------------------------------------------------------------------------------------ timing

// Milliseconds per run: the median of runs that rotate through the sets of buffers. Negative if a
// launch failed.
inline double median_milliseconds(const Data& data, const Configuration& configuration) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(begin));
  CHECK(configuration.launch(data.sets.back()));
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float estimate = 0;
  CHECK(cudaEventElapsedTime(&estimate, begin, end));
  const int runs = std::clamp(static_cast<int>(60.0f / std::max(estimate, 1e-3f)), 3, 60);

  std::vector<cudaEvent_t> events(2 * runs);
  for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
  // keep the GPU busy while the first timed runs are queued
  const int warm_runs = runs > 3 ? 3 : 0;
  for (int run = -warm_runs; run < runs; ++run) {
    if (run >= 0) CHECK(cudaEventRecord(events[2 * run]));
    CHECK(configuration.launch(data.sets[(run + warm_runs) % data.sets.size()]));
    if (run >= 0) CHECK(cudaEventRecord(events[2 * run + 1]));
  }
  CHECK(cudaDeviceSynchronize());
  std::vector<float> times(runs);
  for (int run = 0; run < runs; ++run)
    CHECK(cudaEventElapsedTime(&times[run], events[2 * run], events[2 * run + 1]));
  for (cudaEvent_t event : events) CHECK(cudaEventDestroy(event));
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[runs / 2];
}

// ------------------------------------------------------------------------------------------ cuBLAS

// cuBLAS is loaded at run time: its library lies in different places (toolkit, Python wheel), and
// the ladder also runs without it. $CUBLAS_LIBRARY names the file; `libraries.py` finds it.
class Cublas {
 public:
  static Cublas& get() {
    static Cublas cublas;
    return cublas;
  }
  explicit operator bool() const { return handle_ != nullptr; }

  // Column-major, as cuBLAS counts: a row-major (rows, columns) array is its (columns, rows)
  // matrix.
  cudaError_t multiply(bool transpose_a, bool transpose_b, int m, int n, int k, const bf16* a,
                       int lda, int64_t stride_a, const bf16* b, int ldb, int64_t stride_b,
                       float beta, void* c, bool c_is_float, int ldc, int64_t stride_c, int batch) {
    const float alpha = 1.0f;
    const int status =
        gemm_(handle_, transpose_a, transpose_b, m, n, k, &alpha, a, CUDA_R_16BF, lda, stride_a, b,
              CUDA_R_16BF, ldb, stride_b, &beta, c, c_is_float ? CUDA_R_32F : CUDA_R_16BF, ldc,
              stride_c, batch, kCompute32, kDefault);
    if (status != 0) stop("cublasGemmStridedBatchedEx returned " + std::to_string(status));
    return cudaSuccess;
  }

 private:
  static constexpr int kCompute32 = 68;  // CUBLAS_COMPUTE_32F
  static constexpr int kDefault = -1;    // CUBLAS_GEMM_DEFAULT
  using Create = int (*)(void**);
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, cudaDataType, int,
                       long long, const void*, cudaDataType, int, long long, const void*, void*,
                       cudaDataType, int, long long, int, int, int);

  Cublas() {
    void* library = nullptr;
    std::vector<std::string> names = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
    if (const char* name = getenv("CUBLAS_LIBRARY"); name != nullptr && *name != '\0')
      names.insert(names.begin(), name);
    for (const std::string& name : names) {
      const size_t slash = name.rfind('/');
      // the library's second half, from the same folder: the loader may not search there
      if (slash != std::string::npos) {
        const std::string light =
            name.substr(0, slash + 1) + "libcublasLt" + name.substr(slash + 10);
        dlopen(light.c_str(), RTLD_NOW | RTLD_GLOBAL);
      }
      if ((library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL)) != nullptr) break;
    }
    if (library == nullptr) return;
    const auto create = reinterpret_cast<Create>(dlsym(library, "cublasCreate_v2"));
    gemm_ = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmStridedBatchedEx"));
    if (create == nullptr || gemm_ == nullptr || create(&handle_) != 0) handle_ = nullptr;
  }

  void* handle_ = nullptr;
  Gemm gemm_ = nullptr;
};

// dweight[i] = sum over b of products[b][i].
static __global__ void sum_products_kernel(const bf16* products, float* dweight, int batch,
                                           size_t size) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size;
       i += stride) {
    float sum = 0.0f;
#pragma unroll 4
    for (int b = 0; b < batch; ++b) sum += __bfloat162float(products[b * size + i]);
    dweight[i] = sum;
  }
}

// The dense product, which also multiplies the zeros of the upper half; for dW the full square.
inline Version cublas_version(Operation operation) {
  Version version = {0, "cuBLAS, the dense product", false, {}};
  if (!Cublas::get())
    version.missing = "not found; name its file: export CUBLAS_LIBRARY=/path/to/libcublas.so.13";
  const auto product = [operation](const Arguments& a) {
    const bool forward = operation == kForward;
    const int64_t sample = static_cast<int64_t>(a.tokens) * a.channels;
    return Cublas::get().multiply(false, !forward, a.channels, a.tokens, a.tokens,
                                  forward ? a.x : a.dy, a.channels, sample, a.weight, a.columns, 0,
                                  0.0f, forward ? a.y : a.dx, false, a.channels, sample, a.batch);
  };
  const auto batched = [](const Arguments& a) {  // as torch.bmm(dy, x^T).sum(0)
    const int64_t sample = static_cast<int64_t>(a.tokens) * a.channels;
    const int64_t square = static_cast<int64_t>(a.tokens) * a.tokens;
    bf16* products = static_cast<bf16*>(scratch(sizeof(bf16) * square * a.batch));
    Cublas::get().multiply(true, false, a.tokens, a.tokens, a.channels, a.x, a.channels, sample,
                           a.dy, a.channels, sample, 0.0f, products, false, a.tokens, square,
                           a.batch);
    return launch(sum_products_kernel, dim3(8 * device().multiProcessorCount), dim3(256), 0,
                  static_cast<const bf16*>(products), a.dweight, a.batch,
                  static_cast<size_t>(square));
  };
  const auto loop = [](const Arguments& a) {
    const int64_t sample = static_cast<int64_t>(a.tokens) * a.channels;
    for (int b = 0; b < a.batch; ++b) {
      Cublas::get().multiply(true, false, a.tokens, a.tokens, a.channels, a.x + b * sample,
                             a.channels, 0, a.dy + b * sample, a.channels, 0, b == 0 ? 0.0f : 1.0f,
                             a.dweight, true, a.tokens, 0, 1);
    }
    return cudaSuccess;
  };
  if (operation == kGradWeight) {
    version.configurations = {{"batched product, then a sum", batched},
                              {"one product a sample, added up", loop}};
  } else {
    version.configurations = {{"strided batched product", product}};
  }
  return version;
}

// ----------------------------------------------------------------------------------------- results

struct Row {
  int version;
  std::string adds, configuration, problem;  // problem: why there is no time; empty if all is well
  double milliseconds, error;
};

inline std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return result + "\"";
}

inline void write_json(const std::string& path, const Data& data, const std::vector<Row>& rows,
                       double cublas) {
  FILE* file = fopen(path.c_str(), "w");
  if (file == nullptr) stop("cannot write " + path);
  const Arguments& a = data.sets[0];
  int driver = 0, runtime = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  fprintf(file, "[");
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    fprintf(file,
            "%s\n {\"operation\": \"%s\", \"version\": %d, \"adds\": %s, \"configuration\": %s,",
            i ? "," : "", operation_name(data.operation), row.version, quoted(row.adds).c_str(),
            quoted(row.configuration).c_str());
    fprintf(file, " \"batch\": %d, \"tokens\": %d, \"channels\": %d,", a.batch, a.tokens,
            a.channels);
    if (row.problem.empty()) {
      fprintf(file, " \"milliseconds\": %.6g, \"useful_tflops\": %.6g, \"relative_error\": %.3g,",
              row.milliseconds, data.useful_flops() / row.milliseconds / 1e9, row.error);
      if (cublas > 0)
        fprintf(file, " \"percent_of_cublas\": %.6g,", 100 * cublas / row.milliseconds);
    } else {
      fprintf(file, " \"problem\": %s,", quoted(row.problem).c_str());
    }
    fprintf(file, " \"device\": %s, \"driver\": %d, \"runtime\": %d}",
            quoted(device().name).c_str(), driver, runtime);
  }
  fprintf(file, "\n]\n");
  fclose(file);
}

// -------------------------------------------------------------------------------- the command line

struct Options {
  int version = -1;  // -1: all
  int tokens = 512, batch = 128, channels = 1024;
  std::string json;
};

// Must be called first: it also sets the path of the trainer's library.
inline Options parse(int count, char** arguments, int versions = 7) {
  const std::string usage =
      std::string("usage: ") + arguments[0] + " VERSION|all [--tokens 512] [--batch 128] " +
      "[--channels 1024] [--json FILE] [--library FILE]; VERSION is 0 (cuBLAS) to " +
      std::to_string(versions);
  if (count < 2) stop(usage);
  Options options;
  const std::string which = arguments[1];
  if (which != "all") {
    if (which.empty() || which.find_first_not_of("0123456789") != std::string::npos ||
        atoi(which.c_str()) > versions) {
      stop("there is no version " + which + "; " + usage);
    }
    options.version = atoi(which.c_str());
  }
  for (int i = 2; i < count; i += 2) {
    const std::string name = arguments[i];
    if (i + 1 == count) stop(name + " needs a value; " + usage);
    const char* value = arguments[i + 1];
    if (name == "--tokens")
      options.tokens = atoi(value);
    else if (name == "--batch")
      options.batch = atoi(value);
    else if (name == "--channels")
      options.channels = atoi(value);
    else if (name == "--json")
      options.json = value;
    else if (name == "--library")
      setenv("MIXER_KERNELS", value, 1);
    else
      stop("unknown option " + name + "; " + usage);
  }
  if (options.tokens < 1 || options.tokens > 32768) stop("--tokens must be between 1 and 32768");
  if (options.batch < 1 || options.batch > 65535) stop("--batch must be between 1 and 65535");
  if (options.channels < 8 || options.channels % 8 != 0) stop("--channels must be a multiple of 8");
  return options;
}

// Runs the configuration once on output filled with NaN (bytes of 0xff) and compares.
inline std::string check(const Data& data, const Reference& reference,
                         const Configuration& configuration, bool with_upper_half, double* error) {
  CHECK(cudaMemset(data.output(0), 0xff, data.output_bytes));
  const cudaError_t status = configuration.launch(data.sets[0]);
  if (status != cudaSuccess) {
    cudaGetLastError();  // clears the error, so that the next configuration starts clean
    return cudaGetErrorString(status);
  }
  if (const cudaError_t fault = cudaDeviceSynchronize(); fault != cudaSuccess)
    return cudaGetErrorString(fault);
  return reference.compare(with_upper_half, error);
}

// main() of a ladder: checks and times version after version, prints a line for each configuration.
inline int run_ladder(Operation operation, const Options& options,
                      const std::vector<Version>& versions) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  const int capability = 10 * device().major + device().minor;
  printf("%s on %s (compute capability %d.%d, %d multiprocessors)\n", operation_name(operation),
         device().name, device().major, device().minor, device().multiProcessorCount);

  // First two small problems of odd sizes, with every output checked; then the large one, with
  // sampled rows checked, and timed.
  const bool fused = operation == kForward;  // with bias and residual
  const Data small(operation, 3, 200, 136, fused, 1);
  const Data odd(operation, 2, 331, 264, fused, 1);
  const Reference small_reference(small, true), odd_reference(odd, true);
  const size_t set_bytes =
      sizeof(bf16) * 2 * options.batch * static_cast<size_t>(options.tokens) * options.channels;
  size_t free_bytes = 0, total_bytes = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const size_t wanted =
      3 * static_cast<size_t>(std::max(device().l2CacheSize, 1 << 20)) / set_bytes + 1;
  const size_t most = std::max(free_bytes / 2 / set_bytes, static_cast<size_t>(1));
  const int sets = static_cast<int>(
      std::min({std::max(wanted, static_cast<size_t>(2)), most, static_cast<size_t>(32)}));
  const Data data(operation, options.batch, options.tokens, options.channels, false, sets);
  const Reference reference(data, false);
  printf("batch %d, tokens %d, channels %d; %d sets of %.0f MB\n", options.batch, options.tokens,
         options.channels, sets, data.bytes_of_set() / 1e6);

  std::vector<Version> all = {cublas_version(operation)};
  all.insert(all.end(), versions.begin(), versions.end());
  std::vector<Row> rows;
  double cublas = 0;
  bool failed = false;
  for (const Version& version : all) {
    if (version.number != 0 && options.version >= 0 && options.version != version.number) continue;
    printf("version %d: %s\n", version.number, version.adds.c_str());
    if (version.hopper && capability != 90) {
      printf("  needs compute capability 9.0\n");
      continue;
    }
    if (!version.missing.empty()) {
      printf("  %s\n", version.missing.c_str());
      continue;
    }
    for (const Configuration& configuration : version.configurations) {
      Row row = {version.number, version.adds, configuration.name, "", 0, 0};
      double error = 0;
      // cuBLAS adds no bias and no residual, so it runs the large problem only
      const bool plain = version.number == 0;
      if (!plain) row.problem = check(small, small_reference, configuration, true, &error);
      if (!plain && row.problem.empty())
        row.problem = check(odd, odd_reference, configuration, true, &error);
      if (row.problem.empty())
        row.problem = check(data, reference, configuration, !plain, &row.error);
      if (row.problem.empty()) {
        row.milliseconds = median_milliseconds(data, configuration);
        if (plain && (cublas == 0 || row.milliseconds < cublas)) cublas = row.milliseconds;
        printf("  %-44s %9.4f ms %8.2f TFLOP/s", configuration.name.c_str(), row.milliseconds,
               data.useful_flops() / row.milliseconds / 1e9);
        if (cublas > 0) printf(" %7.1f %% of cuBLAS", 100 * cublas / row.milliseconds);
        printf("   error %.1e\n", row.error);
      } else {
        failed = true;
        printf("  %-44s FAILED: %s\n", configuration.name.c_str(), row.problem.c_str());
      }
      rows.push_back(row);
      // a kernel faulted: this process cannot use the GPU any more
      if (failed && cudaDeviceSynchronize() != cudaSuccess) {
        if (!options.json.empty()) write_json(options.json, data, rows, cublas);
        stop("the GPU cannot be used after this fault; run the other versions by their numbers");
      }
    }
  }
  if (!options.json.empty()) write_json(options.json, data, rows, cublas);
  return failed ? 1 : 0;
}
