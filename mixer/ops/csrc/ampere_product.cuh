// y = W x + bias + residual (kTransposed = false) and dx = W^T dy (kTransposed = true) on tensor cores: one kernel,
// since the triangle only turns over. Row tile [r, r + 128) of y reads tokens [0, r + 128); of dx it reads tokens
// [r, tokens).
//
// Columns of the result run through batch and channels of a head as one dimension, (sample, channel), so that a narrow
// head wastes no part of a tile. A vector of 16 bytes never crosses from one sample into the next.
#pragma once

#include <type_traits>

#include "ampere_tile.cuh"
#include "kernels.h"

namespace ampere {

// ---------------------------------------------------------------------------------------------- which tile

struct Tile {
  int head, row0;
  int64_t column0;
};

__host__ __device__ inline int64_t column_tiles(const TriangularConvParams& params) {
  return ceil_div(static_cast<int64_t>(params.batch) * (params.channels / params.heads), kTile);
}

// Blocks go through groups of column tiles; inside a group through row tiles, those with the longest sums first; inside
// a row tile through the group's columns. A group has about kBlocksPerGroup blocks, two for each place on a large GPU,
// so what it reads of x or dy (16 MB in 16 bits) stays in the L2 cache from its first row tile to its last.
constexpr int kBlocksPerGroup = 512;

template <bool kTransposed>
__host__ __device__ inline Tile locate(const TriangularConvParams& params, int block) {
  const int row_tiles = static_cast<int>(ceil_div(params.tokens, kTile));
  const int per_head = static_cast<int>(column_tiles(params));
  const int columns = per_head * params.heads;
  const int widest = row_tiles < kBlocksPerGroup ? kBlocksPerGroup / row_tiles : 1;
  const int group = block / (widest * row_tiles);
  const int left = columns - group * widest;
  const int wide = left < widest ? left : widest;  // the last group may be narrower
  const int inside = block - group * widest * row_tiles;
  const int row_tile = inside / wide;
  const int column = group * widest + inside % wide;
  return {column / per_head, (kTransposed ? row_tile : row_tiles - 1 - row_tile) * kTile,
          static_cast<int64_t>(column % per_head) * kTile};
}

// ---------------------------------------------------------------------------------------------- loading

// Fills stages with the slices of W and of x (or dy), one call after the other: tap by tap, tokens ascending.
template <typename Element, bool kTransposed>
struct ProductLoader {
  static constexpr int kVector = Sizes<Element>::kVector;
  static constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  using WeightLayout = std::conditional_t<kTransposed, MnMajor<Element>, KMajor<Element>>;
  using InputLayout = MnMajor<Element>;

  const TriangularConvParams& params;
  const Element* weight;  // of this head and tap
  const Element* input;   // of this thread's sample and this head
  int row0, first, last;  // rows [row0, row0 + 128) of the result are the sum over tokens [first, last)
  int channel, width;     // this thread's first channel in the head; `width` if it has none
  int tap = 0, depth;

  __device__ __forceinline__ ProductLoader(const TriangularConvParams& params, const Tile& tile, int first, int last)
      : params(params), row0(tile.row0), first(first), last(last), width(params.channels / params.heads), depth(first) {
    const int64_t column = tile.column0 + vector_across<InputLayout>() * kVector;
    const int64_t sample = column / width;
    channel = sample < params.batch ? static_cast<int>(column - sample * width) : width;
    input = static_cast<const Element*>(kTransposed ? params.dy : params.x) + static_cast<int64_t>(tile.head) * width +
            sample * (kTransposed ? params.dy_batch_stride : params.x_batch_stride);
    weight = static_cast<const Element*>(params.packed) + tile.head * params.taps * tap_size();
  }

  __device__ __forceinline__ int64_t tap_size() const { return static_cast<int64_t>(params.tokens) * params.columns; }

  __device__ __forceinline__ void operator()(uint32_t stage) {
    const int shift = tap_shift(tap, params.taps);
    load_weight(stage);
    load_input(stage + kSliceBytes, kTransposed ? -shift : shift);
    depth += kSliceDepth;
    if (depth >= last) {
      depth = first;
      ++tap;
      weight += tap_size();
    }
  }

  // slice(row, k) = W[row, k], or W[k, row] when transposed: rows of W lie one below the other in both.
  __device__ __forceinline__ void load_weight(uint32_t slice) const {
    const int column = (kTransposed ? row0 : depth) + vector_across<WeightLayout>() * kVector;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<WeightLayout>(i);
      const int row = (kTransposed ? depth : row0) + down;
      copy_async(slice + WeightLayout::offset(down, vector_across<WeightLayout>()),
                 weight + static_cast<int64_t>(row) * params.columns + column,
                 row < params.tokens && column < params.columns);
    }
  }

  // slice(column, k) = input[k, column + shift]; zero beyond `tokens` and outside the head.
  __device__ __forceinline__ void load_input(uint32_t slice, int shift) const {
    const int64_t token_stride = kTransposed ? params.dy_token_stride : params.x_token_stride;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<InputLayout>(i);
      const int token = depth + down;
      const bool inside = token < params.tokens && channel < width;
      const Element* row = input + token * token_stride;
      const uint32_t target = slice + InputLayout::offset(down, vector_across<InputLayout>());
      if (shift == 0) {
        copy_async(target, row + channel, inside);
      } else {
        store_shared(target, inside ? load_shifted(row, channel, shift, width) : make_uint4(0, 0, 0, 0));
      }
    }
  }
};

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
        const int depth = half * Sizes<Element>::kMmaDepth / 2 + lane % 4 * kPerPart + i;
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
  constexpr int kMmaDepth = Sizes<Element>::kMmaDepth;
  const bool wary = has_nonfinite<Element>(fragments);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    const int group_lead = lead + group_row(group);
    // Over the group's 16 rows and the step's tokens, row of W - column of W takes every value from `least` to `most`.
    const int most = kTransposed ? kMmaDepth - 1 - group_lead : group_lead + 15;
    const int least = most - 15 - (kMmaDepth - 1);
    if (most < 0) continue;
    if (wary && least < 0) {
      multiply_row_by_row<Element, kTransposed>(sum, fragments, group, group_lead);
    } else {
      multiply_row_group<Element>(sum, fragments, group);
    }
  }
}

// ---------------------------------------------------------------------------------------------- storing

// 16 bytes, moved as a whole and computed value by value.
template <typename Element>
union Vector {
  uint4 bits = {};
  Element value[Sizes<Element>::kVector];
};

// A warp's groups of 16 rows go through shared memory one by one, in fp32: its threads then hold whole vectors, to
// which bias and residual are added before the only rounding.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void store_result(const Accumulator& sum, unsigned char* memory,
                                             const TriangularConvParams& params, const Tile& tile) {
  constexpr int kPitch = kWarpTile + 8;  // floats; the 8 keep the 4 rows of half a warp's store in different banks
  constexpr int kVector = Sizes<Element>::kVector;
  constexpr int kLanesAcross = kWarpTile / kVector;
  static_assert(kThreads / 32 * 16 * kPitch * sizeof(float) <= kSharedBytes, "the groups fit where the stages were");
  float* group_values = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * 16 * kPitch;

  const int width = params.channels / params.heads;
  const int across = lane() % kLanesAcross * kVector;
  const int64_t column = tile.column0 + warp_column() * kWarpTile + across;
  const int64_t sample = column / width;
  const int64_t position = static_cast<int64_t>(tile.head) * width + (column - sample * width);  // among all channels
  const bool has_bias = !kTransposed && params.bias != nullptr;
  const bool has_residual = !kTransposed && params.residual != nullptr;
  Element* output = static_cast<Element*>(kTransposed ? params.dx : params.y) +
                    sample * params.tokens * params.channels + position;
  const Element* residual =
      static_cast<const Element*>(params.residual) + sample * params.residual_batch_stride + position;

  wait_copies<0>();
  __syncthreads();  // no stage is read any more
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
    for (int c = 0; c < 2 * kWarpGroups; ++c) {
      const float(&value)[4] = sum.value[group][c];
      float* place = group_values + lane() / 4 * kPitch + c * 8 + lane() % 4 * 2;
      *reinterpret_cast<float2*>(place) = make_float2(value[0], value[1]);
      *reinterpret_cast<float2*>(place + 8 * kPitch) = make_float2(value[2], value[3]);
    }
    __syncwarp();
#pragma unroll
    for (int r = lane() / kLanesAcross; r < 16; r += 32 / kLanesAcross) {
      const int row = tile.row0 + group_row(group) + r;
      if (row >= params.tokens || sample >= params.batch) continue;
      const int64_t bias_index = static_cast<int64_t>(tile.head) * params.context + row;
      const float bias = has_bias ? load_float(params.bias, params.bias_dtype, bias_index) : 0.0f;
      Vector<Element> added;
      if (has_residual) {
        added.bits = *reinterpret_cast<const uint4*>(residual + row * params.residual_token_stride);
      }
      Vector<Element> result;
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(group_values + r * kPitch + across + i);
        const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float value = values[j] + bias;
          if (has_residual) value += to_float(added.value[i + j]);
          result.value[i + j] = from_float<Element>(value);
        }
      }
      // A plain store would be cut into the parts that `result` was made of.
      __stcg(reinterpret_cast<uint4*>(output + static_cast<int64_t>(row) * params.channels), result.bits);
    }
    __syncwarp();  // the values have been read before the next group's overwrite them
  }
}

// ---------------------------------------------------------------------------------------------- kernel

template <typename Element, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident) product_kernel(const TriangularConvParams params) {
#if __CUDA_ARCH__ >= 800
  using Loader = ProductLoader<Element, kTransposed>;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  constexpr int kMmaDepth = Sizes<Element>::kMmaDepth;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];

  const Tile tile = locate<kTransposed>(params, read_block());
  const int first = kTransposed ? tile.row0 : 0;
  const int last = kTransposed ? params.tokens : min(tile.row0 + kTile, params.tokens);
  const int steps_per_tap = (last - first + kSliceDepth - 1) / kSliceDepth;

  Loader loader(params, tile, first, last);
  Accumulator sum;
  int depth = first;
  const auto multiply = [&](int mma_step, const Fragments& fragments) {
    const int token = depth + mma_step * kMmaDepth;
    const bool on_diagonal = kTransposed ? token < tile.row0 + kTile : token + kMmaDepth > tile.row0;
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
  store_result<Element, kTransposed>(sum, memory, params, locate<kTransposed>(params, read_block()));
#endif
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = ceil_div(params.tokens, kTile) * column_tiles(params) * params.heads;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    product_kernel<decltype(element), kTransposed><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace ampere
