// weight -> packed: tril, cast and padding in one pass, once per step. The part of the weight above
// the diagonal is never read. Lags become a strip (params.h).
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kThreads = 256;
// columns per thread: 16 bytes of a 16-bit type; a packed row is a whole number of groups
constexpr int kGroup = 8;

template <typename Value>
struct alignas(kGroup * sizeof(Value) < 16 ? kGroup * sizeof(Value) : 16) Group {
  Value values[kGroup];
};

// Threads: (heads * tokens, groups of a row).
template <typename Weight, typename Element>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const TriangularConvParams params, int64_t groups) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= groups) return;
  const int row_groups = params.columns / kGroup;
  const int64_t packed_row = index / row_groups;
  const int column = static_cast<int>(index % row_groups) * kGroup;
  const int64_t head = packed_row / params.tokens;
  const int row = static_cast<int>(packed_row % params.tokens);
  const Weight* weight = static_cast<const Weight*>(params.weight) +
                         (head * params.context + row) * params.context + column;

  Group<Element> packed;
  if (column + kGroup - 1 <= row &&
      reinterpret_cast<uintptr_t>(weight) % alignof(Group<Weight>) == 0) {
    const Group<Weight> read = *reinterpret_cast<const Group<Weight>*>(weight);
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      packed.values[i] = from_float<Element>(to_float(read.values[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      packed.values[i] = from_float<Element>(column + i <= row ? to_float(weight[i]) : 0.0f);
    }
  }
  static_cast<Group<Element>*>(params.packed)[index] = packed;
}

// Threads: (heads * rows of the strip, groups of a row).
template <typename Weight, typename Element>
__global__ void __launch_bounds__(kThreads)
    strip_kernel(const TriangularConvParams params, int64_t groups) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= groups) return;
  const int row_groups = params.columns / kGroup;
  const int column = static_cast<int>(index % row_groups) * kGroup;
  const int row = static_cast<int>(index / row_groups % MIXER_STRIP_ROWS);
  const int64_t head = index / row_groups / MIXER_STRIP_ROWS;
  const Weight* lags = static_cast<const Weight*>(params.weight) + head * params.context;

  Group<Element> packed;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const int lag = row + params.lag_zero - (column + i);
    const bool exists = lag >= 0 && lag < params.tokens;
    packed.values[i] = from_float<Element>(exists ? to_float(lags[lag]) : 0.0f);
  }
  static_cast<Group<Element>*>(params.packed)[index] = packed;
}

}  // namespace

cudaError_t pack(const TriangularConvParams& params) {
  const bool by_lag = params.lag_zero > 0;
  const int64_t rows = by_lag ? MIXER_STRIP_ROWS : params.tokens;
  const int64_t groups = params.heads * rows * (params.columns / kGroup);
  const int64_t blocks = ceil_div(groups, kThreads);
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtypes(params, [&](auto element, auto weight) {
    const auto kernel = by_lag ? strip_kernel<decltype(weight), decltype(element)>
                               : pack_kernel<decltype(weight), decltype(element)>;
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, groups);
    return cudaGetLastError();
  });
}
