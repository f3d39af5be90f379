// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
// zeros elsewhere, on the tensor cores of sm_70 and sm_80. Two kernels: the first computes the lower
// 128 x 128 tiles, with the sum over (batch, channels) cut into `splits` ranges whose partial tiles
// go to the workspace (splits, heads, lower tiles, 128, 128) in fp32; the second adds them in a fixed
// order, without atomics, so results are reproducible bit for bit. For a weight by lag see lags.cuh.
#pragma once

#include "kernels.h"
#include "lags.cuh"
#include "tensor_product.cuh"

namespace tensor {

constexpr int kTileSize = kTile * kTile;
constexpr int kMaxSplits = 128;

// The sum runs over (sample, channel of a head) as one dimension, cut into slices. A vector of 16
// bytes never crosses from one sample into the next.
__host__ __device__ __forceinline__ int64_t slice_count(const TriangularConvParams& params) {
  const int64_t depth = static_cast<int64_t>(params.batch) * (params.channels / params.heads);
  return ceil_div(depth, kSliceDepth);
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
  const int64_t places = static_cast<int64_t>(params.processors) * kBlocksResident;
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
  using Layout = KMajor;

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
    const int64_t start = static_cast<int64_t>(task.first / along) * kSliceDepth +
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
    left += kSliceDepth;
    right += kSliceDepth;
    for (channel += kSliceDepth; channel >= width; channel -= width) {
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
  return LagPlan(params, params.processors * kBlocksResident, kTile, slice_count(params), 1);
}

// Floats of the workspace: the tiles, then the sums along the diagonals of pieces.
__host__ __device__ inline int64_t tile_floats(const LagPlan& plan) {
  return static_cast<int64_t>(plan.workers) * kTileSize;
}

inline int64_t workspace_bytes(const TriangularConvParams& params) {
  if (params.window > 0) {
    const LagPlan plan = make_lag_plan(params);
    return (tile_floats(plan) + int64_t(plan.pieces()) * Parts::kSums) * sizeof(float);
  }
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
    compute(Task{piece.head, piece.diagonal * kTile, 0, plan.along(piece.diagonal),
                 piece.begin, piece.end - piece.begin, tile});
    __syncthreads();  // the tile is complete
    float* const sums =
        workspace + tile_floats(plan) + static_cast<int64_t>(piece.number()) * Parts::kSums;
    for (int number = threadIdx.x; number < Parts::kSums - 1; number += kThreads)
      sums[number] = Parts::sum(tile, number);
    __syncthreads();  // and has been read
  }
}

// `Plan` is the number of splits, or LagPlan.
template <typename Set, typename Plan>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, const Plan plan) {
  if constexpr (Set::kIsHere) {
    using Layout = KMajor;
    alignas(128) __shared__ unsigned char memory[Set::kSharedBytes];
    for_each_task(params, plan, [&](const Task& task) {
      GradWeightLoader<typename Set::Element> loader(params, task);
      typename Set::Accumulator sum;
      int unloaded = task.steps;
      const auto load = [&](auto& copies) {
        if (--unloaded >= 0) loader(copies);
      };
      typename Set::template Pipeline<Layout, Layout, kGroupColumnStep> pipeline(
          memory, first_group_column(), load);
      pipeline.run(task.steps, load, [&](const typename Set::Fragments& fragments) {
        multiply_lower_groups(task.on_diagonal(), [&](int row_group, int column_group) {
          Set::template multiply_groups<Layout, Layout>(sum, fragments, row_group, column_group);
        });
      });
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
        for (int block = 0; block < 2 * kWarpGroups; ++block) {
          const int row = group_row(group) + Set::value_row(lane());
          const int column = first_group_column() + block / 2 * kGroupColumnStep + block % 2 * 8 +
                             Set::quad_place(lane()) * 2;
          float* const place = task.tile + row * kTile + column;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<float2*>(place + half * Set::kHalfRows * kTile) =
                make_float2(sum.at(group, half, block, 0), sum.at(group, half, block, 1));
          }
        }
      }
    });
  }
}

// ------------------------------------------------------------------------------- the second kernel

constexpr int kFinishThreads = 256;
constexpr int kFinishVector = 4;  // columns per thread
constexpr int kFinishRows = 4;    // rows per thread, so that many reads are in flight at once

// Writes the part of the vector that lies left of `context`.
__device__ __forceinline__ void store_vector(float* row, int column, int context,
                                             const float (&value)[kFinishVector]) {
  if (context % kFinishVector == 0) {
    *reinterpret_cast<float4*>(row + column) =
        make_float4(value[0], value[1], value[2], value[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kFinishVector; ++i) {
      if (column + i < context) row[column + i] = value[i];
    }
  }
}

// Rows of dweight per block, all in one tile.
constexpr int kBlockRows = kFinishRows * kFinishThreads * kFinishVector / kTile;

// Blocks, fastest index first: column tiles of dweight, groups of kBlockRows rows, heads.
static __global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const TriangularConvParams params, int splits) {
  constexpr int kAcross = kTile / kFinishVector, kDown = kFinishThreads / kAcross;  // threads
  static_assert(kTile % kBlockRows == 0, "a block's rows are of one tile");
  const int column_tiles = static_cast<int>(ceil_div(params.context, kTile));
  const int row_groups = static_cast<int>(ceil_div(params.context, kBlockRows));
  const int row_group = blockIdx.x / column_tiles % row_groups;
  const int64_t head = blockIdx.x / column_tiles / row_groups;
  const LowerTile tile = {row_group * kBlockRows / kTile,
                          static_cast<int>(blockIdx.x) % column_tiles};
  const int row0 = row_group * kBlockRows + threadIdx.x / kAcross;
  const int across = threadIdx.x % kAcross * kFinishVector, column = tile.column * kTile + across;

  float value[kFinishRows][kFinishVector] = {};
  if (tile.column <= tile.row && tile.row * kTile < params.tokens) {
    const int64_t tiles = lower_tiles(params.tokens, kTile);
    const int64_t split_stride = tiles * params.heads * kTile * kTile;
    const float* partial =
        static_cast<const float*>(params.workspace) + across +
        (head * tiles + tile.row * (tile.row + 1) / 2 + tile.column) * kTile * kTile;
    for (int split = 0; split < splits; ++split, partial += split_stride) {
#pragma unroll
      for (int i = 0; i < kFinishRows; ++i) {
        const float4 added =
            __ldcs(reinterpret_cast<const float4*>(partial + (row0 + i * kDown) % kTile * kTile));
        value[i][0] += added.x;
        value[i][1] += added.y;
        value[i][2] += added.z;
        value[i][3] += added.w;
      }
    }
  }
  if (column >= params.context) return;
#pragma unroll
  for (int i = 0; i < kFinishRows; ++i) {
    const int row = row0 + i * kDown;
    if (row >= params.context) continue;
#pragma unroll
    for (int c = 0; c < kFinishVector; ++c) {
      if (column + c > row || row >= params.tokens) value[i][c] = 0.0f;
    }
    float* const gradient = params.dweight + (head * params.context + row) * params.context;
    store_vector(gradient, column, params.context, value[i]);
  }
}

inline cudaError_t finish(const TriangularConvParams& params, int splits) {
  const int64_t blocks = static_cast<int64_t>(params.heads) * ceil_div(params.context, kTile) *
                         ceil_div(params.context, kBlockRows);
  return launch(params, finish_kernel, blocks, kFinishThreads, 0, params, splits);
}

// -------------------------------------------------------------------------------------------------

template <typename Set>
cudaError_t launch_grad_weight(const TriangularConvParams& params) {
  if (params.window > 0) {
    const LagPlan plan = make_lag_plan(params);
    const cudaError_t status =
        launch(params, partial_kernel<Set, LagPlan>, plan.workers, kThreads, 0, params, plan);
    const float* sums = static_cast<const float*>(params.workspace) + tile_floats(plan);
    return status == cudaSuccess ? finish_lags<Parts>(params, plan, sums) : status;
  }
  const int splits = choose_splits(params);
  const cudaError_t status = launch(params, partial_kernel<Set, int>,
                                    partial_blocks(params, splits), kThreads, 0, params, splits);
  return status == cudaSuccess ? finish(params, splits) : status;
}

template <typename Set>
KernelSet kernel_set() {
  return {launch_product<Set, false>, launch_product<Set, true>, workspace_bytes,
          launch_grad_weight<Set>, false};
}

}  // namespace tensor
