// What forward (kTransposed = false) and grad-input (kTransposed = true) have in common on tensor cores of sm_70 and
// sm_80: which block makes which tile, what it loads, and how it stores the result. Row tile [r, r + 128) of y reads tokens
// [0, r + 128); of dx it reads tokens [r, tokens).
//
// Columns of the result run through batch and channels of a head as one dimension, (sample, channel), so that a narrow
// head wastes no part of a tile. A vector of 16 bytes never crosses from one sample into the next.
#pragma once

#include "tensor_tile.cuh"

namespace tensor {

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

// Loads the slices of W and of x (or dy), one pair a call: tap by tap, tokens ascending.
template <typename Element, bool kTransposed, bool kOneTap>
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

  template <typename Copies>
  __device__ __forceinline__ void operator()(Copies& copies) {
    const int shift = tap_shift(tap, params.taps);
    load_weight(copies);
    load_input(copies, kTransposed ? -shift : shift);
    depth += kSliceDepth;
    if (depth >= last) {
      depth = first;
      ++tap;
      weight += tap_size();
    }
  }

  // slice(row, k) = W[row, k], or W[k, row] when transposed: rows of W lie one below the other in both.
  template <typename Copies>
  __device__ __forceinline__ void load_weight(Copies& copies) const {
    const int column = (kTransposed ? row0 : depth) + vector_across<WeightLayout>() * kVector;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<WeightLayout>(i);
      const int row = (kTransposed ? depth : row0) + down;
      const Element* vector = weight + static_cast<int64_t>(row) * params.columns + column;
      copies.template copy<WeightLayout>(kLeft, i, vector, row < params.tokens && column < params.columns);
    }
  }

  // slice(column, k) = input[k, column + shift]; zero beyond `tokens` and outside the head.
  template <typename Copies>
  __device__ __forceinline__ void load_input(Copies& copies, int shift) const {
    const int64_t token_stride = kTransposed ? params.dy_token_stride : params.x_token_stride;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int token = depth + vector_down<InputLayout>(i);
      const bool inside = token < params.tokens && channel < width;
      const Element* row = input + token * token_stride;
      if (kOneTap || shift == 0) {
        copies.template copy<InputLayout>(kRight, i, row + channel, inside);
      } else {
        const uint4 vector = inside ? load_shifted(row, channel, shift, width) : make_uint4(0, 0, 0, 0);
        copies.template store<InputLayout>(kRight, i, vector);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------- storing

// 16 bytes, moved as a whole and computed value by value.
template <typename Element>
union Vector {
  uint4 bits = {};
  Element value[Sizes<Element>::kVector];
};

// Floats from one row of a group to the next in shared memory; the 8 keep rows that are written at once in different banks.
constexpr int kGroupPitch = kWarpTile + 8;

// A warp's groups of 16 rows go through shared memory one by one, in fp32: its threads then hold whole vectors, to
// which bias and residual are added before the only rounding. write_group(group, values) writes this thread's part of a
// group, kGroupPitch floats from row to row.
template <typename Element, bool kTransposed, typename WriteGroup>
__device__ __forceinline__ void store_result(WriteGroup&& write_group, unsigned char* memory,
                                             const TriangularConvParams& params, const Tile& tile) {
  constexpr int kVector = Sizes<Element>::kVector;
  constexpr int kLanesAcross = kWarpTile / kVector;
  static_assert(kThreads / 32 * 16 * kGroupPitch * sizeof(float) <= 2 * kStageBytes, "the groups fit where the stages were");
  float* group_values = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * 16 * kGroupPitch;

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

  __syncthreads();  // no stage is read any more
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    write_group(group, group_values);
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
        const float4 four = *reinterpret_cast<const float4*>(group_values + r * kGroupPitch + across + i);
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

inline int64_t product_blocks(const TriangularConvParams& params) {
  return ceil_div(params.tokens, kTile) * column_tiles(params) * params.heads;
}

}  // namespace tensor
