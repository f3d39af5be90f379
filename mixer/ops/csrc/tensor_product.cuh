// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c] and (kTransposed)
// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c], on the tensor cores of sm_70 and sm_80. One
// kernel does both: transposing only flips the triangle. Row tile [r, r + 128) of y reads tokens
// [0, r + 128); row tile [r, r + 128) of dx reads tokens [r, tokens). With a window of w lags, they
// are [r - w + 1, r + 128) and [r, r + 127 + w).
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
  using WeightLayout = std::conditional_t<kTransposed, MnMajor, KMajor>;
  using InputLayout = MnMajor;

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
    const int64_t rows = params.window > 0 ? MIXER_STRIP_ROWS : params.tokens;
    weight = static_cast<const Element*>(params.packed) + tile.head * rows * params.columns;
    row0 = tile.row0;
    depth = first();
  }

  // Rows [row0, row0 + 128) of the result are the sum over tokens [first, last).
  __device__ __forceinline__ int first() const {
    return kTransposed ? row0 : max(0, row0 + 1 - band(params)) / kSliceDepth * kSliceDepth;
  }
  __device__ __forceinline__ int last() const {
    return min(row0 + kTile + (kTransposed ? band(params) - 1 : 0), params.tokens);
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
    // In a strip the tile begins in row 0, and all of it lies inside.
    const bool by_lag = params.window > 0;
    const Element* const origin =
        by_lag ? weight + params.lag_zero - first_row
               : weight + static_cast<int64_t>(first_row) * params.columns;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<WeightLayout>(i);
      const Element* vector = origin + static_cast<int64_t>(down) * params.columns + column;
      copies.template copy<WeightLayout>(
          kLeft, i, vector,
          first_row + down < params.tokens && (by_lag || column < params.columns));
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

// ----------------------------------------------------------------------------------------- storing
//
// From registers to global memory. Bias and residual are added before the only rounding.

// In a block of 8 columns each lane of a quad holds 2. To store 8 columns of a row at once, the
// lanes of a quad exchange their parts of 4 blocks.
template <typename Set>
struct Piece {
  using Element = typename Set::Element;
  static constexpr int kBlocks = 4;

  union Pair {
    uint32_t bits;
    Element value[2];
  };

  // Transposes the words in a quad: word i of lane q and word q of lane i change places.
  __device__ __forceinline__ static void exchange(uint32_t (&word)[4]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const int bit = distance == 1 ? Set::kLowBit : Set::kHighBit;
      const bool upper = read_lane() & bit;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        uint32_t &low = word[i], &high = word[i + distance];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, bit);
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
      value[i][0] += float(pair.value[0]);
      value[i][1] += float(pair.value[1]);
    }
  }

  __device__ __forceinline__ static uint4 round(const float (&value)[kBlocks][2]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair pair;
      pair.value[0] = Element(value[i][0]);
      pair.value[1] = Element(value[i][1]);
      word[i] = pair.bits;
    }
    exchange(word);
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

// Stores a warp's part of a tile.
template <typename Set, bool kTransposed>
__device__ __forceinline__ void store_result(const typename Set::Accumulator& sum,
                                             const TriangularConvParams& params, const Tile& tile) {
  using Element = typename Set::Element;
  using Piece = tensor::Piece<Set>;
  const int lane = read_lane();
  const int width = params.channels / params.heads;
  const int64_t column =
      tile.column0 + warp_column() * kWarpTile + Set::quad_place(lane) * kVector;
  const int64_t first_channel = static_cast<int64_t>(tile.head) * width;
  const bool has_bias = !kTransposed && params.bias != nullptr;
  const bool has_residual = !kTransposed && params.residual != nullptr;
  Element* const output = static_cast<Element*>(kTransposed ? params.dx : params.y) + first_channel;
  const Element* const residual = static_cast<const Element*>(params.residual) + first_channel;

#pragma unroll
  for (int half_group = 0; half_group < 2 * kWarpGroups; ++half_group) {
    const int group = half_group / 2, half = half_group % 2;
    const int row = tile.row0 + group_row(group) + half * Set::kHalfRows + Set::value_row(lane);
    const bool row_inside = row < params.tokens;
    float bias = 0.0f;
    if (has_bias && row_inside) {
      bias = load_float(params.bias, params.weight_dtype,
                        static_cast<int64_t>(tile.head) * params.context + row);
    }
    int64_t sample = column / width;
    int channel = static_cast<int>(column - sample * width);
#pragma unroll
    for (int block = 0; block < 2 * kWarpGroups; block += Piece::kBlocks) {
      const bool inside = row_inside && sample < params.batch;
      float value[Piece::kBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * Piece::kBlocks; ++i)
        value[i / 2][i % 2] = sum.at(group, half, block + i / 2, i % 2) + bias;
      if (has_residual) {
        const int64_t place =
            sample * params.residual_batch_stride + row * params.residual_token_stride + channel;
        uint4 added = {};
        if (inside) added = *reinterpret_cast<const uint4*>(residual + place);
        Piece::add(value, added);
      }
      const uint4 bits = Piece::round(value);
      const int64_t place = (sample * params.tokens + row) * params.channels + channel;
      if (inside) __stcg(reinterpret_cast<uint4*>(output + place), bits);
      for (channel += 8 * Piece::kBlocks; channel >= width; channel -= width) ++sample;
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

template <typename Set, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    product_kernel(const TriangularConvParams params) {
  if constexpr (Set::kIsHere) {
    using Element = typename Set::Element;
    using Fragments = typename Set::Fragments;
    using Loader = ProductLoader<Element, kTransposed>;
    using LeftLayout = typename Loader::WeightLayout;
    using RightLayout = typename Loader::InputLayout;
    alignas(128) __shared__ unsigned char memory[Set::kSharedBytes];

    const Tile tile = locate<kTransposed>(params, blockIdx.x);
    Loader loader(params, tile);
    const auto load = [&](auto& copies) {
      if (!loader.done()) loader(copies);
    };
    typename Set::template Pipeline<LeftLayout, RightLayout, 16> pipeline(
        memory, warp_column() * kWarpTile, load);

    const auto slices = [](int tokens) { return (max(tokens, 0) + kSliceDepth - 1) / kSliceDepth; };
    const int before = kTransposed ? 0 : slices(tile.row0 - loader.first());
    const int diagonal = slices(min(params.tokens - tile.row0, kTile));
    const int after = kTransposed ? slices(loader.last() - tile.row0 - kTile) : 0;
    typename Set::Accumulator sum;
    const auto multiply_row_group = [&](const Fragments& fragments, int group) {
#pragma unroll
      for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
        Set::template multiply_groups<LeftLayout, RightLayout>(sum, fragments, group,
                                                               column_group);
      }
    };
    const auto multiply_all = [&](const Fragments& fragments) {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) multiply_row_group(fragments, group);
    };
    // `lead`: first row of the tile - first token of the step. Skips the groups of 16 rows whose W
    // is all zero, so that an infinity or NaN in x does not spread beyond its 16 tokens.
    const auto multiply_triangle = [&](const Fragments& fragments, int lead) {
      // lets the compiler resolve, in unrolled steps, which groups are skipped
      __builtin_assume(warp_row() < 2);
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        const int group_lead = lead + group_row(group);
        // the largest row of W - column of W over the group's 16 rows and the step's tokens
        const int most = kTransposed ? Set::kMmaDepth - 1 - group_lead : group_lead + 15;
        if (most >= 0) multiply_row_group(fragments, group);
      }
    };
    if constexpr (Set::kOneLoop) {
      int lead = tile.row0 - loader.first();
      pipeline.run(before + diagonal + after, load, [&](const Fragments& fragments) {
        const bool on_diagonal = kTransposed ? lead > -kTile : lead < Set::kMmaDepth;
        on_diagonal ? multiply_triangle(fragments, lead) : multiply_all(fragments);
        lead -= Set::kMmaDepth;
      });
    } else {
      // When unrolled, each step on the diagonal knows which groups it skips. Measured: faster for
      // forward, slower for grad-input.
      constexpr int kUnrolled = kTransposed ? 1 : kTile / kSliceDepth;
      pipeline.run(before, load, multiply_all);
#pragma unroll(kUnrolled)
      for (int slice = 0; slice < kTile / kSliceDepth; ++slice) {
        if (slice >= diagonal) continue;
        int lead = -slice * kSliceDepth;
        pipeline.run(1, load, [&](const Fragments& fragments) {
          multiply_triangle(fragments, lead);
          lead -= Set::kMmaDepth;
        });
      }
      pipeline.run(after, load, multiply_all);
    }
    store_result<Set, kTransposed>(sum, params, tile);
  }
}

template <typename Set, bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = row_tiles(params) * column_tiles(params) * params.heads;
  return launch(params, product_kernel<Set, kTransposed>, blocks, kThreads, 0, params);
}

}  // namespace tensor
