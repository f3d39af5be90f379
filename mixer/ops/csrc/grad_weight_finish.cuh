// The second kernel of the weight gradient for the Volta and Ampere sets. It adds the
// partial tiles in a fixed order (no atomics, so results are reproducible bit for bit), casts, and
// writes the zeros.
//
// Workspace: (splits, heads, lower tiles, kTile, kTile) fp32.
#pragma once

#include "kernels.h"
#include "triangle.cuh"

namespace grad_weight_finish {

constexpr int kFinishThreads = 256;
constexpr int kVector = 4;  // columns per thread
constexpr int kRows = 4;    // rows per thread, so that many reads are in flight at once

// Writes the part of the vector that lies left of `context`.
template <typename Gradient>
__device__ __forceinline__ void store_vector(Gradient* row, int column, int context,
                                             const float (&value)[kVector]) {
  struct alignas(kVector * sizeof(Gradient)) Vector { Gradient value[kVector]; };
  Vector vector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) vector.value[i] = from_float<Gradient>(value[i]);
  if (context % kVector == 0) {
    *reinterpret_cast<Vector*>(row + column) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column + i < context) row[column + i] = vector.value[i];
    }
  }
}

// Rows of dweight per block, all in one tile.
template <int kTile>
constexpr int kBlockRows = kRows * kFinishThreads * kVector / kTile;

// Blocks, fastest index first: column tiles of dweight, groups of kBlockRows rows, heads.
template <int kTile, typename Gradient>
__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const TriangularConvParams params, int splits) {
  constexpr int kAcross = kTile / kVector, kDown = kFinishThreads / kAcross;  // threads
  static_assert(kTile % kBlockRows<kTile> == 0, "a block's rows are of one tile");
  const int column_tiles = static_cast<int>(ceil_div(params.context, kTile));
  const int row_groups = static_cast<int>(ceil_div(params.context, kBlockRows<kTile>));
  const int row_group = blockIdx.x / column_tiles % row_groups;
  const int64_t head = blockIdx.x / column_tiles / row_groups;
  const LowerTile tile = {row_group * kBlockRows<kTile> / kTile,
                          static_cast<int>(blockIdx.x) % column_tiles};
  const int row0 = row_group * kBlockRows<kTile> + threadIdx.x / kAcross;
  const int across = threadIdx.x % kAcross * kVector, column = tile.column * kTile + across;

  float value[kRows][kVector] = {};
  if (tile.column <= tile.row && tile.row * kTile < params.tokens) {
    const int64_t tiles = lower_tiles(params.tokens, kTile);
    const int64_t split_stride = tiles * params.heads * kTile * kTile;
    const float* partial =
        static_cast<const float*>(params.workspace) + across +
        (head * tiles + tile.row * (tile.row + 1) / 2 + tile.column) * kTile * kTile;
    for (int split = 0; split < splits; ++split, partial += split_stride) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 added =
            __ldcs(reinterpret_cast<const float4*>(partial + (row0 + i * kDown) % kTile * kTile));
        value[i][0] += added.x;
        value[i][1] += added.y;
        value[i][2] += added.z;
        value[i][3] += added.w;
      }
    }
  }
  if (column >= params.context) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * kDown;
    if (row >= params.context) continue;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (column + c > row || row >= params.tokens) value[i][c] = 0.0f;
    }
    Gradient* const gradient =
        static_cast<Gradient*>(params.dweight) + (head * params.context + row) * params.context;
    store_vector(gradient, column, params.context, value[i]);
  }
}

template <int kTile>
cudaError_t finish(const TriangularConvParams& params, int splits) {
  const int64_t blocks = static_cast<int64_t>(params.heads) * ceil_div(params.context, kTile) *
                         ceil_div(params.context, kBlockRows<kTile>);
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.weight_dtype, [&](auto gradient) {
    finish_kernel<kTile, decltype(gradient)>
        <<<static_cast<unsigned>(blocks), kFinishThreads, 0, stream>>>(params, splits);
    return cudaGetLastError();
  });
}

}  // namespace grad_weight_finish
