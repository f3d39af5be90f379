// y = W x + bias + residual (kTransposed = false) and dx = W^T dy (kTransposed = true) on tensor cores: one kernel,
// since the triangle only turns over.
#pragma once

#include "ampere_tile.cuh"
#include "kernels.h"
#include "tensor_product.cuh"

namespace ampere {

// ---------------------------------------------------------------------------------------------- the diagonal

// True if one of the right factors is infinite or NaN: the same in all threads of the warp.
template <typename Element>
__device__ __forceinline__ bool has_nonfinite(const Fragments& fragments) {
  uint32_t found = 0;
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    uint32_t sum = 0;
#pragma unroll
    for (int part = 0; part < 4; ++part) sum = add_zero_times<Element>(fragments.right[group].part[part], sum);
    found |= sum;
  }
  return __any_sync(0xffffffffu, found != 0);
}

// multiply_row_group where the diagonal cuts the group and the right factor has infinities or NaN. W's zeros beyond the
// diagonal would turn these into NaN, and a later token would show in an earlier one. So each of the 16 rows is
// multiplied by itself, with the right factors that are not its own set to zero; the bits are those that any finite
// values give.
// `lead` = first row of the group - first token of the step.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void multiply_row_by_row(Accumulator& sum, const Fragments& fragments, int row_group,
                                                    int lead) {
  constexpr int kPerPart = 4 / sizeof(Element);  // values in a part: depths (lane % 4) * kPerPart ...
  constexpr uint32_t kValueBits = kPerPart == 2 ? 0xffffu : 0xffffffffu;
#pragma unroll 1
  for (int row = 0; row < 16; ++row) {
    const int lane = read_lane();
    uint32_t mask[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kPerPart; ++i) {
        const int depth = half * kMmaDepth<Element> / 2 + lane % 4 * kPerPart + i;
        const int lag = kTransposed ? depth - (lead + row) : lead + row - depth;
        if (lag >= 0) mask[half] |= kValueBits << 16 * i;
      }
    }
#pragma unroll
    for (int column = 0; column < 2 * kWarpGroups; ++column) {
      const Fragment& right = fragments.right[column / 2];
      float(&value)[4] = sum.value[row_group][column];
      float trial[4] = {value[0], value[1], value[2], value[3]};
      mma<Element>(trial, fragments.left[row_group], right.part[column % 2 * 2] & mask[0],
                   right.part[column % 2 * 2 + 1] & mask[1]);
      const bool upper = lane / 4 == row, lower = lane / 4 + 8 == row;
      value[0] = upper ? trial[0] : value[0];
      value[1] = upper ? trial[1] : value[1];
      value[2] = lower ? trial[2] : value[2];
      value[3] = lower ? trial[3] : value[3];
    }
  }
}

// One mma step of a tile on the diagonal: groups of 16 rows whose W is all zero here are skipped.
// `lead` = first row of the tile - first token of the step.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void multiply_triangle(Accumulator& sum, const Fragments& fragments, int lead) {
  const bool wary = has_nonfinite<Element>(fragments);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    const int group_lead = lead + group_row(group);
    // Over the group's 16 rows and the step's tokens, row of W - column of W takes every value from `least` to `most`.
    const int most = kTransposed ? kMmaDepth<Element> - 1 - group_lead : group_lead + 15;
    const int least = most - 15 - (kMmaDepth<Element> - 1);
    if (most < 0) continue;
    if (wary && least < 0) {
      multiply_row_by_row<Element, kTransposed>(sum, fragments, group, group_lead);
    } else {
      multiply_row_group<Element>(sum, fragments, group);
    }
  }
}

// ---------------------------------------------------------------------------------------------- kernel

template <typename Element, bool kTransposed, bool kOneTap>
__global__ void __launch_bounds__(kThreads, kBlocksResident) product_kernel(const TriangularConvParams params) {
#if __CUDA_ARCH__ >= 800
  using Loader = ProductLoader<Element, kTransposed, kOneTap>;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];

  const Tile tile = locate<kTransposed>(params, read_block());
  const int first = kTransposed ? tile.row0 : 0;
  const int last = kTransposed ? params.tokens : min(tile.row0 + kTile, params.tokens);
  const int steps_per_tap = (last - first + kSliceDepth - 1) / kSliceDepth;

  Loader loader(params, tile, first, last);
  Accumulator sum;
  int depth = first;
  const auto multiply = [&](int mma_step, const Fragments& fragments) {
    const int token = depth + mma_step * kMmaDepth<Element>;
    const bool on_diagonal = kTransposed ? token < tile.row0 + kTile : token + kMmaDepth<Element> > tile.row0;
    if (on_diagonal) {
      multiply_triangle<Element, kTransposed>(sum, fragments, tile.row0 - token);
    } else {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) multiply_row_group<Element>(sum, fragments, group);
    }
    if (mma_step == kMmaSteps - 1) depth = depth + kSliceDepth < last ? depth + kSliceDepth : first;
  };
  run_pipeline<Element, typename Loader::WeightLayout, typename Loader::InputLayout, 16>(
      shared_address(memory), params.taps * steps_per_tap, warp_column() * kWarpTile, loader, multiply);
  wait_copies<0>();
  const auto write_group = [&](int group, float* values) {
#pragma unroll
    for (int c = 0; c < 2 * kWarpGroups; ++c) {
      const float(&value)[4] = sum.value[group][c];
      float* place = values + lane() / 4 * kGroupPitch + c * 8 + lane() % 4 * 2;
      *reinterpret_cast<float2*>(place) = make_float2(value[0], value[1]);
      *reinterpret_cast<float2*>(place + 8 * kGroupPitch) = make_float2(value[2], value[3]);
    }
  };
  store_result<Element, kTransposed>(write_group, memory, params, locate<kTransposed>(params, read_block()));
#endif
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = product_blocks(params);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    return dispatch_taps(params, [&](auto one_tap) {
      product_kernel<decltype(element), kTransposed, decltype(one_tap)::value>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
  });
}

}  // namespace ampere
