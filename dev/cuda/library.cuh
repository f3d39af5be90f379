// The first and the last version of each ladder, from shared libraries that are loaded at run time:
// cuBLAS ($CUBLAS_LIBRARY), and the trainer's own kernels (--library FILE or $MIXER_KERNELS), which
// mixer/ops/build.py builds from mixer/ops/csrc.
#pragma once

#include <dlfcn.h>
#include <library_types.h>

#include "../../mixer/ops/csrc/params.h"
#include "common.cuh"

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

// ----------------------------------------------------------------------------- the trainer's
// kernels

class Library {
 public:
  static Library& get() {
    static Library library;
    return library;
  }
  const std::string& problem() const { return problem_; }

  cudaError_t run(Operation operation, const Arguments& a) {
    TriangularConvParams params = {};
    params.packed = const_cast<bf16*>(a.weight);
    params.batch = a.batch, params.tokens = params.context = a.tokens, params.channels = a.channels;
    params.columns = a.columns, params.heads = 1;
    params.dtype = MIXER_BFLOAT16, params.weight_dtype = MIXER_FLOAT32;
    params.capability = 10 * device().major + device().minor,
    params.processors = device().multiProcessorCount;
    params.x = a.x, params.dy = a.dy, params.bias = a.bias, params.residual = a.residual;
    params.y = a.y, params.dx = a.dx, params.dweight = a.dweight;
    const int64_t row = a.channels, sample = row * a.tokens;
    params.x_token_stride = params.dy_token_stride = params.residual_token_stride = row;
    params.x_batch_stride = params.dy_batch_stride = params.residual_batch_stride = sample;
    if (operation == kGradWeight)
      params.workspace = scratch(static_cast<size_t>(workspace_(&params)));
    return static_cast<cudaError_t>(entries_[operation](&params));
  }

 private:
  using Entry = int (*)(const TriangularConvParams*);
  using Size = int64_t (*)(const TriangularConvParams*);

  Library() {
    const char* path = getenv("MIXER_KERNELS");
    if (path == nullptr || *path == '\0') {
      problem_ =
          "needs the library: --library FILE or MIXER_KERNELS, "
          "`python -m mixer.ops.build` prints where it is";
      return;
    }
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      problem_ =
          std::string("cannot load it (") + dlerror() + "); build it: `python -m mixer.ops.build`";
      return;
    }
    const auto size = find<int (*)()>("mixer_params_size");
    entries_[kForward] = find<Entry>("mixer_forward");
    entries_[kGradInput] = find<Entry>("mixer_grad_input");
    entries_[kGradWeight] = find<Entry>("mixer_grad_weight");
    workspace_ = find<Size>("mixer_grad_weight_workspace");
    const bool complete = size && workspace_ && entries_[kForward] &&
                          entries_[kGradInput] && entries_[kGradWeight];
    if (!complete || size() != static_cast<int>(sizeof(TriangularConvParams))) {
      problem_ =
          std::string(path) +
          " has another interface than params.h; build both anew: `python -m mixer.ops.build`";
    }
  }

  template <typename Function>
  Function find(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  Entry entries_[3] = {};
  Size workspace_ = nullptr;
  std::string problem_;
};

inline Version library_version(Operation operation) {
  const auto run = [operation](const Arguments& a) { return Library::get().run(operation, a); };
  return {7,
          "the trainer's own kernel: persistent blocks, tiles dealt out evenly, multicast",
          true,
          {{"as the trainer calls it", run}},
          Library::get().problem()};
}
