// Stores a tile of y or dx from the registers of the sm_80 kernels to global memory. Bias and
// residual are added before the only rounding. Nothing passes through shared memory, because the
// next tile's slices may already be arriving there.
#pragma once

#include "ampere_tile.cuh"
#include "tensor_product.cuh"

namespace ampere {

// How many columns of a row a lane stores at once, and how it gets them. In a block of 8 columns
// each of four lanes holds 2. For 16-bit types a lane stores 8 columns: the four lanes exchange
// their parts of 4 blocks.
template <typename Element>
struct Piece {
  using Bits = uint4;
  static constexpr int kBlocks = 4;
  static constexpr int kLaneColumns = 8;

  union Pair {
    uint32_t bits;
    Element value[2];
  };

  // Transposes the words among each four lanes: word i of lane q and word q of lane i change
  // places.
  __device__ __forceinline__ static void exchange(uint32_t (&word)[4]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = read_lane() & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        uint32_t &low = word[i], &high = word[i + distance];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
        low = upper ? other : low;
        high = upper ? high : other;
      }
    }
  }

  __device__ __forceinline__ static void add(float (&value)[kBlocks][2], uint4 added) {
    uint32_t word[4] = {added.x, added.y, added.z, added.w};
    exchange(word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair pair = {word[i]};
      value[i][0] += to_float(pair.value[0]);
      value[i][1] += to_float(pair.value[1]);
    }
  }

  __device__ __forceinline__ static uint4 round(const float (&value)[kBlocks][2]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair pair;
      pair.value[0] = from_float<Element>(value[i][0]);
      pair.value[1] = from_float<Element>(value[i][1]);
      word[i] = pair.bits;
    }
    exchange(word);
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <>
struct Piece<float> {
  using Bits = float2;
  static constexpr int kBlocks = 1;
  static constexpr int kLaneColumns = 2;

  __device__ __forceinline__ static void add(float (&value)[1][2], float2 added) {
    value[0][0] += added.x;
    value[0][1] += added.y;
  }

  __device__ __forceinline__ static float2 round(const float (&value)[1][2]) {
    return make_float2(value[0][0], value[0][1]);
  }
};

// Stores a warp's part of a tile. Returns whether any of this thread's sums is infinite or NaN.
template <typename Element, bool kTransposed>
__device__ __forceinline__ bool store_result(const Accumulator& sum,
                                             const TriangularConvParams& params, const Tile& tile) {
  using Piece = Piece<Element>;
  const int lane = read_lane();
  const int width = params.channels / params.heads;
  const int64_t column = tile.column0 + warp_column() * kWarpTile + lane % 4 * Piece::kLaneColumns;
  const int64_t first_channel = static_cast<int64_t>(tile.head) * width;
  const bool has_bias = !kTransposed && params.bias != nullptr;
  const bool has_residual = !kTransposed && params.residual != nullptr;
  Element* const output = static_cast<Element*>(kTransposed ? params.dx : params.y) + first_channel;
  const Element* const residual = static_cast<const Element*>(params.residual) + first_channel;
  uint32_t nonfinite = 0;

#pragma unroll
  for (int half_group = 0; half_group < 2 * kWarpGroups; ++half_group) {
    const int group = half_group / 2, half = half_group % 2;
    const int row = tile.row0 + group_row(group) + half * 8 + lane / 4;
    const bool row_inside = row < params.tokens;
    float bias = 0.0f;
    if (has_bias && row_inside) {
      bias = load_float(params.bias, params.bias_dtype,
                        static_cast<int64_t>(tile.head) * params.context + row);
    }
    float zero = 0.0f;  // stays zero until a sum is infinite or NaN
    int64_t sample = column / width;
    int channel = static_cast<int>(column - sample * width);
#pragma unroll
    for (int block = 0; block < 2 * kWarpGroups; block += Piece::kBlocks) {
      const bool inside = row_inside && sample < params.batch;
      float value[Piece::kBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * Piece::kBlocks; ++i) {
        const float result = sum.value[group][block + i / 2][2 * half + i % 2];
        zero = fmaf(result, 0.0f, zero);
        value[i / 2][i % 2] = result + bias;
      }
      if (has_residual) {
        const int64_t place =
            sample * params.residual_batch_stride + row * params.residual_token_stride + channel;
        typename Piece::Bits added = {};
        if (inside) added = *reinterpret_cast<const typename Piece::Bits*>(residual + place);
        Piece::add(value, added);
      }
      const typename Piece::Bits bits = Piece::round(value);
      const int64_t place = (sample * params.tokens + row) * params.channels + channel;
      if (inside) __stcg(reinterpret_cast<typename Piece::Bits*>(output + place), bits);
      for (channel += 8 * Piece::kBlocks; channel >= width; channel -= width) ++sample;
    }
    nonfinite |= __float_as_uint(zero);
  }
  return nonfinite != 0;
}

}  // namespace ampere
