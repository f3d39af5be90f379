// What grad-weight shares on the tensor cores of sm_70 and sm_80. Two kernels: the first computes
// the lower 128 x 128 tiles, with the sum over (batch, channels) cut into `splits` ranges whose
// partial tiles go to the workspace in fp32; the second (grad_weight_finish.cuh) adds them in a
// fixed order.
#pragma once

#include "grad_weight_finish.cuh"
#include "tensor_tile.cuh"

namespace tensor {

constexpr int kTileSize = kTile * kTile;
constexpr int kMaxSplits = 128;

// The sum runs over (sample, channel of a head) as one dimension, cut into slices. A vector of 16
// bytes never crosses from one sample into the next.
__host__ __device__ __forceinline__ int64_t slice_count(const TriangularConvParams& params) {
  const int slice =
      params.dtype == MIXER_FLOAT32 ? Sizes<float>::kSliceDepth : Sizes<__half>::kSliceDepth;
  return ceil_div(static_cast<int64_t>(params.batch) * (params.channels / params.heads), slice);
}

// The number of ranges that takes the least time. The unit is one slice's product (about half a
// microsecond). Blocks run in waves; a wave takes one range plus a start and an end. Then the
// second kernel reads the partial tiles of all ranges.
inline int choose_splits(const TriangularConvParams& params) {
  constexpr double kWaveCost = 24;          // filling the pipeline and storing the tile
  // writing and reading a tile's 64 KB at full bandwidth
  constexpr double kPartialTileCost = 0.1;
  constexpr double kRangeCost = 0.3;        // waiting for one more value in each thread's sum
  const int64_t tiles = lower_tiles(params.tokens, kTile) * params.heads;
  const int64_t places =
      static_cast<int64_t>(params.processors > 0 ? params.processors : 1) * kBlocksResident;
  const int64_t slices = slice_count(params);
  int best = 1;
  double least = 0;
  for (int splits = 1; splits <= kMaxSplits && splits <= slices; ++splits) {
    const int64_t waves = ceil_div(tiles * splits, places);
    const double finishing = splits * (tiles * kPartialTileCost + kRangeCost);
    const double cost = waves * (ceil_div(slices, splits) + kWaveCost) + finishing;
    if (splits == 1 || cost < least) {
      best = splits;
      least = cost;
    }
  }
  return best;
}

// Loads the slices of dy and of x, one pair per call.
template <typename Element>
struct GradWeightLoader {
  static constexpr int kVector = Sizes<Element>::kVector;
  using Layout = KMajor<Element>;

  const TriangularConvParams& params;
  const int width;
  const Element *left, *right;  // this thread's vectors in the next slices of dy and x
  int left_rows, right_rows;    // rows of the tensors from there on; 0 after the batch
  int samples_left, channel;    // samples from this thread's on; its channel in the head

  __device__ __forceinline__ GradWeightLoader(const TriangularConvParams& params, int head,
                                              int row0, int column0, int64_t first_slice)
      : params(params), width(params.channels / params.heads) {
    const int64_t start =
        first_slice * Sizes<Element>::kSliceDepth + vector_across<Layout>() * kVector;
    const int64_t sample = start / width;
    channel = static_cast<int>(start - sample * width);
    samples_left = params.batch - static_cast<int>(sample);
    const int row = row0 + vector_down<Layout>(0), column = column0 + vector_down<Layout>(0);
    const int64_t place = static_cast<int64_t>(head) * width + channel;
    left = static_cast<const Element*>(params.dy) + sample * params.dy_batch_stride +
           row * params.dy_token_stride + place;
    right = static_cast<const Element*>(params.x) + sample * params.x_batch_stride +
            column * params.x_token_stride + place;
    left_rows = samples_left > 0 ? params.tokens - row : 0;
    right_rows = samples_left > 0 ? params.tokens - column : 0;
  }

  template <typename Copies>
  __device__ __forceinline__ void operator()(Copies& copies) {
    load_rows(copies, kLeft, left, params.dy_token_stride, left_rows);
    load_rows(copies, kRight, right, params.x_token_stride, right_rows);
    constexpr int kDepth = Sizes<Element>::kSliceDepth;
    left += kDepth;
    right += kDepth;
    for (channel += kDepth; channel >= width; channel -= width) {
      left += params.dy_batch_stride - width;
      right += params.x_batch_stride - width;
      if (--samples_left <= 0) left_rows = right_rows = 0;
    }
  }

  // slice(row, k) = the row's value in channel k; zero beyond the tokens and after the batch.
  template <typename Copies>
  __device__ __forceinline__ void load_rows(Copies& copies, Side side, const Element* vector,
                                            int64_t token_stride, int rows) const {
    // slice rows between a thread's vectors
    constexpr int kDown = kThreads / Layout::kVectorsAcross;
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      copies.template copy<Layout>(side, i, vector, i * kDown < rows);
      vector += kDown * token_stride;
    }
  }
};

// What a block of the first kernel computes. Blocks, fastest index first: lower tiles, heads, splits. Blocks that run at the same time thus read the same range.
struct PartialTile {
  LowerTile lower;
  int head;
  int64_t first, last;  // slices

  __device__ __forceinline__ PartialTile(const TriangularConvParams& params, int splits) {
    const int tiles = static_cast<int>(lower_tiles(params.tokens, kTile));
    int block = blockIdx.x;
    lower = locate_lower_tile(block % tiles);
    block /= tiles;
    head = block % params.heads;
    const int split = block / params.heads;
    const int64_t count = slice_count(params);
    first = count * split / splits;
    last = count * (split + 1) / splits;
  }

  __device__ __forceinline__ bool on_diagonal() const { return lower.row == lower.column; }
};

// Columns are assigned to the warps like rows, alternating every 16. On the diagonal, the groups
// above the diagonal are then the same in every warp: all skip the same 6 of 16 groups.
__device__ __forceinline__ int first_group_column() { return warp_column() * 16; }
constexpr int kGroupColumnStep = 32;

// Calls multiply(row_group, column_group) for all groups of a warp that are needed.
template <typename Multiply>
__device__ __forceinline__ void multiply_lower_groups(bool on_diagonal, Multiply&& multiply) {
#pragma unroll
  for (int row_group = 0; row_group < kWarpGroups; ++row_group) {
#pragma unroll
    for (int column_group = 0; column_group <= row_group; ++column_group)
      multiply(row_group, column_group);
  }
  if (on_diagonal) return;
#pragma unroll
  for (int row_group = 0; row_group < kWarpGroups; ++row_group) {
#pragma unroll
    for (int column_group = row_group + 1; column_group < kWarpGroups; ++column_group)
      multiply(row_group, column_group);
  }
}

// The start of this block's tile in the workspace.
__device__ __forceinline__ float* partial_tile(const TriangularConvParams& params) {
  return static_cast<float*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * kTileSize;
}

inline int64_t partial_blocks(const TriangularConvParams& params, int splits) {
  return lower_tiles(params.tokens, kTile) * params.heads * splits;
}

inline int64_t workspace_bytes(const TriangularConvParams& params) {
  if (grad_weight_finish::is_empty(params)) return 0;
  return partial_blocks(params, choose_splits(params)) * kTileSize *
         static_cast<int64_t>(sizeof(float));
}

// Launches both kernels; launch(blocks, splits) launches the first.
template <typename Launch>
cudaError_t launch_grad_weight(const TriangularConvParams& params, Launch&& launch) {
  using grad_weight_finish::finish;
  if (grad_weight_finish::is_empty(params)) return finish<kTile>(params, 0, 0);
  const int splits = choose_splits(params);
  const int64_t blocks = partial_blocks(params, splits);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaError_t status = launch(static_cast<unsigned>(blocks), splits);
  return status == cudaSuccess ? finish<kTile>(params, params.tokens, splits) : status;
}

}  // namespace tensor
