// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
//   zeros elsewhere, and
// dbias[h,i] = sum over batch and channels of dy[b,i,c], on Hopper's tensor cores.
//
// A cluster computes a tile of 256 x 256: 256 rows (dy, the left operand, multicast) and 128
// columns (x) for each of its two blocks. The depth runs over chunks of 64 channels of each sample.
// Only tiles that touch the lower triangle are computed, and within a tile on the diagonal only the
// row blocks that touch it.
//
// For a weight by lag, lags.cuh says what is computed and how it is shared out. The rest of this
// comment is about full weights.
//
// Tiles are assigned to the clusters in whole waves. All clusters then move along the depth
// together, so the slices of x and dy that one cluster reads are in the L2 cache for the others.
// The remaining tiles are cut along the depth into equal splits. Their partial sums go to the
// workspace, and a second kernel adds them in a fixed order, so results are reproducible bit for
// bit.
//
// The bias gradient comes from the same pass over dy. In a tile on the diagonal, the cluster's
// second block has only half of its row blocks to compute; it also multiplies all row blocks by a
// box of ones, 8 columns wide. The zeros outside the tiles are written by warps that are otherwise
// idle.
#include <algorithm>

#include "hopper_tile.cuh"
#include "kernels.h"
#include "lags.cuh"

namespace hopper {
namespace {

constexpr int kRowBlocks = 4;
// 256; also the columns of a cluster's tile
constexpr int kTileRows = kRowBlocks * kBox;
constexpr int kStages = 4;
constexpr int kColumnBoxes = kColumns / kBox;
constexpr int kStageBytes = (kRowBlocks + kColumnBoxes) * kBoxBytes;
// groups of four sums per multiplying thread
constexpr int kGroups = kColumns / 8;
static_assert(kRowBlocks == kMultipliers, "each multiplier has one row block");
constexpr int kMultiplyingThreads = kMultipliers * kWarpgroup;
constexpr int kPartialFloats = kTileRows * kColumns;     // of one block
// fixed cost of a split besides its products, in steps of the depth
constexpr int kSplitOverhead = 4;
constexpr int kMaxSplits = 128;

// How the work is cut: `whole` tiles are computed in full, `rest` tiles in `splits` parts of the
// depth each. Items are numbered whole tiles first, then split by split. Cluster c takes the items
// c, c + clusters, ...
struct Plan {
  int32_t row_tiles;   // tiles along the tokens
  int32_t triangle;    // lower tiles of one head
  int32_t heads;
  int32_t depth;       // chunks of 64 channels over all samples
  int32_t whole, rest, splits;

  __host__ __device__ int items() const { return whole + rest * splits; }
};

// `Plan` is that, or LagPlan.
template <typename Plan>
struct WeightArguments {
  CUtensorMap dy, x;
  float* dweight;
  float* dbias;
  // (rest * splits, 2 blocks, kGroups, 512 threads, 4); by lag (blocks, 4 multipliers, 64, 128)
  float* partials;
  float* sums;     // of the bias: (rest * splits, 256 rows); by lag (pieces, kParts, kSums)
  int32_t tokens, context;
  int32_t band;    // lags from here on are zero
  int32_t chunks;  // of one sample
  Plan plan;
};

__device__ __forceinline__ int cluster_index() { return blockIdx.x / kClusterSize; }
__device__ __forceinline__ int cluster_count() { return gridDim.x / kClusterSize; }

// Tile number `index`, counted along the rows of the triangle, head by head.
struct WeightTile {
  int head, row_tile, column_tile;

  __device__ __forceinline__ WeightTile(const Plan& plan, int index) {
    head = index / plan.triangle;
    const LowerTile lower = locate_lower_tile(index % plan.triangle);
    row_tile = lower.row;
    column_tile = lower.column;
  }
  // dbias is computed in the tiles on the diagonal.
  __device__ __forceinline__ bool brings_bias() const { return column_tile == row_tile; }
};

// What a cluster computes, one item after the other: for (Items<Plan> item(plan); item.valid();
// item.next()). An item is the steps [begin, end) of a tile's depth.
template <typename Plan>
struct Items;

template <>
struct Items<Plan> {
  const Plan& plan;
  int index;
  WeightTile tile;
  int begin, end;
  int partial;  // its index in the workspace, or -1: the sums are complete

  __device__ __forceinline__ explicit Items(const Plan& plan)
      : plan(plan), index(cluster_index()), tile(plan, 0) {
    locate();
  }
  __device__ __forceinline__ bool valid() const { return index < plan.items(); }
  __device__ __forceinline__ void next() {
    index += cluster_count();
    locate();
  }
  // The tiles whose products are added up: this one alone, and in one go.
  __device__ __forceinline__ int along() const { return 1; }
  __device__ __forceinline__ int rounds() const { return 1; }
  __device__ __forceinline__ int first_step(int) const { return begin; }

 private:
  __device__ __forceinline__ void locate() {
    if (!valid()) return;
    const bool whole = index < plan.whole;
    tile = WeightTile(plan, whole ? index : plan.whole + (index - plan.whole) % plan.rest);
    const int split = whole ? 0 : (index - plan.whole) / plan.rest;
    const int splits = whole ? 1 : plan.splits;
    begin = static_cast<int>(static_cast<int64_t>(plan.depth) * split / splits);
    end = static_cast<int>(static_cast<int64_t>(plan.depth) * (split + 1) / splits);
    partial = splits == 1 ? -1 : index - plan.whole;
  }
};

// The tile of a piece is that of the diagonal's first rows. Its depth is longer: the next step is
// the same chunk of the next tile along the diagonal, if there is one.
template <>
struct Items<LagPlan> : LagPieces {
  struct {
    int head, row_tile, column_tile;
  } tile;

  __device__ __forceinline__ explicit Items(const LagPlan& plan)
      : LagPieces(plan, cluster_index()) {
    tile = {head, diagonal, 0};
  }
  __device__ __forceinline__ void next() {
    LagPieces::next();
    tile = {head, diagonal, 0};
  }
  __device__ __forceinline__ int along() const { return plan.along(diagonal); }
  __device__ __forceinline__ int rounds() const { return plan.rounds; }
  __device__ __forceinline__ int first_step(int round) const {
    return begin + round * plan.steps(diagonal);
  }
};

// A step of an item's depth: `down` tiles along the diagonal, a chunk of a sample. Those of the last
// round may lie beyond the last sample, where TMA reads zeros.
struct Step {
  int down, chunk, sample;

  __device__ __forceinline__ Step(int step, int along, int chunks)
      : down(step % along), chunk(step / along % chunks), sample(step / along / chunks) {}
  __device__ __forceinline__ void advance(int along, int chunks) {
    if (++down < along) return;
    down = 0;
    if (++chunk < chunks) return;
    chunk = 0;
    ++sample;
  }
};

// The part of a tile that one block computes.
struct BlockTile {
  int first_row, first_column;
  int band;
  int row_blocks;  // row blocks that hold tokens

  template <typename Arguments, typename Tile>
  __device__ __forceinline__ BlockTile(const Arguments& arguments, const Tile& tile, int rank)
      : first_row(tile.row_tile * kTileRows),
        first_column(tile.column_tile * kTileRows + rank * kColumns),
        band(arguments.band) {
    row_blocks = min(kRowBlocks, (arguments.tokens - first_row + kBox - 1) / kBox);
  }
  // Whether a row block holds anything on or below the diagonal, and inside the band.
  __device__ __forceinline__ bool needs(int row_block) const {
    const int lag = first_row + row_block * kBox - first_column;  // of the block's first row
    return row_block < row_blocks && lag > -kBox && lag - (kColumns - 1) < band;
  }
  __device__ __forceinline__ bool is_idle() const {
    bool needed = false;
    for (int row_block = 0; row_block < kRowBlocks; ++row_block) needed |= needs(row_block);
    return !needed;
  }
};

// Writes the thread's sums at (row, column): rows r and r + 8, two columns each. Elements above the
// diagonal and beyond the tokens become zero whatever the sum, which may be zero times infinity.
__device__ __forceinline__ void store_sums(const WeightArguments<Plan>& arguments, int head,
                                           int row, int column, const float (&sum)[4]) {
  const int context = arguments.context;
  float* const matrix = arguments.dweight + static_cast<int64_t>(head) * context * context;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = row + half * 8;
    if (i >= context) continue;
    float* const place = matrix + static_cast<int64_t>(i) * context + column;
    const float first = column <= i && i < arguments.tokens ? sum[half * 2] : 0.0f;
    const float second = column + 1 <= i && i < arguments.tokens ? sum[half * 2 + 1] : 0.0f;
    if (context % 2 == 0 && column < context) {
      *reinterpret_cast<float2*>(place) = make_float2(first, second);
    } else {
      if (column < context) place[0] = first;
      if (column + 1 < context) place[1] = second;
    }
  }
}

// The place, in a block's partial tile, of group `group` of thread `thread`'s sums.
struct Place {
  int row, column;
  __device__ __forceinline__ Place(int thread, int group)
      : row(thread / kWarpgroup * kBox + thread % kWarpgroup / 32 * 16 + thread % 32 / 4),
        column(group * 8 + thread % 4 * 2) {}
};

// The loader: one thread.
template <typename Plan>
__device__ __forceinline__ void load_operands(const WeightArguments<Plan>& arguments, char* stages,
                                              Ring<kStages, true>& ring) {
  const int rank = cluster_rank();
  RingPosition<kStages> at;
  for (Items<Plan> item(arguments.plan); item.valid(); item.next()) {
    const BlockTile tile(arguments, item.tile, rank);
    const int column_boxes = tile.is_idle() ? 0 : kColumnBoxes;
    for (int round = 0; round < item.rounds(); ++round) {
      Step step(item.first_step(round), item.along(), arguments.chunks);
      for (int depth = item.end - item.begin; depth > 0; --depth, at.advance()) {
        char* stage = stages + at.slot * kStageBytes;
        uint64_t* full = &ring.full[at.slot];
        const int channel = step.chunk * kBox, down = step.down * kTileRows;
        barrier_wait(&ring.empty[at.slot], at.parity ^ 1);
        barrier_arrive_expect(full, (tile.row_blocks + column_boxes) * kBoxBytes);
        for (int box = 0; box < column_boxes; ++box) {
          load_box<false>(stage + (kRowBlocks + box) * kBoxBytes, &arguments.x, full, channel,
                          item.tile.head, tile.first_column + box * kBox + down, step.sample);
        }
        for (int row_block = rank; row_block < tile.row_blocks; row_block += kClusterSize) {
          load_box<true>(stage + row_block * kBoxBytes, &arguments.dy, full, channel,
                         item.tile.head, tile.first_row + row_block * kBox + down, step.sample);
        }
        step.advance(item.along(), arguments.chunks);
      }
    }
  }
}

// The products of one warpgroup: its row block times the columns (kMultiplies), and its row block
// times the box of ones, i.e. summed over the depth (kWithBias).
template <typename Element, bool kMultiplies, bool kWithBias>
__device__ __forceinline__ void run(float (&sum)[64], float (&bias)[4], uint32_t left,
                                    uint32_t right, uint32_t ones, Ring<kStages, true>& ring,
                                    RingPosition<kStages>& at, int depths) {
#pragma unroll 1
  for (int depth = 0; depth < depths; ++depth, at.advance()) {
    barrier_wait(&ring.full[at.slot], at.parity);
    const uint32_t stage = at.slot * (kStageBytes / 16);
    wgmma_fence();
    if (kMultiplies)
      multiply_slices<Element, false, false, kBox / 16>(sum, left + stage, right + stage,
                                                        depth > 0);
    if (kWithBias) {
#pragma unroll
      for (int slice = 0; slice < kBox / 16; ++slice) {
        wgmma_n8<Element>(bias, left + stage + slice * slice_step<false>(), ones,
                          depth + slice > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    ring.release(at.slot);
  }
  if (kMultiplies) pin(sum);
  if (kWithBias) pin(bias);
}

// Writes the sums of a multiplier's part of a tile, or to the workspace if they are partial.
__device__ __forceinline__ void write(const WeightArguments<Plan>& arguments,
                                      const Items<Plan>& item, const BlockTile& tile, int rank,
                                      int multiplier, bool multiplies, const float (&sum)[64]) {
  const int thread = multiplier * kWarpgroup + threadIdx.x % kWarpgroup;
  float4* partial =
      reinterpret_cast<float4*>(arguments.partials) +
      (static_cast<int64_t>(item.partial) * kClusterSize + rank) * (kPartialFloats / 4) + thread;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = multiplies ? sum[group * 4 + i] : 0.0f;
    if (item.partial < 0) {
      const Place place(thread, group);
      store_sums(arguments, item.tile.head, tile.first_row + place.row,
                 tile.first_column + place.column, value);
    } else if (multiplies) {
      partial[group * kMultiplyingThreads] = make_float4(value[0], value[1], value[2], value[3]);
    }
  }
}

__device__ __forceinline__ void write_bias(const WeightArguments<Plan>& arguments,
                                           const Items<Plan>& item, const BlockTile& tile,
                                           int multiplier, const float (&bias)[4]) {
  if (threadIdx.x % 4 != 0) return;  // all columns of the product with ones are the same
  const Place place(multiplier * kWarpgroup + threadIdx.x % kWarpgroup, 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + half * 8;
    if (item.partial >= 0) {
      arguments.sums[static_cast<int64_t>(item.partial) * kTileRows + row] = bias[half * 2];
    } else if (tile.first_row + row < arguments.tokens) {
      const int64_t first =
          static_cast<int64_t>(item.tile.head) * arguments.context + tile.first_row;
      arguments.dbias[first + row] = bias[half * 2];
    }
  }
}

using Parts = LagParts<kTileRows, kBox, kColumns>;

// By lag: writes the sums along the diagonals of a multiplier's part of a piece. The part passes
// through memory (in fact the L2 cache), where threads find each other's values.
__device__ __forceinline__ void write_lags(const WeightArguments<LagPlan>& arguments,
                                           const Items<LagPlan>& item, int rank, int multiplier,
                                           bool multiplies, const float (&sum)[64]) {
  const int thread = threadIdx.x % kWarpgroup;
  float* part = arguments.partials +
                static_cast<int64_t>(blockIdx.x * kMultipliers + multiplier) * (kBox * kColumns);
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const Place place(thread, group);
    float* const to = part + place.row * kColumns + place.column;
    const float* value = sum + group * 4;
    *reinterpret_cast<float2*>(to) = make_float2(value[0], value[1]);
    *reinterpret_cast<float2*>(to + 8 * kColumns) = make_float2(value[2], value[3]);
  }
  warpgroup_sync(multiplier);
  float* const sums =
      arguments.sums +
      (static_cast<int64_t>(item.number()) * Parts::kParts + multiplier * Parts::kAcross + rank) *
          Parts::kSums;
  for (int number = thread; number < Parts::kSums - 1; number += kWarpgroup)
    sums[number] = multiplies ? Parts::sum(part, number) : 0.0f;
  warpgroup_sync(multiplier);  // the values have been read before the next piece overwrites them
}

// A multiplier: one warpgroup.
template <typename Element, typename Plan>
__device__ __forceinline__ void multiply(const WeightArguments<Plan>& arguments, int multiplier,
                                         uint32_t stages, uint32_t ones_box,
                                         Ring<kStages, true>& ring) {
  constexpr bool kByLag = std::is_same<Plan, LagPlan>::value;
  const int rank = cluster_rank();
  const uint32_t left = operand(stages + multiplier * kBoxBytes);
  const uint32_t right = operand(stages + kRowBlocks * kBoxBytes);
  const uint32_t ones = operand(ones_box);
  RingPosition<kStages> at;
  for (Items<Plan> item(arguments.plan); item.valid(); item.next()) {
    const BlockTile tile(arguments, item.tile, rank);
    const bool multiplies = tile.needs(multiplier);
    const int depths = (item.end - item.begin) * item.rounds();
    float sum[64], bias[4];
    bool with_bias = false;
    if constexpr (!kByLag)
      with_bias = arguments.dbias != nullptr && rank == 1 && item.tile.brings_bias();
    if (!kByLag && multiplies && with_bias) {
      run<Element, true, true>(sum, bias, left, right, ones, ring, at, depths);
    } else if (multiplies) {
      run<Element, true, false>(sum, bias, left, right, ones, ring, at, depths);
    } else if (!kByLag && with_bias) {
      run<Element, false, true>(sum, bias, left, right, ones, ring, at, depths);
    } else {
      run<Element, false, false>(sum, bias, left, right, ones, ring, at, depths);
    }
    if constexpr (kByLag) {
      write_lags(arguments, item, rank, multiplier, multiplies, sum);
    } else {
      write(arguments, item, tile, rank, multiplier, multiplies, sum);
      if (with_bias) write_bias(arguments, item, tile, multiplier, bias);
    }
  }
}

// Writes the zeros that no tile covers: columns right of the diagonal tile, rows below the tiles.
// `warp` is one of `warps` in the grid.
__device__ __forceinline__ void write_zeros(const WeightArguments<Plan>& arguments, int warp,
                                            int warps) {
  const int lane = threadIdx.x % 32;
  const int context = arguments.context;
  const int64_t rows = static_cast<int64_t>(arguments.plan.heads) * context;
  for (int64_t head_row = warp; head_row < rows; head_row += warps) {
    const int row = static_cast<int>(head_row % context);
    const int first =
        row / kTileRows < arguments.plan.row_tiles ? (row / kTileRows + 1) * kTileRows : 0;
    float* const values = arguments.dweight + head_row * context;
    if (context % 4 == 0) {
      for (int column = first + lane * 4; column < context; column += 32 * 4)
        *reinterpret_cast<float4*>(values + column) = make_float4(0, 0, 0, 0);
    } else {
      for (int column = first + lane; column < context; column += 32) values[column] = 0.0f;
    }
    if (lane == 0 && arguments.dbias != nullptr && row >= arguments.tokens)
      arguments.dbias[head_row] = 0.0f;
  }
}

constexpr int kWeightSharedBytes =
    1024 + kStages * kStageBytes + 1024 + static_cast<int>(sizeof(Ring<kStages, true>));

template <typename Element, typename Plan>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    grad_weight_kernel(const __grid_constant__ WeightArguments<Plan> arguments) {
  extern __shared__ char shared[];
  char* stages = shared + (1024 - shared_address(shared) % 1024) % 1024;
  char* ones = stages + kStages * kStageBytes;  // 8 rows of 64 ones
  auto& ring = *reinterpret_cast<Ring<kStages, true>*>(ones + 1024);
  for (int i = threadIdx.x; i < 8 * kBox; i += kThreads)
    reinterpret_cast<Element*>(ones)[i] = Element(1.0f);
  fence_async_proxy();
  if (threadIdx.x == 0) {
    prefetch_map(&arguments.dy);
    prefetch_map(&arguments.x);
    ring.init(1);
    barrier_init_fence();
  }
  __syncthreads();
  cluster_sync();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kMultipliers) {
    give_registers<kLoaderRegisters>();
    const int warp = threadIdx.x % kWarpgroup / 32;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) load_operands(arguments, stages, ring);
    } else if constexpr (std::is_same<Plan, hopper::Plan>::value) {
      write_zeros(arguments, blockIdx.x * 3 + warp - 1, gridDim.x * 3);
    }
    __syncwarp();
  } else {
    take_registers<kMultiplierRegisters>();
    multiply<Element>(arguments, warpgroup, shared_address(stages), shared_address(ones), ring);
  }
  cluster_sync();  // the other block may still write into our shared memory
}

// Adds the partial sums of the split tiles. Blocks: (rest * 2 blocks of the cluster, kGroups).
__global__ void __launch_bounds__(kMultiplyingThreads)
    finish_kernel(const WeightArguments<Plan> arguments) {
  const Plan& plan = arguments.plan;
  const int group = blockIdx.x % kGroups;
  const int rank = blockIdx.x / kGroups % kClusterSize;
  const int rest = blockIdx.x / kGroups / kClusterSize;
  const WeightTile weight_tile(plan, plan.whole + rest);
  const BlockTile tile(arguments, weight_tile, rank);
  const Place place(threadIdx.x, group);

  float sum[4] = {};
  if (tile.needs(place.row / kBox)) {
    const float4* partial = reinterpret_cast<const float4*>(arguments.partials) +
                            group * kMultiplyingThreads + threadIdx.x;
#pragma unroll 8
    for (int split = 0; split < plan.splits; ++split) {
      const int64_t block = static_cast<int64_t>(split * plan.rest + rest) * kClusterSize + rank;
      const float4 value = partial[block * (kPartialFloats / 4)];
      sum[0] += value.x;
      sum[1] += value.y;
      sum[2] += value.z;
      sum[3] += value.w;
    }
  }
  store_sums(arguments, weight_tile.head, tile.first_row + place.row,
             tile.first_column + place.column, sum);

  const int row = tile.first_row + threadIdx.x;
  const bool has_bias = group == 0 && rank == 0 && weight_tile.brings_bias();
  if (arguments.dbias != nullptr && has_bias && threadIdx.x < kTileRows && row < arguments.tokens) {
    float bias = 0.0f;
    for (int split = 0; split < plan.splits; ++split) {
      bias += arguments.sums[static_cast<int64_t>(split * plan.rest + rest) * kTileRows +
                             threadIdx.x];
    }
    arguments.dbias[static_cast<int64_t>(weight_tile.head) * arguments.context + row] = bias;
  }
}

int clusters(const TriangularConvParams& params) { return params.processors / kClusterSize; }

// The number of splits that finishes first: rounds of all clusters, each a split's depth plus its
// fixed cost.
int choose_splits(int rest, int depth, int clusters) {
  int best = 1;
  int64_t best_time = INT64_MAX;
  for (int splits = 1; splits <= std::min(depth, kMaxSplits); ++splits) {
    const int64_t rounds = ceil_div(int64_t(rest) * splits, clusters);
    const int64_t time = rounds * (ceil_div(depth, splits) + (splits > 1 ? kSplitOverhead : 1));
    if (time < best_time) {
      best = splits;
      best_time = time;
    }
  }
  return best;
}

int chunks_of_sample(const TriangularConvParams& params) {
  return static_cast<int>(ceil_div(params.channels / params.heads, kBox));
}

Plan make_plan(const TriangularConvParams& params) {
  Plan plan = {};
  plan.row_tiles = static_cast<int32_t>(ceil_div(params.tokens, kTileRows));
  plan.triangle = static_cast<int32_t>(lower_tiles(params.tokens, kTileRows));
  plan.heads = params.heads;
  plan.depth = params.batch * chunks_of_sample(params);
  const int tiles = plan.triangle * plan.heads;
  plan.rest = tiles % clusters(params);
  plan.whole = tiles - plan.rest;
  plan.splits = plan.rest > 0 ? choose_splits(plan.rest, plan.depth, clusters(params)) : 1;
  return plan;
}

// Rounds in which x and dy fit in the L2 cache; of up to twice as many, those that cut the depth
// most evenly.
LagPlan make_lag_plan(const TriangularConvParams& params) {
  constexpr int64_t kRoundBytes = 24 << 20;
  const int depth = params.batch * chunks_of_sample(params);
  const int64_t bytes = int64_t(params.batch) * params.tokens * params.channels * 2 * 2;
  const int least = static_cast<int>(ceil_div(bytes, kRoundBytes));
  int rounds = std::max(1, std::min(least, depth));
  const auto steps = [&](int rounds) { return ceil_div(depth, rounds) * rounds; };
  for (int more = rounds; more <= std::min(2 * least, depth); ++more)
    if (steps(more) < steps(rounds)) rounds = more;
  return LagPlan(params, clusters(params), kTileRows, depth, rounds);
}

// Floats of the workspace: WeightArguments::partials and sums.
int64_t partial_floats(const Plan& plan) {
  return plan.splits == 1 ? 0 : int64_t(plan.rest) * plan.splits * kClusterSize * kPartialFloats;
}
int64_t sum_floats(const Plan& plan) {
  return plan.splits == 1 ? 0 : int64_t(plan.rest) * plan.splits * kTileRows;
}
int64_t partial_floats(const LagPlan& plan) {
  return int64_t(plan.workers) * kClusterSize * kPartialFloats;
}
int64_t sum_floats(const LagPlan& plan) {
  return int64_t(plan.pieces()) * Parts::kParts * Parts::kSums;
}

cudaError_t finish(const TriangularConvParams& params, const WeightArguments<Plan>& arguments) {
  const Plan& plan = arguments.plan;
  if (plan.splits == 1) return cudaSuccess;
  return launch(params, finish_kernel, plan.rest * kClusterSize * kGroups, kMultiplyingThreads, 0,
                arguments);
}
cudaError_t finish(const TriangularConvParams& params, const WeightArguments<LagPlan>& arguments) {
  return finish_lags<Parts>(params, arguments.plan, arguments.sums);
}

template <typename Plan>
cudaError_t compute(const TriangularConvParams& params, const Plan& plan) {
  cudaError_t status = cudaSuccess;
  float* workspace = static_cast<float*>(params.workspace);
  WeightArguments<Plan> arguments = {encode_dy(params, status),
                                     encode_x(params, status),
                                     params.dweight,
                                     params.dbias,
                                     workspace,
                                     workspace + partial_floats(plan),
                                     params.tokens,
                                     params.context,
                                     band(params),
                                     chunks_of_sample(params),
                                     plan};
  if (status != cudaSuccess) return status;
  const auto kernel = params.dtype == MIXER_FLOAT16 ? grad_weight_kernel<__half, Plan>
                                                    : grad_weight_kernel<__nv_bfloat16, Plan>;
  status = launch_large(params, kernel, clusters(params) * kClusterSize, kWeightSharedBytes,
                        arguments);
  return status == cudaSuccess ? finish(params, arguments) : status;
}

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  const auto bytes = [](const auto& plan) {
    return int64_t((partial_floats(plan) + sum_floats(plan)) * sizeof(float));
  };
  return params.window > 0 ? bytes(make_lag_plan(params)) : bytes(make_plan(params));
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return params.window > 0 ? compute(params, make_lag_plan(params))
                           : compute(params, make_plan(params));
}

}  // namespace
}  // namespace hopper

KernelSet hopper_kernels() {
  using namespace hopper;
  return {forward, grad_input, grad_weight_workspace, grad_weight, true};
}
