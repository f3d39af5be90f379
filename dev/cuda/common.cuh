// What the three ladders share: random data, the check against fp64, timing, and the command line.
// A ladder is a list of versions, a version a list of configurations, a configuration a function
// that launches.
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

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
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

// The values next to each other, as text.
template <typename... Values>
std::string text(const Values&... values) {
  std::ostringstream stream;
  (stream << ... << values);
  return stream.str();
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

  void* output() const {
    const Arguments& a = sets[0];
    if (operation == kGradWeight) return a.dweight;
    return operation == kForward ? a.y : a.dx;
  }

  // Multiplications and additions that the triangle needs, the same for all three operations.
  double useful_flops() const {
    const Arguments& a = sets[0];
    return static_cast<double>(a.batch) * a.tokens * (a.tokens + 1.0) * a.channels;
  }
};

// ------------------------------------------------------------------------------------------- check

// The whole output in fp64 from the same bf16 inputs, one thread an element: slow, and simple
// enough to be trusted.
static __global__ void reference_kernel(Operation operation, const Arguments a, float* expected,
                                        size_t count, double* norm) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  double squares = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    double sum = 0;
    if (operation == kGradWeight) {
      const size_t row = i / a.tokens, column = i % a.tokens;
      for (int b = 0; b < a.batch && column <= row; ++b) {
        const bf16* dy = a.dy + (static_cast<size_t>(b) * a.tokens + row) * a.channels;
        const bf16* x = a.x + (static_cast<size_t>(b) * a.tokens + column) * a.channels;
        for (int c = 0; c < a.channels; ++c)
          sum += static_cast<double>(__bfloat162float(dy[c])) * __bfloat162float(x[c]);
      }
    } else {
      const bool forward = operation == kForward;
      const int token = i / a.channels % a.tokens;
      const bf16* values = (forward ? a.x : a.dy) + i - static_cast<size_t>(token) * a.channels;
      for (int other = forward ? 0 : token; other < (forward ? token + 1 : a.tokens); ++other) {
        const size_t row = forward ? token : other, column = forward ? other : token;
        sum += static_cast<double>(__bfloat162float(a.weight[row * a.columns + column])) *
               __bfloat162float(values[static_cast<size_t>(other) * a.channels]);
      }
      if (a.bias != nullptr) sum += a.bias[token];
      if (a.residual != nullptr) sum += __bfloat162float(a.residual[i]);
    }
    expected[i] = sum;
    squares += sum * sum;
  }
  atomicAdd(norm, squares);
}

struct Verdict {
  double norm, difference;       // sums of squares
  unsigned long long first_bad;  // index of the first wrong element
};

// An element above the diagonal (triangle > 0: of a square of that size) must be an exact zero, or
// is left out. Elsewhere single elements are checked too: one wrong element among many right ones
// hardly changes the relative error.
template <typename Value>
__global__ void compare_kernel(const Value* found, const float* expected, size_t count,
                               int triangle, bool with_upper_half, Verdict* verdict) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  const double mean = sqrt(verdict->norm / count);
  double squares = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const bool above = triangle > 0 && i % triangle > i / triangle;
    if (above && !with_upper_half) continue;
    const double gap = fabs(static_cast<double>(static_cast<float>(found[i])) - expected[i]);
    const double bound = above ? 0 : 0.01 * fabs(static_cast<double>(expected[i])) + 0.01 * mean;
    if (!(gap <= bound)) atomicMin(&verdict->first_bad, static_cast<unsigned long long>(i));
    squares += gap * gap;
  }
  atomicAdd(&verdict->difference, squares);
}

class Reference {
 public:
  explicit Reference(const Data& data) : data_(data) {
    const bool square = data.operation == kGradWeight;
    count_ = data.output_bytes / (square ? sizeof(float) : sizeof(bf16));
    CHECK(cudaMalloc(&expected_, count_ * sizeof(float)));
    CHECK(cudaMallocManaged(&verdict_, sizeof(Verdict)));
    *verdict_ = {};
    CHECK(launch(reference_kernel, dim3(2048), dim3(256), 0, data.operation, data.sets[0],
                 expected_, count_, &verdict_->norm));
    CHECK(cudaDeviceSynchronize());
  }

  // Runs the configuration once on output filled with NaN (bytes of 0xff). Returns what is wrong,
  // or an empty string. *error: ||output - expected|| / ||expected||.
  std::string check(const Configuration& configuration, bool with_upper_half, double* error) const {
    CHECK(cudaMemset(data_.output(), 0xff, data_.output_bytes));
    cudaError_t status = configuration.launch(data_.sets[0]);
    cudaGetLastError();  // clears the error, so that the next configuration starts clean
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status != cudaSuccess) return cudaGetErrorString(status);
    verdict_->difference = 0;
    verdict_->first_bad = count_;
    const Arguments& a = data_.sets[0];
    if (data_.operation == kGradWeight) {
      CHECK(launch(compare_kernel<float>, dim3(2048), dim3(256), 0, a.dweight, expected_, count_,
                   a.tokens, with_upper_half, verdict_));
    } else {
      CHECK(launch(compare_kernel<bf16>, dim3(2048), dim3(256), 0,
                   static_cast<bf16*>(data_.output()), expected_, count_, 0, true, verdict_));
    }
    CHECK(cudaDeviceSynchronize());
    *error = std::sqrt(verdict_->difference / verdict_->norm);
    if (verdict_->first_bad < count_) return describe(verdict_->first_bad);
    return *error <= 5e-3 ? "" : "relative error " + std::to_string(*error) + " is above 0.005";
  }

 private:
  std::string describe(size_t index) const {
    const Arguments& a = data_.sets[0];
    float found = 0, expected = 0;
    CHECK(cudaMemcpy(&expected, expected_ + index, sizeof(float), cudaMemcpyDeviceToHost));
    char text[128];
    if (data_.operation == kGradWeight) {
      CHECK(cudaMemcpy(&found, a.dweight + index, sizeof(float), cudaMemcpyDeviceToHost));
      snprintf(text, sizeof(text), "[%zu, %zu] is %g and should be %g", index / a.tokens,
               index % a.tokens, found, expected);
    } else {
      bf16 value;
      CHECK(cudaMemcpy(&value, static_cast<bf16*>(data_.output()) + index, sizeof(bf16),
                       cudaMemcpyDeviceToHost));
      const size_t row = index / a.channels;
      snprintf(text, sizeof(text), "[%zu, %zu, %zu] is %g and should be %g", row / a.tokens,
               row % a.tokens, index % a.channels, __bfloat162float(value), expected);
    }
    return text;
  }

  const Data& data_;
  size_t count_;
  float* expected_ = nullptr;
  Verdict* verdict_ = nullptr;
};

// ------------------------------------------------------------------------------------------ timing

// Milliseconds per run: the median of runs that rotate through the sets of buffers.
inline double median_milliseconds(const Data& data, const Configuration& configuration) {
  const auto time = [&](int runs, int warm_runs) {
    std::vector<cudaEvent_t> events(2 * runs);
    for (cudaEvent_t& event : events) CHECK(cudaEventCreate(&event));
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
    std::sort(times.begin(), times.end());
    return times[runs / 2];
  };
  const int runs = std::clamp(static_cast<int>(60.0f / std::max(time(1, 0), 1e-3f)), 3, 60);
  return time(runs,
              runs > 3 ? 3 : 0);  // warm runs keep the GPU busy while the timed ones are queued
}

// ----------------------------------------------------------------------------------------- results

struct Row {
  int version;
  std::string adds, configuration, problem;  // problem: why there is no time; empty if all is well
  double milliseconds, error;
};

inline void write_json(const std::string& path, const Data& data, const std::vector<Row>& rows,
                       double cublas) {
  FILE* file = fopen(path.c_str(), "w");
  if (file == nullptr) stop("cannot write " + path);
  const Arguments& a = data.sets[0];
  int driver = 0, runtime = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  const char* separator = "[";
  for (const Row& row : rows) {
    fprintf(file,
            "%s\n {\"operation\": \"%s\", \"version\": %d, \"adds\": \"%s\","
            " \"configuration\": \"%s\", \"batch\": %d, \"tokens\": %d, \"channels\": %d,",
            separator, operation_name(data.operation), row.version, row.adds.c_str(),
            row.configuration.c_str(), a.batch, a.tokens, a.channels);
    if (row.problem.empty()) {
      fprintf(file, " \"milliseconds\": %.6g, \"useful_tflops\": %.6g, \"relative_error\": %.3g,",
              row.milliseconds, data.useful_flops() / row.milliseconds / 1e9, row.error);
      if (cublas > 0)
        fprintf(file, " \"percent_of_cublas\": %.6g,", 100 * cublas / row.milliseconds);
    } else {
      fprintf(file, " \"problem\": \"%s\",", row.problem.c_str());
    }
    fprintf(file, " \"device\": \"%s\", \"driver\": %d, \"runtime\": %d}", device().name, driver,
            runtime);
    separator = ",";
  }
  fprintf(file, rows.empty() ? "[]\n" : "\n]\n");
  fclose(file);
}

// -------------------------------------------------------------------------------- the command line

struct Options {
  int version = -1;  // -1: all
  int tokens = 512, batch = 128, channels = 1024;
  std::string json;
};

// Must be called first: it also sets the path of the trainer's library.
inline Options parse(int count, char** arguments) {
  const std::string usage =
      std::string("usage: ") + arguments[0] + " VERSION|all [--tokens 512] [--batch 128] " +
      "[--channels 1024] [--json FILE] [--library FILE]; VERSION is 0 (cuBLAS) to 7";
  if (count < 2) stop(usage);
  Options options;
  const std::string which = arguments[1];
  if (which.size() == 1 && which[0] >= '0' && which[0] <= '7')
    options.version = which[0] - '0';
  else if (which != "all")
    stop("there is no version " + which + "; " + usage);
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

// main() of a ladder: checks and times version after version, cuBLAS first, and prints a line for
// each configuration.
inline int run_ladder(Operation operation, const Options& options,
                      const std::vector<Version>& versions) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  // First two small problems of odd sizes, then the large one, which is also timed, on so many sets
  // of buffers that they are larger than three times the L2 cache.
  const bool fused = operation == kForward;  // with bias and residual
  const Data small(operation, 3, 200, 136, fused, 1), odd(operation, 2, 331, 264, fused, 1);
  const size_t set_bytes =
      sizeof(bf16) * 2 * options.batch * static_cast<size_t>(options.tokens) * options.channels;
  size_t free_bytes = 0, total_bytes = 0;
  CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const size_t wanted =
      3 * static_cast<size_t>(std::max(device().l2CacheSize, 1 << 20)) / set_bytes;
  const size_t most = std::min<size_t>(free_bytes / 2 / set_bytes, 32);
  const int sets = std::max<size_t>(1, std::min(std::max<size_t>(wanted + 1, 2), most));
  const Data data(operation, options.batch, options.tokens, options.channels, false, sets);
  const Reference small_reference(small), odd_reference(odd), reference(data);
  printf("%s on %s (compute capability %d.%d): batch %d, tokens %d, channels %d; %d sets\n",
         operation_name(operation), device().name, device().major, device().minor, options.batch,
         options.tokens, options.channels, sets);

  std::vector<Row> rows;
  double cublas = 0;
  bool failed = false;
  for (const Version& version : versions) {
    const bool plain = version.number == 0;  // cuBLAS adds no bias and no residual
    if (!plain && options.version >= 0 && options.version != version.number) continue;
    printf("version %d: %s\n", version.number, version.adds.c_str());
    const bool too_old = version.hopper && (device().major != 9 || device().minor != 0);
    const std::string missing = too_old ? "needs compute capability 9.0" : version.missing;
    if (!missing.empty()) {
      printf("  %s\n", missing.c_str());
      continue;
    }
    for (const Configuration& configuration : version.configurations) {
      Row row = {version.number, version.adds, configuration.name, "", 0, 0};
      for (const Reference* each : {&small_reference, &odd_reference, &reference}) {
        if (row.problem.empty() && (!plain || each == &reference))
          row.problem = each->check(configuration, !plain, &row.error);
      }
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
