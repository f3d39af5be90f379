// What grad-weight shares on the tensor cores of sm_70 and sm_80. Two kernels: the first computes
// the lower 128 x 128 tiles, with the sum over (batch, channels) cut into `splits` ranges whose
// partial tiles go to the workspace in fp32; the second (grad_weight_finish.cuh) adds them in a
// fixed order. For a weight by lag see lags.cuh.
#pragma once

#include "grad_weight_finish.cuh"
#include "lags.cuh"
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

// What a block computes at a time: the sum over tiles on a diagonal, from the one at (row0,
// column0) on, and over some steps. A step is one slice of one tile; all `along` tiles come before
// the next slice.
struct Task {
  int head, row0, column0, along;
  int first, steps;
  float* tile;  // the result, kTile x kTile

  __device__ __forceinline__ bool on_diagonal() const { return row0 == column0; }
};

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
  const int along;
  int down;                     // tiles down the diagonal from the first one

  __device__ __forceinline__ GradWeightLoader(const TriangularConvParams& params,
                                              const Task& task)
      : params(params),
        width(params.channels / params.heads),
        along(task.along),
        down(task.first % along) {
    const int64_t start = static_cast<int64_t>(task.first / along) * Sizes<Element>::kSliceDepth +
                          vector_across<Layout>() * kVector;
    const int64_t sample = start / width;
    channel = static_cast<int>(start - sample * width);
    samples_left = params.batch - static_cast<int>(sample);
    const int first = down * kTile + vector_down<Layout>(0);
    const int row = task.row0 + first, column = task.column0 + first;
    const int64_t place = static_cast<int64_t>(task.head) * width + channel;
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
    if (++down < along) return move(1);
    move(1 - down);
    down = 0;
    constexpr int kDepth = Sizes<Element>::kSliceDepth;
    left += kDepth;
    right += kDepth;
    for (channel += kDepth; channel >= width; channel -= width) {
      left += params.dy_batch_stride - width;
      right += params.x_batch_stride - width;
      if (--samples_left <= 0) left_rows = right_rows = 0;
    }
  }

  // Moves by tiles down the diagonal.
  __device__ __forceinline__ void move(int tiles) {
    if (tiles == 0) return;
    left += tiles * kTile * params.dy_token_stride;
    right += tiles * kTile * params.x_token_stride;
    if (samples_left <= 0) return;
    left_rows -= tiles * kTile;
    right_rows -= tiles * kTile;
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

inline int64_t partial_blocks(const TriangularConvParams& params, int splits) {
  return lower_tiles(params.tokens, kTile) * params.heads * splits;
}

using Parts = LagParts<kTile, kTile, kTile>;

inline LagPlan make_lag_plan(const TriangularConvParams& params) {
  return LagPlan(params, max(1, params.processors) * kBlocksResident, kTile, slice_count(params),
                 1);
}

// Floats of the workspace: the tiles, then the sums along the diagonals of pieces.
__host__ __device__ inline int64_t tile_floats(const LagPlan& plan) {
  return static_cast<int64_t>(plan.workers) * kTileSize;
}

inline int64_t workspace_bytes(const TriangularConvParams& params) {
  if (params.lag_zero > 0) {
    const LagPlan plan = make_lag_plan(params);
    return (tile_floats(plan) + int64_t(plan.pieces()) * Parts::kSums) * sizeof(float);
  }
  if (grad_weight_finish::is_empty(params)) return 0;
  return partial_blocks(params, choose_splits(params)) * kTileSize * sizeof(float);
}

// Calls compute(task) for what this block computes. Of a full weight that is one range of a tile's
// slices. Blocks, fastest index first: lower tiles, heads, splits. Blocks that run at the same time
// thus read the same range.
template <typename Compute>
__device__ __forceinline__ void for_each_task(const TriangularConvParams& params, int splits,
                                               Compute&& compute) {
  const int tiles = static_cast<int>(lower_tiles(params.tokens, kTile));
  const LowerTile lower = locate_lower_tile(blockIdx.x % tiles);
  const int head = blockIdx.x / tiles % params.heads, split = blockIdx.x / tiles / params.heads;
  const int64_t slices = slice_count(params);
  const int first = static_cast<int>(slices * split / splits);
  const int last = static_cast<int>(slices * (split + 1) / splits);
  float* const tile =
      static_cast<float*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * kTileSize;
  compute(Task{head, lower.row * kTile, lower.column * kTile, 1, first, last - first, tile});
}

// By lag: the pieces of a worker. Sums their tiles along the diagonals.
template <typename Compute>
__device__ __forceinline__ void for_each_task(const TriangularConvParams& params,
                                               const LagPlan& plan, Compute&& compute) {
  float* const workspace = static_cast<float*>(params.workspace);
  float* const tile = workspace + static_cast<int64_t>(blockIdx.x) * kTileSize;
  for (LagPieces piece(plan, blockIdx.x); piece.valid(); piece.next()) {
    compute(Task{piece.head, piece.diagonal * kTile, 0, plan.diagonals - piece.diagonal,
                 piece.begin, piece.end - piece.begin, tile});
    __syncthreads();  // the tile is complete
    float* const sums =
        workspace + tile_floats(plan) + static_cast<int64_t>(piece.number()) * Parts::kSums;
    for (int number = threadIdx.x; number < Parts::kSums - 1; number += kThreads)
      sums[number] = Parts::sum(tile, number);
    __syncthreads();  // and has been read
  }
}

// Launches both kernels; launch(blocks, splits or plan) launches the first.
template <typename Launch>
cudaError_t launch_grad_weight(const TriangularConvParams& params, Launch&& launch) {
  using grad_weight_finish::finish;
  if (params.lag_zero > 0) {
    const LagPlan plan = make_lag_plan(params);
    const cudaError_t status = launch(static_cast<unsigned>(plan.workers), plan);
    const float* sums = static_cast<const float*>(params.workspace) + tile_floats(plan);
    return status == cudaSuccess ? finish_lags<Parts>(params, plan, sums) : status;
  }
  if (grad_weight_finish::is_empty(params)) return finish<kTile>(params, 0, 0);
  const int splits = choose_splits(params);
  const int64_t blocks = partial_blocks(params, splits);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaError_t status = launch(static_cast<unsigned>(blocks), splits);
  return status == cudaSuccess ? finish<kTile>(params, params.tokens, splits) : status;
}

}  // namespace tensor
