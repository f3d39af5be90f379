// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c] and (kTransposed)
// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c], on Hopper's tensor cores.
//
// Tokens are counted in blocks of 64. Forward numbers the blocks from first to last, grad-input
// from last to first, which makes it a lower triangle too: row block r of the result needs the
// steps 0 .. r along the depth, or r - reach .. r if the weight has a window. Everything below uses
// this order; Tile::token() gives a block's first token.
//
// There is one persistent cluster of two thread blocks per two multiprocessors. It loops over its
// tiles: 512 rows by 128 columns, or 256 by 256. A *row tile* is up to 8 (or 4) row blocks; all but
// the last have the same height. A *column tile* is two (or four) chunks; a chunk is 64 channels of
// one head of one sample. Both thread blocks use the same right operand, x or dy: each loads half
// of it and multicasts that half to both. Eight warpgroups multiply, four per thread block, 64 rows
// by 128 columns each. The rows are interleaved so that both blocks have equal work along the
// diagonal: one takes row blocks 0, 3, 4, 7 and the other 1, 2, 5, 6.
//
// In each thread block two threads load while four warpgroups multiply. They synchronize through
// mbarriers only:
//   - the loaders fill the stages: one with column boxes of x or dy, the other with the row boxes
//     of W that do not lie above the diagonal. If the whole triangle of W fits in the cluster's
//     shared memory (512 tokens), it is loaded once and stays there (*resident*);
//   - a multiplier runs wgmma over the stages of its window, up to its diagonal. Then it writes its
//     result through an output box while the other multipliers continue. The next tile has to wait for the last
//     row block of a thread block, so that one uses the last stage as its output boxes and stores
//     both at once.
#include "hopper_tile.cuh"
#include "kernels.h"

namespace hopper {

struct ProductArguments {
  CUtensorMap weight, input, residual, output;
  const void* bias;  // or null
  int32_t bias_dtype, tokens, context;
  int32_t lag_zero;   // as in params.h
  int32_t reach;      // blocks before its own that a row block needs
  int32_t chunks;     // of one head of one sample
  int32_t row_tiles;
  int32_t height;     // row blocks of a row tile, at most Shape::kRowBlocks
  int32_t columns;    // column tiles of a head
  int32_t heads;
};

// Where W comes from, and which thread block loads the columns of x or dy.
enum class Plan {
  // W and the columns are loaded stage by stage; each thread block loads half of the columns
  kStreamed,
  kResident,        // W stays in shared memory
  // W is resident, and each thread block loads all its columns itself, independently of the other
  kResidentAlone,
};

// The sizes of a kernel instance.
template <typename Element_, int kRowBlocks_, int kStages_, Plan kPlan, bool kTransposed_,
          bool kWithResidual_>
struct ProductShape {
  using Element = Element_;
  static constexpr int kRowBlocks = kRowBlocks_;  // of the cluster's tile: 8 or 4
  static constexpr int kStages = kStages_;
  static constexpr bool kResident = kPlan != Plan::kStreamed;
  static constexpr bool kShared = kPlan != Plan::kResidentAlone;
  static constexpr bool kTransposed = kTransposed_;
  static constexpr bool kWithResidual = kWithResidual_;

  // The multipliers of the last row box write into their last stage. The others have an output box
  // each. If the resident W leaves no room for that, the first and the third share one: they finish
  // at very different times.
  static constexpr bool kTakesTurns = kPlan == Plan::kResidentAlone && !kWithResidual;
  static constexpr int kOutputBoxes =
      kTakesTurns ? 2 : kMultipliers - 2 * kMultipliers / kRowBlocks;

  // A multiplier skips at most 7 steps: those after its diagonal, and those of the next tile before
  // its window. Adding the stages, 16 is more than any two threads can be
  // apart. (Must be a multiple of kStages.)
  static constexpr int kFullBarriers = (16 + kStages - 1) / kStages * kStages;

  static constexpr int kRowBoxes = kRowBlocks / kClusterSize;        // of a thread block
  static constexpr int kColumnBoxes = 2 * kMultipliers / kRowBoxes;  // of the tile
  static constexpr int kStageBoxes = (kResident ? 0 : kRowBoxes) + kColumnBoxes;
  // Row block r has r + 1 boxes. The row blocks of a thread block form pairs of kRowBlocks + 1
  // boxes.
  static constexpr int kResidentBoxes = kResident ? kRowBoxes / 2 * (kRowBlocks + 1) : 0;

  // Layout of shared memory, in boxes: the resident W; the stages, each with row boxes before
  // column boxes; the output boxes.
  static constexpr int kFirstStage = kResidentBoxes;
  static constexpr int kFirstColumn = kFirstStage + (kResident ? 0 : kRowBoxes);
  static constexpr int kFirstOutput = kFirstStage + kStages * kStageBoxes;
  static constexpr int kBoxes = kFirstOutput + kOutputBoxes;
};

template <typename Shape>
struct ProductBarriers {
  Ring<Shape::kStages, Shape::kShared, Shape::kFullBarriers> ring;
  // the residual has landed in the output box, or in both boxes of the last stage
  uint64_t residual[kMultipliers];
  // the shared output box is free for the first or the third multiplier
  uint64_t turn[2];
  uint64_t weight_full[Shape::kRowBlocks];  // resident: W's boxes of a step have landed
  uint64_t weight_empty;                    // resident: all products with this head's W have ended

  __device__ __forceinline__ void init() {
    ring.init(Shape::kResident ? 1 : 2);
    for (int multiplier = 0; multiplier < kMultipliers; ++multiplier)
      barrier_init(&residual[multiplier], 1);
    for (int which = 0; which < 2; ++which) barrier_init(&turn[which], 1);
    for (int step = 0; step < Shape::kRowBlocks; ++step) barrier_init(&weight_full[step], 1);
    barrier_init(&weight_empty, kMultipliers * kWarpgroup / 32);
    barrier_init_fence();
  }
};

// A thread's position in the ring of stages, and in that of their full barriers.
template <typename Shape>
struct StagePosition : RingPosition<Shape::kStages> {
  RingPosition<Shape::kFullBarriers> full = {};

  template <typename... Stages>  // none: one
  __device__ __forceinline__ void advance(Stages... stages) {
    RingPosition<Shape::kStages>::advance(stages...);
    full.advance(stages...);
  }
};

// The tiles of this cluster: for (Tiles tiles(...); tiles.valid(); tiles.next()).
//
// While there are column tiles enough for all clusters, each cluster takes one, row tile by row
// tile, the longest first: what it reads of x or dy stays in the L2 cache. The column tiles that
// are left, and one for each cluster besides, are numbered row tile by row tile, the longest first,
// and dealt out in rounds, every second one backwards. All clusters then have about the same work.
struct Tiles {
  const ProductArguments& arguments;
  int round = 0;
  int row_tile, column;  // the column tile is counted through all heads

  __device__ __forceinline__ explicit Tiles(const ProductArguments& arguments)
      : arguments(arguments) {
    locate();
  }
  __device__ __forceinline__ bool valid() const { return row_tile >= 0; }
  __device__ __forceinline__ void next() {
    ++round;
    locate();
  }
  // With one row tile: whether the next tile is of another head.
  __device__ __forceinline__ bool head_changes() const {
    Tiles following = *this;
    following.next();
    return following.valid() && following.column / arguments.columns != column / arguments.columns;
  }

 private:
  __device__ __forceinline__ void locate() {
    const int cluster = blockIdx.x / kClusterSize, clusters = gridDim.x / kClusterSize;
    const int rows = arguments.row_tiles, columns = arguments.columns * arguments.heads;
    const int turns = rows > 1 ? max(columns / clusters - 1, 0) : 0;
    if (round < turns * rows) {
      row_tile = rows - 1 - round % rows;
      column = round / rows * clusters + cluster;
      return;
    }
    const int left = columns - turns * clusters, dealt = round - turns * rows;
    const int number = dealt * clusters + (dealt % 2 == 0 ? cluster : clusters - 1 - cluster);
    row_tile = rows - 1 - number / left;  // negative beyond the last tile
    column = turns * clusters + number % left;
  }
};

// The row block with number `box` in a thread block: 0, 3, 4, 7 in the first, 1, 2, 5, 6 in the
// second.
__device__ __forceinline__ int row_block_of(int box, int rank) {
  return box / 2 * 4 + (box % 2 == 0 ? rank : 3 - rank);
}

// The index of the first resident box of row block number `box`: after the boxes of the row blocks
// before it.
__device__ __forceinline__ int resident_box(int box, int rank) {
  int place = 0;
  for (int before = 0; before < box; ++before) place += row_block_of(before, rank) + 1;
  return place;
}

template <typename Shape>
struct Tile {
  int blocks;       // of all tokens
  int reach;        // blocks before its own that a row block needs
  int head, chunk;  // first of its chunks
  int first_block;  // number of its first row block
  int row_blocks;   // row blocks that hold tokens: the last tile may have fewer

  __device__ __forceinline__ Tile(const ProductArguments& arguments, const Tiles& tiles) {
    const int column = tiles.column;
    blocks = (arguments.tokens + kBox - 1) / kBox;
    reach = Shape::kResident ? blocks : arguments.reach;  // a resident W is never so large
    head = column / arguments.columns;
    chunk = column % arguments.columns * Shape::kColumnBoxes;
    first_block = tiles.row_tile * arguments.height;
    row_blocks = min(arguments.height, blocks - first_block);
  }
  // The steps [begin, end) of a thread block: all steps of the tile, or, if it works alone, up to
  // its own last one.
  __device__ __forceinline__ int begin() const { return begin_of(0); }
  __device__ __forceinline__ int end(int rank) const {
    return Shape::kShared ? first_block + row_blocks : own_end(rank);
  }
  __device__ __forceinline__ int own_end(int rank) const {
    int most = 0;
#pragma unroll
    for (int box = 0; box < Shape::kRowBoxes; ++box)
      most = max(most, end_of(row_block_of(box, rank)));
    return most;
  }
  // The steps of a row block of this tile: from where its window begins up to the diagonal.
  __device__ __forceinline__ int begin_of(int row_block) const {
    return max(0, first_block + row_block - reach);
  }
  __device__ __forceinline__ int end_of(int row_block) const {
    return row_block < row_blocks ? first_block + row_block + 1 : 0;
  }
  __device__ __forceinline__ bool reads(int row_block, int step) const {
    return step >= begin_of(row_block) && step < end_of(row_block);
  }
  // Number of row blocks that multiply at a step: of the tile, and of a thread block.
  __device__ __forceinline__ int readers(int step) const {
    const int first = max(0, step - first_block);
    return min(row_blocks, step - first_block + reach + 1) - first;
  }
  __device__ __forceinline__ int own_readers(int step, int rank) const {
    int boxes = 0;
#pragma unroll
    for (int box = 0; box < Shape::kRowBoxes; ++box) boxes += reads(row_block_of(box, rank), step);
    return boxes;
  }
  // First token of a block.
  __device__ __forceinline__ int token(int block) const {
    return (Shape::kTransposed ? blocks - 1 - block : block) * kBox;
  }
};

// The coordinates of a chunk. Chunks beyond the last sample lie outside the tensor: TMA reads zeros
// there and writes nothing.
struct Chunk {
  int sample, channel;
  Chunk() = default;
  __device__ __forceinline__ Chunk(int chunk, int chunks)
      : sample(chunk / chunks), channel(chunk % chunks * kBox) {}
};

// ----------------------------------------------------------------------------------------- loaders

// One thread that does little but wait and issue loads, because all other warps wait for it.
template <typename Shape>
struct Loader {
  const ProductArguments& arguments;
  char* shared;
  ProductBarriers<Shape>& barriers;
  int rank;
  StagePosition<Shape> at = {};

  __device__ __forceinline__ void wait_for_stage() {
    barrier_wait(&barriers.ring.empty[at.slot], at.parity ^ 1);
  }
  __device__ __forceinline__ uint64_t* full() { return &barriers.ring.full[at.full.slot]; }
  __device__ __forceinline__ char* box(int index) const { return shared + index * kBoxBytes; }
  // Loads the columns of x or dy.
  __device__ __forceinline__ void run_columns() {
    for (Tiles tiles(arguments); tiles.valid(); tiles.next()) {
      const Tile<Shape> tile(arguments, tiles);
      Chunk chunks[Shape::kColumnBoxes];
#pragma unroll
      for (int box = 0; box < Shape::kColumnBoxes; ++box)
        chunks[box] = Chunk(tile.chunk + box, arguments.chunks);
#pragma unroll 1
      for (int step = tile.begin(); step < tile.end(rank); ++step, at.advance()) {
        const int own_readers = tile.own_readers(step, rank);
        wait_for_stage();
        if (Shape::kShared) {
          load_shared_columns(tile, chunks, step, tile.readers(step), own_readers);
          release_idle(tile.row_blocks - tile.readers(step));
          if (!Shape::kResident) barriers.ring.loaded(at.slot);
        } else {
          load_own_columns(tile, chunks, step);
          release_idle(tile.own_readers(0, rank) - own_readers);
        }
      }
    }
  }

  using Chunks = Chunk[Shape::kColumnBoxes];

  __device__ __forceinline__ char* column_box(int index) const {
    return box(Shape::kFirstColumn + at.slot * Shape::kStageBoxes + index);
  }

  __device__ __forceinline__ void load_own_columns(const Tile<Shape>& tile, const Chunks& chunks,
                                                   int step) {
    barrier_arrive_expect(full(), Shape::kColumnBoxes * kBoxBytes);
#pragma unroll
    for (int box = 0; box < Shape::kColumnBoxes; ++box) {
      load_box<false>(column_box(box), &arguments.input, full(), chunks[box].channel, tile.head,
               tile.token(step), chunks[box].sample);
    }
  }

  // A thread block without readers gets nothing. Its loader waits in their place: to
  // compute-sanitizer a phase for which no thread waits is an error.
  __device__ __forceinline__ void load_shared_columns(const Tile<Shape>& tile, const Chunks& chunks,
                                                      int step, int readers, int own_readers) {
    if (own_readers == readers) return load_own_columns(tile, chunks, step);
    barrier_arrive_expect(full(), own_readers > 0 ? Shape::kColumnBoxes * kBoxBytes : 0);
    if (own_readers == 0) return barrier_wait(full(), at.full.parity);
#pragma unroll
    for (int pair = 0; pair < Shape::kColumnBoxes; pair += kClusterSize) {
      const Chunk &first = chunks[pair], &second = chunks[pair + 1];
      load_box<true>(column_box(pair + rank), &arguments.input, full(),
                       rank == 0 ? first.channel : second.channel, tile.head, tile.token(step),
                       rank == 0 ? first.sample : second.sample);
    }
  }

  // Multipliers that have passed their diagonal do not read this stage. The loader releases it for
  // them.
  __device__ __forceinline__ void release_idle(int row_blocks) {
    constexpr int kWarpsOfRowBlock =
        kClusterSize * kMultipliers / Shape::kRowBlocks * kWarpgroup / 32;
    if (row_blocks > 0)
      barrier_arrive(&barriers.ring.empty[at.slot], row_blocks * kWarpsOfRowBlock);
  }

  // Loads the row boxes of W for a step; `place(box)` is where they go.
  template <typename Place>
  __device__ __forceinline__ void load_rows(const Tile<Shape>& tile, int step, uint64_t* barrier,
                                            Place place) {
    barrier_arrive_expect(barrier, tile.own_readers(step, rank) * kBoxBytes);
    const int depth = tile.token(step), lag_zero = arguments.lag_zero;
#pragma unroll
    for (int box = 0; box < Shape::kRowBoxes; ++box) {
      const int row_block = row_block_of(box, rank);
      if (!tile.reads(row_block, step)) continue;
      const int result = tile.token(tile.first_block + row_block);
      const int row = Shape::kTransposed ? depth : result;
      const int column = Shape::kTransposed ? result : depth;
      load_weight(place(box), &arguments.weight, barrier,
                  lag_zero > 0 ? lag_zero + column - row : column, lag_zero > 0 ? 0 : row,
                  tile.head);
    }
  }

  // Loads W stage by stage.
  __device__ __forceinline__ void run_rows() {
    for (Tiles tiles(arguments); tiles.valid(); tiles.next()) {
      const Tile<Shape> tile(arguments, tiles);
#pragma unroll 1
      for (int step = tile.begin(); step < tile.end(rank); ++step, at.advance()) {
        wait_for_stage();
        load_rows(tile, step, full(), [&](int row_box) {
          return box(Shape::kFirstStage + at.slot * Shape::kStageBoxes + row_box);
        });
        barriers.ring.loaded(at.slot);
      }
    }
  }

  // Loads W once per head.
  __device__ __forceinline__ void run_resident_rows() {
    bool new_head = true;
    uint32_t parity = 1;
    for (Tiles tiles(arguments); tiles.valid(); tiles.next()) {
      if (new_head) {
        const Tile<Shape> tile(arguments, tiles);
        barrier_wait(&barriers.weight_empty, parity);
        parity ^= 1;
        // step 0 also signals a new head
        for (int step = 0; step < max(1, tile.own_end(rank)); ++step) {
          load_rows(tile, step, &barriers.weight_full[step],
                    [&](int row_box) { return box(resident_box(row_box, rank) + step); });
        }
      }
      new_head = tiles.head_changes();
    }
  }
};

// ------------------------------------------------------------------------------------- multipliers

__device__ __forceinline__ uint32_t pack_pair(__nv_bfloat16, float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(__half, float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ float2 unpack_pair(__nv_bfloat16, uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
__device__ __forceinline__ float2 unpack_pair(__half, uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The bias of this thread's two rows in a row block: lane / 4 of its warp's 16 rows, and 8 below.
struct BiasPair {
  float upper = 0.0f, lower = 0.0f;

  __device__ __forceinline__ void load(const ProductArguments& arguments, int head, int first_row) {
    if (arguments.bias == nullptr) return;
    const int row = first_row + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const int64_t index = static_cast<int64_t>(head) * arguments.context + row;
    if (row < arguments.tokens) upper = load_float(arguments.bias, arguments.bias_dtype, index);
    if (row + 8 < arguments.tokens)
      lower = load_float(arguments.bias, arguments.bias_dtype, index + 8);
  }
};

// Writes a box (64 x 64): 32 sums of this thread (8 groups of 8 columns) + bias + the residual,
// which is already in the box. `place`: address of the box + fragment_offset().
template <typename Shape>
__device__ __forceinline__ void write_box(uint32_t place, const float* sum, const BiasPair& bias) {
  using Element = typename Shape::Element;
#pragma unroll
  for (int group = 0; group < 4; ++group) {  // 16 columns
    uint32_t value[4] = {};
    if (Shape::kWithResidual) load_fragments(place ^ group * 32, value);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // upper left, lower left, upper right, lower right
      const float add = part % 2 == 0 ? bias.upper : bias.lower;
      const float2 other =
          Shape::kWithResidual ? unpack_pair(Element(), value[part]) : make_float2(0.0f, 0.0f);
      const float* pair = sum + group * 8 + part * 2;
      value[part] = pack_pair(Element(), pair[0] + add + other.x, pair[1] + add + other.y);
    }
    store_fragments(place ^ group * 32, value);
  }
}

// One warpgroup: computes one row block by 128 of the tile's columns.
template <typename Shape>
struct Multiplier {
  using Element = typename Shape::Element;

  const ProductArguments& arguments;
  ProductBarriers<Shape>& barriers;
  int index;
  int rank;
  int row_block;    // in the tile
  int first_box;    // first of its two column boxes
  bool in_place;    // its result is stored from its last stage
  bool is_first;    // first thread of the warpgroup: issues all TMA operations
  uint32_t left;    // operand: its row block of W, in stage 0 or, if resident, at step 0
  uint32_t right;   // operand: its columns in stage 0
  char* box;        // output box; if in_place, its first column box in stage 0
  StagePosition<Shape> at = {};
  uint32_t weight_parity = 0, residual_parity = 0, turn_parity;

  __device__ __forceinline__ Multiplier(const ProductArguments& arguments, char* shared,
                                        ProductBarriers<Shape>& barriers, int index)
      : arguments(arguments),
        barriers(barriers),
        index(index),
        rank(cluster_rank()),
        is_first(threadIdx.x % kWarpgroup == 0) {
    const int row_box = index % Shape::kRowBoxes;
    row_block = row_block_of(row_box, rank);
    first_box = index / Shape::kRowBoxes * 2;
    in_place = row_box == Shape::kRowBoxes - 1;
    turn_parity = index == 0;
    const uint32_t base = shared_address(shared);
    left = operand(base +
                   (Shape::kResident ? resident_box(row_box, rank) : Shape::kFirstStage + row_box) *
                       kBoxBytes);
    right = operand(base + (Shape::kFirstColumn + first_box) * kBoxBytes);
    const int output = Shape::kTakesTurns ? index % 2 : index - index / Shape::kRowBoxes;
    box = shared +
          (in_place ? Shape::kFirstColumn + first_box : Shape::kFirstOutput + output) * kBoxBytes;
  }
  __device__ __forceinline__ bool takes_turns() const {
    return Shape::kTakesTurns && index % 2 == 0;
  }

  // Multiplies the steps of its row block, then moves on to the next tile's first stage. It waits
  // for each product so that the stage is released at once; the other multipliers keep the tensor cores busy
  // meanwhile. Returns the slot of the last stage that was multiplied. A multiplier that writes in
  // place has not released that stage.
  __device__ __forceinline__ int run(float (&sum)[64], const Tile<Shape>& tile) {
    const int begin = tile.begin_of(row_block), end = tile.end_of(row_block);
    int slot = 0;
    at.advance(begin - tile.begin());  // stages that only others multiply, as those after `end`
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      if (Shape::kResident) barrier_wait(&barriers.weight_full[step], weight_parity);
      barrier_wait(&barriers.ring.full[at.full.slot], at.full.parity);
      const uint32_t stage = at.slot * (Shape::kStageBoxes * kBoxBytes / 16);
      const uint32_t row_box = Shape::kResident ? step * (kBoxBytes / 16) : stage;
      wgmma_fence();
      multiply_slices<Element, Shape::kTransposed, true, kBox / 16>(sum, left + row_box,
                                                                    right + stage, step > begin);
      wgmma_commit();
      wgmma_wait<0>();
      slot = at.slot;
      if (!in_place || step + 1 < end) barriers.ring.release(slot);
      at.advance();
    }
    at.advance(tile.end(rank) - end);
    pin(sum);
    return slot;
  }

  // Skips all stages of a tile in which this row block is beyond the last token. It must wait for W
  // although it reads none: otherwise it could get two heads ahead and release a W that others
  // still read. Only __syncwarp reconverges the lanes of a warp here.
  __device__ __forceinline__ void pass(int steps) {
    if (Shape::kResident) barrier_wait(&barriers.weight_full[0], weight_parity);
    __syncwarp();
#pragma unroll 1
    for (int stage = 0; stage < steps; ++stage) {
      barrier_wait(&barriers.ring.full[at.full.slot], at.full.parity);
      __syncwarp();
      barriers.ring.release(at.slot);
      at.advance();
    }
    if (takes_turns() && is_first) {
      wait_for_turn();
      end_turn();
    }
  }

  __device__ __forceinline__ void wait_for_turn() {
    barrier_wait(&barriers.turn[index / 2], turn_parity);
    turn_parity ^= 1;
  }
  __device__ __forceinline__ void end_turn() { barrier_arrive(&barriers.turn[1 - index / 2]); }

  __device__ __forceinline__ void load_residual(const Tile<Shape>& tile, int column_box,
                                                char* place) const {
    const Chunk chunk(tile.chunk + first_box + column_box, arguments.chunks);
    load_box<false>(place, &arguments.residual, &barriers.residual[index], chunk.channel, tile.head,
             tile.token(tile.first_block + row_block), chunk.sample);
  }
  __device__ __forceinline__ void wait_for_residual() {
    barrier_wait(&barriers.residual[index], residual_parity);
    residual_parity ^= 1;
  }

  __device__ __forceinline__ void store(const Tile<Shape>& tile, int column_box,
                                        const char* place) const {
    const Chunk chunk(tile.chunk + first_box + column_box, arguments.chunks);
    store_box(&arguments.output, place, chunk.channel, tile.head,
              tile.token(tile.first_block + row_block), chunk.sample);
  }

  // Stores the result through the stage in `slot`. Nobody else reads that stage, and it is released
  // once the store has read it.
  __device__ __forceinline__ void write_in_place(const Tile<Shape>& tile, const float (&sum)[64],
                                                 const BiasPair& bias, int slot) {
    char* boxes = box + slot * Shape::kStageBoxes * kBoxBytes;
    warpgroup_sync(index);  // the products of all four warps have read the stage
    if (Shape::kWithResidual) {
      if (is_first) {
        barrier_arrive_expect(&barriers.residual[index], 2 * kBoxBytes);
        for (int column_box = 0; column_box < 2; ++column_box)
          load_residual(tile, column_box, boxes + column_box * kBoxBytes);
      }
      wait_for_residual();
    }
#pragma unroll
    for (int column_box = 0; column_box < 2; ++column_box) {
      write_box<Shape>(shared_address(boxes + column_box * kBoxBytes) + fragment_offset(),
                       sum + column_box * 32, bias);
    }
    fence_async_proxy();
    warpgroup_sync(index);
    if (is_first) {
      for (int column_box = 0; column_box < 2; ++column_box)
        store(tile, column_box, boxes + column_box * kBoxBytes);
      commit_stores();
      wait_stores_read<0>();
      barriers.ring.release_for_warpgroup(slot);
    }
  }

  // Stores the result through the output box, one column box after the other.
  __device__ __forceinline__ void write(const Tile<Shape>& tile, const float (&sum)[64],
                                        const BiasPair& bias) {
#pragma unroll
    for (int column_box = 0; column_box < 2; ++column_box) {
      if (Shape::kWithResidual) {
        wait_for_residual();
      } else {
        if (is_first && takes_turns() && column_box == 0) {
          wait_for_turn();
        } else if (is_first) {
          wait_stores_read<0>();
        }
        warpgroup_sync(index);
      }
      write_box<Shape>(shared_address(box) + fragment_offset(), sum + column_box * 32, bias);
      fence_async_proxy();
      warpgroup_sync(index);
      if (is_first) {
        store(tile, column_box, box);
        commit_stores();
        if (Shape::kWithResidual && column_box == 0) fetch_residual(tile, 1);
      }
    }
    if (is_first && takes_turns()) {
      wait_stores_read<0>();
      end_turn();
    }
  }

  // Called by the first thread as soon as its output box is free.
  __device__ __forceinline__ void fetch_residual(const Tile<Shape>& tile, int column_box) const {
    wait_stores_read<0>();
    barrier_arrive_expect(&barriers.residual[index], kBoxBytes);
    load_residual(tile, column_box, box);
  }

  __device__ __forceinline__ void run_all() {
    for (Tiles tiles(arguments); tiles.valid(); tiles.next()) {
      const Tile<Shape> tile(arguments, tiles);
      if (row_block < tile.row_blocks) {
        BiasPair bias;
        bias.load(arguments, tile.head, tile.token(tile.first_block + row_block));
        if (Shape::kWithResidual && is_first && !in_place) fetch_residual(tile, 0);
        float sum[64];
        const int slot = run(sum, tile);
        if (in_place) {
          write_in_place(tile, sum, bias, slot);
        } else {
          write(tile, sum, bias);
        }
      } else {
        pass(tile.end(rank) - tile.begin());
      }
      if (Shape::kResident && tiles.head_changes()) {
        weight_parity ^= 1;
        if (threadIdx.x % 32 == 0) barrier_arrive(&barriers.weight_empty);
      }
    }
    if (is_first) wait_stores_read<0>();
  }
};

constexpr int kAlignment = 1024;  // alignment of a swizzled box

template <typename Shape>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ ProductArguments arguments) {
  extern __shared__ char unaligned[];
  char* shared = unaligned + (kAlignment - shared_address(unaligned) % kAlignment) % kAlignment;
  auto& barriers = *reinterpret_cast<ProductBarriers<Shape>*>(shared + Shape::kBoxes * kBoxBytes);
  if (threadIdx.x == 0) {
    prefetch_map(&arguments.weight);
    prefetch_map(&arguments.input);
    prefetch_map(&arguments.output);
    barriers.init();
  }
  cluster_sync();

  const int warpgroup = threadIdx.x / kWarpgroup;
  if (warpgroup == kMultipliers) {
    give_registers<kLoaderRegisters>();
    if (threadIdx.x % 32 == 0) {
      const int warp = threadIdx.x % kWarpgroup / 32;
      Loader<Shape> loader{arguments, shared, barriers, static_cast<int>(cluster_rank())};
      if (warp == 0) {
        loader.run_columns();
      } else if (warp == 1 && Shape::kResident) {
        loader.run_resident_rows();
      } else if (warp == 1) {
        loader.run_rows();
      }
    }
    __syncwarp();
  } else {
    take_registers<kMultiplierRegisters>();
    Multiplier<Shape>(arguments, shared, barriers, warpgroup).run_all();
  }
  cluster_sync();  // the other block may still write into our shared memory
}

// The shape of the tiles. A height is even because two thread blocks share a tile; all row tiles
// but the last have the same, in the smallest number of tiles.
template <typename Shape>
void set_tiles(const TriangularConvParams& params, ProductArguments& arguments) {
  const int64_t blocks = ceil_div(params.tokens, kBox);
  const int64_t least_tiles = ceil_div(blocks, Shape::kRowBlocks);
  arguments.height = static_cast<int32_t>(2 * ceil_div(blocks, 2 * least_tiles));
  arguments.row_tiles = static_cast<int32_t>(ceil_div(blocks, arguments.height));
  arguments.columns = static_cast<int32_t>(
      ceil_div(int64_t(params.batch) * arguments.chunks, Shape::kColumnBoxes));
}

template <typename Shape>
cudaError_t launch_instance(const TriangularConvParams& params, ProductArguments& arguments) {
  set_tiles<Shape>(params, arguments);
  constexpr int kBytes =
      kAlignment + Shape::kBoxes * kBoxBytes + static_cast<int>(sizeof(ProductBarriers<Shape>));
  const int blocks = params.processors / kClusterSize * kClusterSize;
  return launch_large(params, product_kernel<Shape>, blocks, kBytes, arguments);
}

template <typename Element, bool kTransposed, bool kWithResidual>
cudaError_t launch_shape(const TriangularConvParams& params, ProductArguments& arguments) {
  if (params.tokens <= 4 * kBox) {
    using Shape = ProductShape<Element, 4, 5, Plan::kResident, kTransposed, kWithResidual>;
    return launch_instance<Shape>(params, arguments);
  }
  if (params.tokens <= 8 * kBox) {
    // the residual waits in the output boxes, so they cannot be shared
    constexpr int kStages = kWithResidual ? 3 : 4;
    using Shape =
        ProductShape<Element, 8, kStages, Plan::kResidentAlone, kTransposed, kWithResidual>;
    return launch_instance<Shape>(params, arguments);
  }
  using Shape = ProductShape<Element, 8, 4, Plan::kStreamed, kTransposed, kWithResidual>;
  return launch_instance<Shape>(params, arguments);
}

template <bool kTransposed, bool kWithResidual>
cudaError_t launch_product(const TriangularConvParams& params) {
  cudaError_t status = cudaSuccess;
  ProductArguments arguments = {};
  arguments.weight = encode_weight(params, status);
  arguments.input = kTransposed ? encode_dy(params, status) : encode_x(params, status);
  if (kWithResidual) {
    arguments.residual =
        encode_activations(params, params.residual, params.residual_batch_stride,
                           params.residual_token_stride, status);
  }
  arguments.output = encode_activations(params, kTransposed ? params.dx : params.y,
                                        int64_t(params.tokens) * params.channels, params.channels,
                                        status);
  arguments.bias = kTransposed ? nullptr : params.bias;
  arguments.bias_dtype = params.weight_dtype;
  arguments.tokens = params.tokens;
  arguments.context = params.context;
  arguments.lag_zero = params.lag_zero;
  arguments.reach = static_cast<int32_t>(ceil_div(band(params) - 1, kBox));
  arguments.heads = params.heads;
  arguments.chunks = static_cast<int32_t>(ceil_div(params.channels / params.heads, kBox));
  if (status != cudaSuccess) return status;
  return params.dtype == MIXER_FLOAT16
             ? launch_shape<__half, kTransposed, kWithResidual>(params, arguments)
             : launch_shape<__nv_bfloat16, kTransposed, kWithResidual>(params, arguments);
}

cudaError_t forward(const TriangularConvParams& params) {
  return params.residual ? launch_product<false, true>(params)
                         : launch_product<false, false>(params);
}

cudaError_t grad_input(const TriangularConvParams& params) {
  return launch_product<true, false>(params);
}

}  // namespace hopper
