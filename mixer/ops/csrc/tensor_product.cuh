// What forward (kTransposed = false) and grad-input (kTransposed = true) share on the tensor cores
// of sm_70 and sm_80: which block computes which tile, and what it loads. Row tile [r, r + 128) of
// y reads tokens [0, r + 128); row tile [r, r + 128) of dx reads tokens [r, tokens).
//
// The columns of the result are (sample, channel of a head) as one dimension, so that a narrow head
// wastes no part of a tile. A vector of 16 bytes never crosses from one sample into the next.
#pragma once

#include "tensor_tile.cuh"

namespace tensor {

// -------------------------------------------------------------------------------------- which tile

struct Tile {
  int head, row0;
  int64_t column0;
};

__host__ __device__ inline int64_t column_tiles(const TriangularConvParams& params) {
  return ceil_div(static_cast<int64_t>(params.batch) * (params.channels / params.heads), kTile);
}

__host__ __device__ inline int row_tiles(const TriangularConvParams& params) {
  return static_cast<int>(ceil_div(params.tokens, kTile));
}

// Blocks go through groups of column tiles; within a group through row tiles, longest sums first;
// within a row tile through the group's columns. A group has about kBlocksPerGroup blocks, two for
// each that a large GPU runs at once, so the part of x or dy that it reads (16 MB in 16 bits) stays
// in the L2 cache from its first row tile to its last.
constexpr int kBlocksPerGroup = 512;

template <bool kTransposed>
__device__ inline Tile locate(const TriangularConvParams& params, int block) {
  const int rows = row_tiles(params);
  const int per_head = static_cast<int>(column_tiles(params));
  const int columns = per_head * params.heads;
  const int widest = rows < kBlocksPerGroup ? kBlocksPerGroup / rows : 1;
  const int group = block / (widest * rows);
  const int left = columns - group * widest;
  const int wide = left < widest ? left : widest;  // the last group may be narrower
  const int inside = block - group * widest * rows;
  const int row_tile = inside / wide;
  const int column = group * widest + inside % wide;
  return {column / per_head, (kTransposed ? row_tile : rows - 1 - row_tile) * kTile,
          static_cast<int64_t>(column % per_head) * kTile};
}

// ----------------------------------------------------------------------------------------- loading

// Loads the slices of W and of x (or dy), one pair per call, tokens ascending.
template <typename Element, bool kTransposed>
struct ProductLoader {
  static constexpr int kVector = Sizes<Element>::kVector;
  static constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  using WeightLayout = std::conditional_t<kTransposed, MnMajor<Element>, KMajor<Element>>;
  using InputLayout = MnMajor<Element>;

  const TriangularConvParams& params;
  const Element* weight;  // of this head, or its strip
  const Element* input;   // of this thread's sample and this head
  int channel, width;     // this thread's first channel in the head, or `width` if it has none
  int row0, depth;        // first row of the result's tile, first token of the next slices

  __device__ __forceinline__ ProductLoader(const TriangularConvParams& params, const Tile& tile)
      : params(params), width(params.channels / params.heads) {
    const int64_t column = tile.column0 + vector_across<InputLayout>() * kVector;
    const int64_t sample = column / width;
    channel = sample < params.batch ? static_cast<int>(column - sample * width) : width;
    input = static_cast<const Element*>(kTransposed ? params.dy : params.x) +
            static_cast<int64_t>(tile.head) * width +
            sample * (kTransposed ? params.dy_batch_stride : params.x_batch_stride);
    const int64_t rows = params.lag_zero > 0 ? MIXER_STRIP_ROWS : params.tokens;
    weight = static_cast<const Element*>(params.packed) + tile.head * rows * params.columns;
    row0 = tile.row0;
    depth = first();
  }

  // Rows [row0, row0 + 128) of the result are the sum over tokens [first, last).
  __device__ __forceinline__ int first() const { return kTransposed ? row0 : 0; }
  __device__ __forceinline__ int last() const {
    return kTransposed ? params.tokens : min(row0 + kTile, params.tokens);
  }

  __device__ __forceinline__ bool done() const { return depth >= last(); }

  template <typename Copies>
  __device__ __forceinline__ void operator()(Copies& copies) {
    load_weight(copies);
    load_input(copies);
    depth += kSliceDepth;
  }

  // slice(row, k) = W[row, k], or W[k, row] when transposed. In memory, rows of W follow one
  // another in both cases.
  template <typename Copies>
  __device__ __forceinline__ void load_weight(Copies& copies) const {
    const int first_row = kTransposed ? depth : row0;
    const int column = (kTransposed ? row0 : depth) + vector_across<WeightLayout>() * kVector;
    // In a strip the tile begins in row 0.
    const Element* const origin =
        params.lag_zero > 0
            ? weight + params.lag_zero - first_row
            : weight + static_cast<int64_t>(first_row) * params.columns;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<WeightLayout>(i);
      const Element* vector = origin + static_cast<int64_t>(down) * params.columns + column;
      copies.template copy<WeightLayout>(
          kLeft, i, vector, first_row + down < params.tokens && column < params.columns);
    }
  }

  // slice(column, k) = input[k, column]; zero beyond `tokens` and the last sample.
  template <typename Copies>
  __device__ __forceinline__ void load_input(Copies& copies) const {
    const int64_t token_stride = kTransposed ? params.dy_token_stride : params.x_token_stride;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int token = depth + vector_down<InputLayout>(i);
      const Element* vector = input + token * token_stride + channel;
      copies.template copy<InputLayout>(kRight, i, vector,
                                        token < params.tokens && channel < width);
    }
  }
};

}  // namespace tensor
