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

// Threads: (heads * rows, groups of a row).
template <typename Weight, typename Element, bool kByLag>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const TriangularConvParams params, int64_t groups) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= groups) return;
  const int row_groups = params.columns / kGroup;
  const int64_t packed_row = index / row_groups;
  const int column = static_cast<int>(index % row_groups) * kGroup;
  const int rows = kByLag ? MIXER_STRIP_ROWS : params.tokens;
  const int64_t head = packed_row / rows;
  const int row = static_cast<int>(packed_row % rows);
  const Weight* weight =
      static_cast<const Weight*>(params.weight) +
      (kByLag ? head * params.window : (head * params.context + row) * params.context);

  Group<Element> packed;
  if (!kByLag && column + kGroup - 1 <= row &&
      reinterpret_cast<uintptr_t>(weight + column) % alignof(Group<Weight>) == 0) {
    const Group<Weight> read = *reinterpret_cast<const Group<Weight>*>(weight + column);
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      packed.values[i] = Element(float(read.values[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int from = kByLag ? row + params.lag_zero - (column + i) : column + i;
      const bool exists = kByLag ? from >= 0 && from < band(params) : from <= row;
      packed.values[i] = Element(exists ? float(weight[from]) : 0.0f);
    }
  }
  static_cast<Group<Element>*>(params.packed)[index] = packed;
}

}  // namespace

cudaError_t pack(const TriangularConvParams& params) {
  const bool by_lag = params.window > 0;
  const int64_t rows = by_lag ? MIXER_STRIP_ROWS : params.tokens;
  const int64_t groups = params.heads * rows * (params.columns / kGroup);
  return with_dtypes(params, [&](auto element, auto weight) {
    const auto kernel = by_lag ? pack_kernel<decltype(weight), decltype(element), true>
                               : pack_kernel<decltype(weight), decltype(element), false>;
    return launch(params, kernel, ceil_div(groups, kThreads), kThreads, 0, params, groups);
  });
}
