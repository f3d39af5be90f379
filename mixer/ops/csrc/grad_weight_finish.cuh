// The second of the weight gradient's two kernels, for the portable and the Ampere set: adds the partial tiles in a fixed order (no atomics: two runs agree bit for bit), casts, and writes the zeros.
//
// Workspace: (splits, heads, taps, lower tiles, kTile, kTile) fp32.
#pragma once

#include "kernels.h"
#include "triangle.cuh"

namespace grad_weight_finish {

constexpr int kFinishThreads = 256;

// One block: 256 columns of one row of dweight. Blocks: (heads * taps * context, column blocks). tokens = 0: all zeros.
template <int kTile, typename Gradient>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const TriangularConvParams params, int tokens, int splits) {
  const int column_blocks = static_cast<int>(ceil_div(params.context, kFinishThreads));
  const int64_t gradient_row = blockIdx.x / column_blocks;
  const int column = blockIdx.x % column_blocks * kFinishThreads + threadIdx.x;
  if (column >= params.context) return;

  const int64_t matrix = gradient_row / params.context;  // head * taps + tap
  const int row = static_cast<int>(gradient_row % params.context);
  float value = 0.0f;
  if (column <= row && row < tokens) {
    const int64_t tiles = lower_tiles(tokens, kTile);
    const int64_t row_tile = row / kTile;
    const int64_t tile = row_tile * (row_tile + 1) / 2 + column / kTile;
    const float* partial = static_cast<const float*>(params.workspace) + (matrix * tiles + tile) * kTile * kTile +
                           row % kTile * kTile + column % kTile;
    const int64_t split_stride = tiles * params.heads * params.taps * kTile * kTile;
    for (int split = 0; split < splits; ++split) value += partial[split * split_stride];
  }
  static_cast<Gradient*>(params.dweight)[gradient_row * params.context + column] = from_float<Gradient>(value);
}

template <int kTile>
cudaError_t finish(const TriangularConvParams& params, int tokens, int splits) {
  const int64_t blocks =
      static_cast<int64_t>(params.heads) * params.taps * params.context * ceil_div(params.context, kFinishThreads);
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.gradient_dtype, [&](auto gradient) {
    finish_kernel<kTile, decltype(gradient)>
        <<<static_cast<unsigned>(blocks), kFinishThreads, 0, stream>>>(params, tokens, splits);
    return cudaGetLastError();
  });
}

// True where there is nothing to sum: dweight is then all zeros.
inline bool is_empty(const TriangularConvParams& params) {
  return params.batch == 0 || params.tokens == 0 || params.channels == 0;
}

}  // namespace grad_weight_finish
