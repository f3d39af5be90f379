// weight -> packed: tril, cast and padding in one pass, once per step. The strictly upper triangle is never read.
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kThreads = 256;

// One block: 256 columns of one row. Blocks: (heads * taps * tokens, column blocks).
template <typename Weight, typename Element>
__global__ void __launch_bounds__(kThreads) pack_kernel(const TriangularConvParams params) {
  const int column_blocks = static_cast<int>(ceil_div(params.columns, kThreads));
  const int64_t packed_row = blockIdx.x / column_blocks;
  const int column = blockIdx.x % column_blocks * kThreads + threadIdx.x;
  if (column >= params.columns) return;

  const int64_t matrix = packed_row / params.tokens;  // head * taps + tap
  const int row = static_cast<int>(packed_row % params.tokens);
  float value = 0.0f;
  if (column <= row) {
    const Weight* weight = static_cast<const Weight*>(params.weight);
    value = to_float(weight[(matrix * params.context + row) * params.context + column]);
  }
  static_cast<Element*>(params.packed)[packed_row * params.columns + column] = from_float<Element>(value);
}

}  // namespace

cudaError_t pack(const TriangularConvParams& params) {
  const int64_t blocks =
      static_cast<int64_t>(params.heads) * params.taps * params.tokens * ceil_div(params.columns, kThreads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.weight_dtype, [&](auto weight) {
    return dispatch_dtype(params.dtype, [&](auto element) {
      pack_kernel<decltype(weight), decltype(element)><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
  });
}
