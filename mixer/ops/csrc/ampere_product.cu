// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c] and (kTransposed)
// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c]. One kernel does both: transposing only flips
// the triangle.
#include "ampere_store.cuh"
#include "ampere_tile.cuh"
#include "kernels.h"
#include "tensor_product.cuh"

namespace ampere {
namespace {

// ------------------------------------------------------------------------------------ the diagonal

// multiply_row_group for a group that the diagonal cuts, if the right factor may hold infinities or
// NaN. W's zeros above the diagonal would turn these into NaN, and a later token would affect an
// earlier one. So each of the 16 rows is multiplied on its own, with the right factors above its
// diagonal set to zero. For finite values the result is the same, bit for bit. `lead` = first row
// of the group - first token of the step.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void multiply_row_by_row(Accumulator& sum, const Fragments& fragments,
                                                    int row_group, int lead) {
  // values in a part: depths (lane % 4) * kPerPart ...
  constexpr int kPerPart = 4 / sizeof(Element);
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

// One mma step of a tile on the diagonal. Skips the groups of 16 rows whose W is all zero here.
// `lead` = first row of the tile - first token of the step.
template <typename Element, bool kTransposed, bool kCareful>
__device__ __forceinline__ void multiply_triangle(Accumulator& sum, const Fragments& fragments,
                                                  int lead) {
  // lets the compiler resolve, in unrolled steps, which groups are skipped
  __builtin_assume(warp_row() < 2);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    const int group_lead = lead + group_row(group);
    // Over the group's 16 rows and the step's tokens, row of W - column of W ranges from `least` to
    // `most`.
    const int most = kTransposed ? kMmaDepth<Element> - 1 - group_lead : group_lead + 15;
    const int least = most - 15 - (kMmaDepth<Element> - 1);
    if (most < 0) continue;
    if (kCareful && least < 0) {
      multiply_row_by_row<Element, kTransposed>(sum, fragments, group, group_lead);
    } else {
      multiply_row_group<Element>(sum, fragments, group);
    }
  }
}

// ------------------------------------------------------------------------------------- which tiles

// Whether a block computes two row tiles of a column, one after the other, so that slices of the
// second are loaded while the first is stored. A tile n tiles from the first token is paired with
// the tile n tiles from the last, so all pairs take the same time. If there are too few pairs to
// fill the GPU evenly, each tile has its own block.
__host__ __device__ inline bool in_pairs(const TriangularConvParams& params) {
  constexpr int kLeastRounds = 4;  // rounds of blocks on the GPU
  const int64_t pairs = ceil_div(row_tiles(params), 2) * column_tiles(params) * params.heads;
  return pairs >= static_cast<int64_t>(kLeastRounds) * kBlocksResident * params.processors;
}

__host__ __device__ inline int blocks_of_column(const TriangularConvParams& params) {
  return in_pairs(params) ? (row_tiles(params) + 1) / 2 : row_tiles(params);
}

// First row of the other tile of a pair.
__device__ __forceinline__ int opposite(const TriangularConvParams& params, int row0) {
  return (row_tiles(params) - 1) * kTile - row0;
}

// ------------------------------------------------------------------------------------------ kernel

// Computes this block's tiles. Returns whether any of this thread's sums is infinite or NaN.
template <typename Element, bool kTransposed, bool kCareful>
__device__ __forceinline__ bool make_tiles(const TriangularConvParams& params, uint32_t stages) {
  using Loader = ProductLoader<Element, kTransposed>;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  // When unrolled, each step on the diagonal knows which groups it skips. Measured: faster for
  // forward, slower for grad-input.
  constexpr bool kUnrolled = !kTransposed && !kCareful;
  const auto slices = [](int tokens) { return (max(tokens, 0) + kSliceDepth - 1) / kSliceDepth; };

  Tile tile = locate<kTransposed>(params, read_block(), blocks_of_column(params));
  const bool is_pair = in_pairs(params) && opposite(params, tile.row0) != tile.row0;
  Loader loader(params, tile);
  bool has_more = is_pair;
  const auto load = [&](AsyncCopies& copies) {
    if (loader.done()) {
      if (!has_more) return;
      has_more = false;
      loader.start(opposite(params, loader.row0));
    }
    loader(copies);
  };
  using Fast = Pipeline<Element, typename Loader::WeightLayout, typename Loader::InputLayout, 16>;
  using Slow =
      SerialPipeline<Element, typename Loader::WeightLayout, typename Loader::InputLayout, 16>;
  std::conditional_t<kCareful, Slow, Fast> pipeline(stages, warp_column() * kWarpTile, load);

  bool nonfinite = false;
#pragma unroll 1
  for (int tiles = is_pair ? 2 : 1; tiles > 0; --tiles) {
    Accumulator sum;
    const int before = kTransposed ? 0 : slices(tile.row0);
    const int diagonal = slices(min(params.tokens - tile.row0, kTile));
    const int after = kTransposed ? slices(params.tokens - tile.row0 - kTile) : 0;
    const auto multiply_all = [&](const Fragments& fragments) {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group)
        multiply_row_group<Element>(sum, fragments, group);
    };
    pipeline.run(before, load, multiply_all);
#pragma unroll(kUnrolled ? kTile / kSliceDepth : 1)
    for (int slice = 0; slice < kTile / kSliceDepth; ++slice) {
      if (slice >= diagonal) continue;
      int lead = -slice * kSliceDepth;  // first row of the tile - first token of the step
      pipeline.run(1, load, [&](const Fragments& fragments) {
        multiply_triangle<Element, kTransposed, kCareful>(sum, fragments, lead);
        lead -= kMmaDepth<Element>;
      });
    }
    pipeline.run(after, load, multiply_all);
    nonfinite |= store_result<Element, kTransposed>(sum, params, tile);
    tile.row0 = opposite(params, tile.row0);
  }
  wait_copies<0>();
  return nonfinite;
}

// If x holds infinities or NaN, W's zeros above the diagonal turn them into NaN in the sums. Only
// then does the block compute its tiles again, without such products.
template <typename Element, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    product_kernel(const TriangularConvParams params) {
#if __CUDA_ARCH__ >= 800
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  const uint32_t stages = shared_address(memory);
  const bool nonfinite = make_tiles<Element, kTransposed, false>(params, stages);
  if (__syncthreads_or(nonfinite)) make_tiles<Element, kTransposed, true>(params, stages);
#endif
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = blocks_of_column(params) * column_tiles(params) * params.heads;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    product_kernel<decltype(element), kTransposed>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t forward(const TriangularConvParams& params) { return launch_product<false>(params); }
cudaError_t grad_input(const TriangularConvParams& params) { return launch_product<true>(params); }

}  // namespace ampere
