// A weight by lag with a short window, W[h,i,j] = lags[h, i - j] for up to 8 lags:
//
//   y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over k < window of lags[h,k] * x[b,i-k,c],
//   dx[b,j,c] = sum over k of lags[h,k] * dy[b,j+k,c],
//   dlags[h,k] = sum over b, j and c of dy[b,j+k,c] * x[b,j,c].
//
// Memory limits this, not arithmetic, so there are no tiles and no tensor cores (which take over
// where arithmetic would limit it, from 9 lags on): forward reads x and
// writes y once; the gradients come from one pass that reads x and dy and writes dx once. A thread
// computes a *run* of tokens in 8 channels of a head. The tokens around a run, which the window
// needs too, belong to other runs of the same block and come from the cache.
//
// A bias may have one number for all tokens (context = 1). Its gradient comes from the same pass;
// that of a bias by position from grad_bias.cu.
//
// Every thread adds up the lags' gradient over its runs, a block over its threads, and a second
// kernel over the blocks of a head, each in a fixed order: results are reproducible bit for bit.
#include <type_traits>

#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kVector = 8;           // values of 16 bits in 16 bytes
constexpr int kBlocksPerProcessor = 8;
constexpr int kForwardRun = 8;       // tokens
constexpr int kGradientRun = 4;

// How many blocks share the runs of a head. Blocks: (heads, parts).
int parts_of(const TriangularConvParams& params, int run) {
  const int64_t threads = params.batch * ceil_div(params.tokens, run) *
                          (params.channels / params.heads / kVector);
  const int64_t most = ceil_div(params.processors * kBlocksPerProcessor, params.heads);
  const int64_t parts = ceil_div(threads, kThreads);
  return static_cast<int>(parts < most ? parts : most);
}

// The runs of a thread: for (Runs<kRun> run(params, parts); run.valid(); run.next()).
template <int kRun>
struct Runs {
  const TriangularConvParams& params;
  const int vectors, runs, step;  // vectors of a head's channels; runs of a sample
  int64_t index;                  // of the vectors of all runs of the head

  __device__ __forceinline__ Runs(const TriangularConvParams& params, int parts)
      : params(params),
        vectors(params.channels / params.heads / kVector),
        runs(static_cast<int>(ceil_div(params.tokens, kRun))),
        step(parts * kThreads),
        index(static_cast<int64_t>(blockIdx.x % parts) * kThreads + threadIdx.x) {}
  __device__ __forceinline__ bool valid() const {
    return index < static_cast<int64_t>(params.batch) * runs * vectors;
  }
  __device__ __forceinline__ void next() { index += step; }
  __device__ __forceinline__ int64_t sample() const { return index / vectors / runs; }
  __device__ __forceinline__ int first_token() const {
    return static_cast<int>(index / vectors % runs) * kRun;
  }
  // In all heads.
  __device__ __forceinline__ int channel(int head) const {
    return (head * vectors + static_cast<int>(index % vectors)) * kVector;
  }
};

template <typename Element>
__device__ __forceinline__ uint4 load(const Element* place, bool inside) {
  uint4 bits = {};
  if (inside) bits = *reinterpret_cast<const uint4*>(place);
  return bits;
}

template <typename Element>
__device__ __forceinline__ void unpack(const uint4& bits, float (&value)[kVector]) {
  const Element* values = reinterpret_cast<const Element*>(&bits);
#pragma unroll
  for (int c = 0; c < kVector; ++c) value[c] = float(values[c]);
}

template <typename Element>
__device__ __forceinline__ uint4 pack(const float (&value)[kVector]) {
  uint4 bits;
  Element* values = reinterpret_cast<Element*>(&bits);
#pragma unroll
  for (int c = 0; c < kVector; ++c) values[c] = Element(value[c]);
  return bits;
}

// The lags of a head, rounded as other kernels round weights, and zeros after the window.
template <typename Element, int kLags>
__device__ __forceinline__ void load_lags(const TriangularConvParams& params, int head,
                                          float (&lags)[kLags]) {
#pragma unroll
  for (int lag = 0; lag < kLags; ++lag) {
    const int64_t place = static_cast<int64_t>(head) * params.window + lag;
    lags[lag] = lag < params.window
                    ? float(Element(load_float(params.weight, params.weight_dtype, place)))
                    : 0.0f;
  }
}

template <typename Element, int kLags>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const TriangularConvParams params, int parts) {
  constexpr int kRun = kForwardRun, kBefore = kLags - 1;
  const int head = blockIdx.x / parts;
  float lags[kLags];
  load_lags<Element>(params, head, lags);
  for (Runs<kRun> run(params, parts); run.valid(); run.next()) {
    const int first = run.first_token(), channel = run.channel(head);
    const int64_t sample = run.sample();
    const Element* const x =
        static_cast<const Element*>(params.x) + sample * params.x_batch_stride + channel;
    uint4 loaded[kBefore + kRun];  // from token first - kBefore on
#pragma unroll
    for (int i = 0; i < kBefore + kRun; ++i) {
      const int token = first + i - kBefore;
      const bool needed = i > kBefore - params.window && token >= 0 && token < params.tokens;
      loaded[i] = load(x + token * params.x_token_stride, needed);
    }
    float sum[kRun][kVector] = {};
#pragma unroll
    for (int i = 0; i < kBefore + kRun; ++i) {
      float value[kVector];
      unpack<Element>(loaded[i], value);
#pragma unroll
      for (int row = 0; row < kRun; ++row) {
        const int lag = row + kBefore - i;
        if (lag < 0 || lag >= kLags) continue;
#pragma unroll
        for (int c = 0; c < kVector; ++c) sum[row][c] += lags[lag] * value[c];
      }
    }
#pragma unroll
    for (int row = 0; row < kRun; ++row) {
      const int token = first + row;
      if (token >= params.tokens) break;
      float bias = 0.0f, residual[kVector] = {};
      if (params.bias != nullptr) {
        const int64_t place =
            static_cast<int64_t>(head) * params.context + (params.context == 1 ? 0 : token);
        bias = load_float(params.bias, params.weight_dtype, place);
      }
      if (params.residual != nullptr) {
        const int64_t place = sample * params.residual_batch_stride +
                              token * params.residual_token_stride + channel;
        unpack<Element>(load(static_cast<const Element*>(params.residual) + place, true), residual);
      }
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum[row][c] += bias + residual[c];
      Element* const y = static_cast<Element*>(params.y) +
                         (sample * params.tokens + token) * params.channels + channel;
      *reinterpret_cast<uint4*>(y) = pack<Element>(sum[row]);
    }
  }
}

// sums: (heads, parts, kLags + 1), the last number for the bias.
template <typename Element, int kLags>
__global__ void __launch_bounds__(kThreads)
    gradients_kernel(const TriangularConvParams params, int parts, float* sums) {
  constexpr int kRun = kGradientRun, kAfter = kLags - 1;
  const int head = blockIdx.x / parts;
  float lags[kLags];
  load_lags<Element>(params, head, lags);
  float gradient[kLags + 1] = {};
  for (Runs<kRun> run(params, parts); run.valid(); run.next()) {
    const int first = run.first_token(), channel = run.channel(head);
    const int64_t sample = run.sample();
    const Element* const x =
        static_cast<const Element*>(params.x) + sample * params.x_batch_stride + channel;
    const Element* const dy =
        static_cast<const Element*>(params.dy) + sample * params.dy_batch_stride + channel;
    uint4 loaded_x[kRun], loaded_dy[kRun + kAfter];  // from token `first` on
#pragma unroll
    for (int row = 0; row < kRun; ++row) {
      const int token = first + row;
      loaded_x[row] = load(x + token * params.x_token_stride, token < params.tokens);
    }
#pragma unroll
    for (int i = 0; i < kRun + kAfter; ++i) {
      const int token = first + i;
      const bool needed = i < kRun - 1 + params.window && token < params.tokens;
      loaded_dy[i] = load(dy + token * params.dy_token_stride, needed);
    }
    float input[kRun][kVector], sum[kRun][kVector] = {};
#pragma unroll
    for (int row = 0; row < kRun; ++row) unpack<Element>(loaded_x[row], input[row]);
#pragma unroll
    for (int i = 0; i < kRun + kAfter; ++i) {
      float value[kVector];
      unpack<Element>(loaded_dy[i], value);
#pragma unroll
      for (int row = 0; row < kRun; ++row) {
        const int lag = i - row;
        if (lag < 0 || lag >= kLags) continue;
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          sum[row][c] += lags[lag] * value[c];
          gradient[lag] += input[row][c] * value[c];
        }
      }
      if (i >= kRun) continue;
#pragma unroll
      for (int c = 0; c < kVector; ++c) gradient[kLags] += value[c];
    }
#pragma unroll
    for (int row = 0; row < kRun; ++row) {
      if (first + row >= params.tokens) break;
      Element* const dx = static_cast<Element*>(params.dx) +
                          (sample * params.tokens + first + row) * params.channels + channel;
      *reinterpret_cast<uint4*>(dx) = pack<Element>(sum[row]);
    }
  }

  __shared__ float of_warps[kThreads / kWarp * (kLags + 1)];
#pragma unroll
  for (int number = 0; number <= kLags; ++number) {
    float sum = gradient[number];
    for (int apart = kWarp / 2; apart > 0; apart /= 2)
      sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp * (kLags + 1) + number] = sum;
  }
  __syncthreads();
  if (threadIdx.x > kLags) return;
  float sum = 0.0f;
  for (int warp = 0; warp < kThreads / kWarp; ++warp)
    sum += of_warps[warp * (kLags + 1) + threadIdx.x];
  sums[static_cast<int64_t>(blockIdx.x) * (kLags + 1) + threadIdx.x] = sum;
}

// Blocks of one warp: (heads, numbers of a head).
__global__ void __launch_bounds__(kWarp)
    finish_kernel(const TriangularConvParams params, int parts, int numbers, const float* sums) {
  const int head = blockIdx.x / numbers, number = blockIdx.x % numbers;
  float sum = 0.0f;
  for (int part = threadIdx.x; part < parts; part += kWarp)
    sum += sums[(static_cast<int64_t>(head) * parts + part) * numbers + number];
  for (int apart = kWarp / 2; apart > 0; apart /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  if (threadIdx.x > 0) return;
  if (number < params.window) params.dweight[static_cast<int64_t>(head) * params.window + number] = sum;
  const bool is_bias = number == numbers - 1 && params.dbias != nullptr && params.context == 1;
  if (is_bias) params.dbias[head] = sum;
}

// Calls `function` with a type whose `value` is how many lags a kernel has for the window.
template <typename Function>
auto with_lags(const TriangularConvParams& params, Function function) {
  if (params.window <= 4) return function(std::integral_constant<int, 4>());
  return function(std::integral_constant<int, MIXER_SHORT_WINDOW>());
}

// Calls `function` with a zero of x's type.
template <typename Function>
auto with_element(const TriangularConvParams& params, Function function) {
  return params.dtype == MIXER_FLOAT16 ? function(__half()) : function(__nv_bfloat16());
}

}  // namespace

cudaError_t short_conv(const TriangularConvParams& params) {
  const int parts = parts_of(params, kForwardRun);
  return with_lags(params, [&](auto lags) {
    return with_element(params, [&](auto element) {
      return launch(params, forward_kernel<decltype(element), lags.value>, parts * params.heads,
                    kThreads, 0, params, parts);
    });
  });
}

int64_t short_conv_workspace(const TriangularConvParams& params) {
  return sizeof(float) * parts_of(params, kGradientRun) * params.heads * (MIXER_SHORT_WINDOW + 1);
}

cudaError_t short_conv_gradients(const TriangularConvParams& params) {
  const int parts = parts_of(params, kGradientRun);
  float* const sums = static_cast<float*>(params.workspace);
  return with_lags(params, [&](auto lags) {
    const int numbers = lags.value + 1;
    cudaError_t status = with_element(params, [&](auto element) {
      return launch(params, gradients_kernel<decltype(element), lags.value>, parts * params.heads,
                    kThreads, 0, params, parts, sums);
    });
    if (status != cudaSuccess) return status;
    status = launch(params, finish_kernel, params.heads * numbers, kWarp, 0, params, parts, numbers,
                    sums);
    const bool is_done = params.dbias == nullptr || params.context == 1;
    return status == cudaSuccess && !is_done ? grad_bias(params) : status;
  });
}
