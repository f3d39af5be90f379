// y = W x + bias + residual (kTransposed = false) and dx = W^T dy (kTransposed = true) on tensor cores: one kernel,
// since the triangle only turns over.
#pragma once

#include "kernels.h"
#include "tensor_product.cuh"
#include "volta_tile.cuh"

namespace volta {

template <bool kTransposed, bool kOneTap>
__global__ void __launch_bounds__(kThreads, kBlocksResident) product_kernel(const TriangularConvParams params) {
  using Loader = ProductLoader<Element, kTransposed, kOneTap>;
  using LeftLayout = typename Loader::WeightLayout;
  using RightLayout = typename Loader::InputLayout;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];

  const Tile tile = locate<kTransposed>(params, blockIdx.x);
  const int first = kTransposed ? tile.row0 : 0;
  const int last = kTransposed ? params.tokens : min(tile.row0 + kTile, params.tokens);
  const int steps_per_tap = (last - first + kSliceDepth - 1) / kSliceDepth;

  Loader loader(params, tile, first, last);
  Accumulator sum;
  int depth = first;
  const auto multiply = [&](int mma_step, const Fragments& fragments) {
    const auto multiply_row_group = [&](int group) {
#pragma unroll
      for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
        multiply_groups<LeftLayout, RightLayout>(sum, fragments, group, column_group);
      }
    };
    const int lead = tile.row0 - (depth + mma_step * kMmaDepth);  // first row of the tile - first token of the step
    const bool on_diagonal = kTransposed ? lead + kTile > 0 : lead < kMmaDepth;
    if (on_diagonal) {
      // Groups of 16 rows whose W is all zero here are skipped, so what is infinite or NaN in x stays in its 16 tokens.
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        // The most that a row of W is below its column, over the group's 16 rows and the step's tokens.
        const int most = kTransposed ? kMmaDepth - 1 - (lead + group_row(group)) : lead + group_row(group) + 15;
        if (most >= 0) multiply_row_group(group);
      }
    } else {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) multiply_row_group(group);
    }
    if (mma_step == kMmaSteps - 1) depth = depth + kSliceDepth < last ? depth + kSliceDepth : first;
  };
  run_pipeline<LeftLayout, RightLayout, 16>(memory, params.taps * steps_per_tap, warp_column() * kWarpTile, loader, multiply);

  const auto write_group = [&](int group, float* values) {
#pragma unroll
    for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float(&value)[8] = sum.value[group][column_group];
        float* place = values + value_row(i) * kGroupPitch + column_group * 16 + value_column(i);
        *reinterpret_cast<float2*>(place) = make_float2(value[i], value[i + 1]);
      }
    }
  };
  store_result<Element, kTransposed>(write_group, memory, params, locate<kTransposed>(params, blockIdx.x));
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = product_blocks(params);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_taps(params, [&](auto one_tap) {
    product_kernel<kTransposed, decltype(one_tap)::value>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace volta
