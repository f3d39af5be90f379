// Versions 1 to 6 of the two products with W, lower triangular, in both directions:
//
//   forward      y[b, i, c]  = sum over j <= i of W[i, j] x[b, j, c]  + bias[i] + residual[b, i, c]
//   grad_input   dx[b, i, c] = sum over j >= i of W[j, i] dy[b, j, c]
//
// Activations are (batch, tokens, channels), W (tokens, columns), bf16; sums in fp32. The versions
// call the output's token `row`, and the token that the sum runs over `k`. Where the directions
// differ, a version says so by kOperation: the gradient's walk starts at the diagonal and runs to
// the last token, so the first row tile is the heaviest, and it reads W along its columns. No
// transposed copy of W is made.
#pragma once

#include "common.cuh"
#include "hopper.cuh"
#include "library.cuh"

template <Operation kOperation>
struct Product {
  static constexpr bool kIsForward = kOperation == kForward;
  const Arguments& a;

  __device__ Matrix weight() const { return {a.weight, a.tokens, a.columns}; }
  // One sample of x, or of dy.
  __device__ Matrix input(int sample) const {
    return {(kIsForward ? a.x : a.dy) + static_cast<size_t>(sample) * a.tokens * a.channels,
            a.tokens, a.channels};
  }
  // The walk of a tile whose rows are [row, row + rows): k in [first, last).
  __device__ int first(int row) const { return kIsForward ? 0 : row; }
  __device__ int last(int row, int rows) const {
    return kIsForward ? min(row + rows, a.tokens) : a.tokens;
  }
  // The first row of a tile by its rank, the heaviest first.
  __device__ int row_of(const Tile& tile, const TileOrder& order, int rows) const {
    return (kIsForward ? order.row_tiles - 1 - tile.weight_rank : tile.weight_rank) * rows;
  }

  __device__ size_t index(int sample, int row, int channel) const {
    return (static_cast<size_t>(sample) * a.tokens + row) * a.channels + channel;
  }
  __device__ void store(int sample, int row, int channel, float sum) const {
    if (row >= a.tokens || channel >= a.channels) return;
    const size_t i = index(sample, row, channel);
    if (kIsForward && a.bias != nullptr) sum += a.bias[row];
    if (kIsForward && a.residual != nullptr) sum += __bfloat162float(a.residual[i]);
    (kIsForward ? a.y : a.dx)[i] = __float2bfloat16_rn(sum);
  }
  // Two neighbouring channels with bias and residual, rounded once to bf16. (Channels are even:
  // both are inside or neither.)
  __device__ uint32_t finished(int sample, int row, int channel, float first, float second) const {
    if (kIsForward && row < a.tokens && channel < a.channels) {
      if (a.bias != nullptr) {
        first += a.bias[row];
        second += a.bias[row];
      }
      if (a.residual != nullptr) {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(&a.residual[index(sample, row, channel)]);
        first += low_half(pair);
        second += high_half(pair);
      }
    }
    return pack_pair(first, second);
  }
  __device__ void store_pair(int sample, int row, int channel, float first, float second) const {
    if (row >= a.tokens || channel >= a.channels) return;
    bf16* output = (kIsForward ? a.y : a.dx) + index(sample, row, channel);
    *reinterpret_cast<uint32_t*>(output) = finished(sample, row, channel, first, second);
  }
  // A warp's tile of mma results.
  template <int kRowBlocks, int kColumnBlocks>
  __device__ void store_warp(const float (&sum)[kRowBlocks][kColumnBlocks][4], int sample, int row0,
                             int channel0) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c) {
        const int row = row0 + 16 * r + lane / 4, channel = channel0 + 8 * c + lane % 4 * 2;
        store_pair(sample, row, channel, sum[r][c][0], sum[r][c][1]);
        store_pair(sample, row + 8, channel, sum[r][c][2], sum[r][c][3]);
      }
    }
  }
};

// ======================================================================================= version 1
// One thread for each output element. Neighbouring threads take neighbouring channels, so their
// loads of x are next to each other in memory and W's element is one word for the whole warp. Half
// the work of the dense product is skipped from the start; what is slow is that every product
// fetches both of its factors.

template <Operation kOperation>
__global__ void naive_kernel(const Arguments a) {
  const Product<kOperation> product{a};
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int sample = blockIdx.z;
  if (channel >= a.channels || row >= a.tokens) return;
  const Matrix weight = product.weight(), input = product.input(sample);
  float sum = 0.0f;
#pragma unroll 8
  for (int k = product.first(row); k < product.last(row, 1); ++k) {
    sum += __bfloat162float(kOperation == kForward ? *weight.at(row, k) : *weight.at(k, row)) *
           __bfloat162float(*input.at(k, channel));
  }
  product.store(sample, row, channel, sum);
}

template <Operation kOperation>
Configuration naive(int across, int down) {
  return {text(across, " channels x ", down, " tokens a block"), [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, across), ceil_div(a.tokens, down), a.batch);
            return launch(naive_kernel<kOperation>, blocks, dim3(across, down), 0, a);
          }};
}

// ======================================================================================= version 2
// A block computes a square tile of the output and walks along k in steps of the tile's width. In
// each step it brings one tile of W and one of x into shared memory, as fp32, and every value
// brought in is used kTile times. Tiles above the diagonal are neither loaded nor multiplied.
// Memory traffic falls by kTile; now shared memory is the limit, since each multiply-add still
// reads two values from it.

template <Operation kOperation, int kTile>
__global__ void __launch_bounds__(kTile* kTile) shared_kernel(const Arguments a) {
  __shared__ float weights[kTile][kTile];  // as W lies: [row][k], or [k][row]
  __shared__ float inputs[kTile][kTile];   // [k][channel]
  const Product<kOperation> product{a};
  const int channel = blockIdx.x * kTile + threadIdx.x;
  const int row0 = blockIdx.y * kTile;
  const int sample = blockIdx.z;
  const Matrix weight = product.weight(), input = product.input(sample);
  float sum = 0.0f;
  for (int k0 = product.first(row0); k0 < product.last(row0, kTile); k0 += kTile) {
    const int down = (kOperation == kForward ? row0 : k0) + threadIdx.y;
    const int across = (kOperation == kForward ? k0 : row0) + threadIdx.x;
    const float w = weight.element(down, across);
    const float x = input.element(k0 + threadIdx.y, channel);
    __syncthreads();  // all threads have read the previous step's tiles
    weights[threadIdx.y][threadIdx.x] = w;
    inputs[threadIdx.y][threadIdx.x] = x;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      sum += (kOperation == kForward ? weights[threadIdx.y][k] : weights[k][threadIdx.y]) *
             inputs[k][threadIdx.x];
    }
  }
  product.store(sample, row0 + threadIdx.y, channel, sum);
}

template <Operation kOperation, int kTile>
Configuration shared_tiles() {
  return {text("tile ", kTile, "x", kTile, ", a thread an element"), [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kTile), ceil_div(a.tokens, kTile), a.batch);
            return launch(shared_kernel<kOperation, kTile>, blocks, dim3(kTile, kTile), 0, a);
          }};
}

// ======================================================================================= version 3
// Each thread computes 8 x 8 elements and keeps them in registers: 16 values from shared memory now
// feed 64 multiply-adds instead of 2 feeding 1. Loads from global memory bring 8 bf16 (16 bytes) an
// instruction. The tile of W is stored with k as its row, so that a thread's 8 rows are two 16-byte
// reads; for the gradient W lies just right, forward transposes it. The limit is now the fp32
// units.

template <Operation kOperation, int kRows, int kChannels>
__global__ void __launch_bounds__(kRows* kChannels / 64) register_kernel(const Arguments a) {
  constexpr int kDepth = 16;
  constexpr int kThreads = kRows * kChannels / 64;
  __shared__ __align__(16) float weights[kDepth][kRows + 4];     // [k][row]
  __shared__ __align__(16) float inputs[kDepth][kChannels + 4];  // [k][channel]
  const Product<kOperation> product{a};
  const int channel0 = blockIdx.x * kChannels;
  const int row0 = blockIdx.y * kRows;
  const int sample = blockIdx.z;
  float sum[8][8] = {};
  for (int k0 = product.first(row0); k0 < product.last(row0, kRows); k0 += kDepth) {
    __syncthreads();
    if (kOperation == kForward)
      load_transposed<kRows, kThreads>(weights, product.weight(), row0, k0);
    else
      load_tile<kRows, kThreads>(weights, product.weight(), k0, row0);
    load_tile<kChannels, kThreads>(inputs, product.input(sample), k0, channel0);
    __syncthreads();
    multiply_registers<kRows, kChannels>(sum, weights, inputs);
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      product.store_pair(sample, row0 + register_row<kRows, kChannels>(r),
                         channel0 + register_column<kChannels>(c), sum[r][c], sum[r][c + 1]);
    }
  }
}

template <Operation kOperation, int kRows, int kChannels>
Configuration register_tiles() {
  constexpr int kThreads = kRows * kChannels / 64;
  return {text("tile ", kRows, "x", kChannels, ", ", kThreads, " threads"), [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kChannels), ceil_div(a.tokens, kRows), a.batch);
            return launch(register_kernel<kOperation, kRows, kChannels>, blocks, dim3(kThreads), 0,
                          a);
          }};
}

// ======================================================================================= version 4
// Tensor cores: one mma instruction of a warp multiplies 16 x 16 by 16 x 8, 2048 multiply-adds,
// from bf16 in registers with sums in fp32. ldmatrix brings its operands from shared memory in the
// layout it wants, transposing those that lie with k as their row. Tiles stay bf16 in shared
// memory, half the bytes of before. Rows are padded by 16 bytes, so that the 8 rows that ldmatrix
// reads at once lie in different banks. Loading and multiplying still take turns.

template <Operation kOperation, int kRows, int kChannels, int kWarpRows, int kWarpChannels>
__global__ void __launch_bounds__(kRows* kChannels / (kWarpRows * kWarpChannels) * 32, 1)
    mma_kernel(const Arguments a) {
  constexpr bool kByK = kOperation != kForward;  // W's tile is [k][row], else [row][k]
  constexpr int kDepth = 32;
  constexpr int kThreads = kRows * kChannels / (kWarpRows * kWarpChannels) * 32;
  __shared__ __align__(16) bf16 weights[kByK ? kDepth : kRows][(kByK ? kRows : kDepth) + 8];
  __shared__ __align__(16) bf16 inputs[kDepth][kChannels + 8];  // [k][channel]
  const Product<kOperation> product{a};
  const int warp_row = threadIdx.x / 32 / (kChannels / kWarpChannels) * kWarpRows;
  const int warp_channel = threadIdx.x / 32 % (kChannels / kWarpChannels) * kWarpChannels;
  const int channel0 = blockIdx.x * kChannels;
  const int row0 = blockIdx.y * kRows;
  const int sample = blockIdx.z;
  float sum[kWarpRows / 16][kWarpChannels / 8][4] = {};
  for (int k0 = product.first(row0); k0 < product.last(row0, kRows); k0 += kDepth) {
    __syncthreads();
    load_tile<kByK ? kRows : kDepth, kThreads>(weights, product.weight(), kByK ? k0 : row0,
                                               kByK ? row0 : k0);
    load_tile<kChannels, kThreads>(inputs, product.input(sample), k0, channel0);
    __syncthreads();
    multiply_warp<kDepth, kByK, true>(
        sum, warp_row, warp_channel, [&](int i, int j) { return &weights[i][j]; },
        [&](int i, int j) { return &inputs[i][j]; });
  }
  product.store_warp(sum, sample, row0 + warp_row, channel0 + warp_channel);
}

template <Operation kOperation, int kRows, int kChannels, int kWarpRows, int kWarpChannels>
Configuration tensor_cores() {
  constexpr int kWarps = kRows * kChannels / (kWarpRows * kWarpChannels);
  return {text("tile ", kRows, "x", kChannels, "x32, ", kWarps, " warps"), [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kChannels), ceil_div(a.tokens, kRows), a.batch);
            return launch(mma_kernel<kOperation, kRows, kChannels, kWarpRows, kWarpChannels>,
                          blocks, dim3(32 * kWarps), 0, a);
          }};
}

// ======================================================================================= version 5
// cp.async copies from global to shared memory in the background. With kStages buffers the copies
// of the next kStages - 1 steps are under way while the tensor cores work on this one, and one
// __syncthreads a step is enough. An XOR swizzle takes the place of the padding. Row tiles with the
// longest walk start first: a light tile that ends late costs little. Warps whose rows lie above
// the diagonal of a step skip it.

template <Operation kOperation, int kRows, int kChannels, int kDepth, int kWarpRows,
          int kWarpChannels, int kStages>
__global__ void __launch_bounds__(kRows* kChannels / (kWarpRows * kWarpChannels) * 32, 1)
    pipelined_kernel(const Arguments a, const TileOrder order) {
  constexpr bool kByK = kOperation != kForward;
  constexpr int kWidth = kByK ? kRows : kDepth;  // of W's tile
  constexpr int kThreads = kRows * kChannels / (kWarpRows * kWarpChannels) * 32;
  bf16* weights = reinterpret_cast<bf16*>(dynamic_shared());  // stages of W's tile, swizzled
  bf16* inputs = weights + kStages * kRows * kDepth;          // (stages, depth, channels), swizzled
  const Product<kOperation> product{a};
  const int warp_row = threadIdx.x / 32 / (kChannels / kWarpChannels) * kWarpRows;
  const int warp_channel = threadIdx.x / 32 % (kChannels / kWarpChannels) * kWarpChannels;
  const Tile tile = tile_of(blockIdx.x, order);
  const int row0 = product.row_of(tile, order, kRows);
  const int across = ceil_div(a.channels, kChannels);
  const int sample = tile.column / across;
  const int channel0 = tile.column % across * kChannels;
  const int first = product.first(row0);
  const int steps = ceil_div(product.last(row0, kRows) - first, kDepth);

  float sum[kWarpRows / 16][kWarpChannels / 8][4] = {};
  run_pipeline<kStages>(
      steps,
      [&](int step) {
        const int k0 = first + step * kDepth;
        copy_tile<kRows * kDepth / kWidth, kWidth, kThreads>(
            weights + step % kStages * (kRows * kDepth), product.weight(), kByK ? k0 : row0,
            kByK ? row0 : k0);
        copy_tile<kDepth, kChannels, kThreads>(inputs + step % kStages * (kDepth * kChannels),
                                               product.input(sample), k0, channel0);
      },
      [&](int step) {
        // above the diagonal for all of this warp's rows
        const int k0 = first + step * kDepth;
        if (kByK ? k0 + kDepth - 1 < row0 + warp_row : k0 > row0 + warp_row + kWarpRows - 1) return;
        const bf16* left = weights + step % kStages * (kRows * kDepth);
        const bf16* right = inputs + step % kStages * (kDepth * kChannels);
        multiply_warp<kDepth, kByK, true>(
            sum, warp_row, warp_channel,
            [&](int i, int j) { return &left[swizzled<kWidth>(i, j)]; },
            [&](int i, int j) { return &right[swizzled<kChannels>(i, j)]; });
      });
  product.store_warp(sum, sample, row0 + warp_row, channel0 + warp_channel);
}

template <Operation kOperation, int kRows, int kChannels, int kDepth, int kWarpRows,
          int kWarpChannels, int kStages>
Configuration pipelined(bool grouped) {
  constexpr int kWarps = kRows * kChannels / (kWarpRows * kWarpChannels);
  constexpr int kBytes = kStages * (kRows + kChannels) * kDepth * static_cast<int>(sizeof(bf16));
  return {text("tile ", kRows, "x", kChannels, "x", kDepth, ", ", kStages, " stages, ", kWarps,
               " warps", grouped ? ", grouped" : ""),
          [grouped](const Arguments& a) {
            const int columns = a.batch * ceil_div(a.channels, kChannels);
            const int group = grouped ? columns_in_cache(a, kChannels) : columns;
            const TileOrder order = {ceil_div(a.tokens, kRows), columns, group};
            return launch(pipelined_kernel<kOperation, kRows, kChannels, kDepth, kWarpRows,
                                           kWarpChannels, kStages>,
                          dim3(order.row_tiles * columns), dim3(32 * kWarps), kBytes, a, order);
          }};
}

// ======================================================================================= version 6
// Hopper. wgmma multiplies 64 x 16 by 16 x 256 for four warps at once and reads both operands from
// shared memory itself, so the operands no longer pass through registers. TMA copies boxes of 64 x
// 64 with one instruction of one thread: address arithmetic, bounds and swizzle are done by
// hardware. So the block divides the labour: one producer warp keeps the stages full, the consumer
// warpgroups (64 rows each) only multiply, and two barriers a stage, full and empty, are all they
// share. Tiles are ordered in groups of columns whose activations stay in L2. The result goes
// through shared memory and TMA again.
//
// Stage: the tile of W as kConsumers boxes, as W lies (64 rows x 64 k, or 64 k x 64 rows), that of
// x as kChannels / 64 boxes (64 k x 64 channels). wgmma transposes what has k as its row.

template <Operation kOperation, int kConsumers, int kChannels, int kStages, int kBlocks>
__global__ void __launch_bounds__(128 * kConsumers + 32, kBlocks)
    hopper_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap input_map,
                  const __grid_constant__ CUtensorMap output_map, const Arguments a,
                  const TileOrder order) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr bool kByK = kOperation != kForward;
  constexpr int kRows = kBox * kConsumers;
  constexpr int kBoxesAcross = kChannels / kBox;
  using Ring = Stages<kConsumers, kBoxesAcross, kStages>;
  static_assert(kConsumers * kBoxesAcross * kBoxBytes <= kStages * Ring::kStageBytes,
                "the output tile takes the stages' place");
  static_assert(kConsumers <= kStages,
                "the steps that a consumer leaves out are in different stages");
  const Product<kOperation> product{a};
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Tile tile = tile_of(blockIdx.x, order);
  const int row0 = product.row_of(tile, order, kRows);
  const int across = ceil_div(a.channels, kChannels);
  const int sample = tile.column / across;
  const int channel0 = tile.column % across * kChannels;
  const int first = product.first(row0);
  const int steps = ceil_div(product.last(row0, kRows) - first, kBox);
  const Ring ring;

  if (warp == 4 * kConsumers) {  // the producer
    if (lane != 0) return;
    ring.produce(steps, [&](int step, unsigned char* memory, Barrier* barrier) {
      const int k0 = first + step * kBox;
      for (int box = 0; box < kConsumers; ++box) {
        const int row = row0 + box * kBox;
        load_box(memory + box * kBoxBytes, &weight_map, barrier, kByK ? row : k0, kByK ? k0 : row,
                 0);
      }
      for (int box = 0; box < kBoxesAcross; ++box) {
        load_box(memory + (kConsumers + box) * kBoxBytes, &input_map, barrier,
                 channel0 + box * kBox, k0, sample);
      }
    });
    return;
  }

  // A consumer. Forward, its 64 rows end at the diagonal: later steps of the tile are zeros for it.
  // In the gradient they begin there, and it gives the stages before that back unread, but waits
  // for them like everyone: copies arrive in any order, and if a later one came first, the wait for
  // this stage's next copy would take the phase before it, still open, for the one it waits for.
  // (Rows beyond the last token have no step of their own; the last step then serves them, with
  // zeros.)
  const int consumer = warp / 4;
  const int skipped = kByK ? min(consumer, steps - 1) : 0;
  const int end = kByK ? steps : min(steps, row0 / kBox + consumer + 1);
  // the first wgmma overwrites it, so it needs no zeros, which would delay the wgmma
  float sum[kChannels / 2];
  for (int step = 0; step < skipped; ++step) ring.skip(step);
  ring.template consume<kByK, true>(sum, consumer, skipped, end);
  // The output tile takes the stages' place. One consumer has waited for every copy; once all are
  // here, all is read. (No stage that a consumer did not give back is filled again: it leaves out
  // fewer steps than there are stages.)
  named_barrier(1, 128 * kConsumers);

  // The tile goes to shared memory as boxes of 64 x 64, swizzled as TMA expects; TMA drops what
  // lies outside.
  unsigned char* boxes = ring.memory + consumer * kBoxesAcross * kBoxBytes;
  const int warp_row = warp % 4 * 16;
#pragma unroll
  for (int pair = 0; pair < kChannels / 16; ++pair) {  // 16 channels
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows +0 and +8 of the first 8 channels, then of the second 8
      values[i] = product.finished(sample, row0 + consumer * kBox + warp_row + lane / 4 + i % 2 * 8,
                                   channel0 + 16 * pair + i / 2 * 8 + lane % 4 * 2,
                                   sum[8 * pair + 2 * i], sum[8 * pair + 2 * i + 1]);
    }
    const int box_row = warp_row + lane % 16;
    const int piece = pair % 4 * 2 + lane / 16;
    store_matrices(boxes + pair / 4 * kBoxBytes + box_row * 128 + (piece ^ box_row % 8) * 16,
                   values);
  }
  publish_to_copy_engine();
  named_barrier(2 + consumer, 128);
  if (threadIdx.x % 128 == 0) {
    for (int box = 0; box < kBoxesAcross; ++box) {
      store_box(&output_map, boxes + box * kBoxBytes, channel0 + box * kBox, row0 + consumer * kBox,
                sample);
    }
    finish_stores();
  }
#else
  __trap();  // not built for sm_90a
#endif
}

template <Operation kOperation, int kConsumers, int kChannels, int kStages, int kBlocks>
Configuration hopper() {
  constexpr int kRows = kBox * kConsumers;
  return {
      text("tile ", kRows, "x", kChannels, "x64, ", kStages, " stages, ", kBlocks, " blocks an SM"),
      [](const Arguments& a) {
        constexpr bool forward = kOperation == kForward;
        const int columns = a.batch * ceil_div(a.channels, kChannels);
        const TileOrder order = {ceil_div(a.tokens, kRows), columns,
                                 columns_in_cache(a, kChannels)};
        return launch(hopper_kernel<kOperation, kConsumers, kChannels, kStages, kBlocks>,
                      dim3(order.row_tiles * columns), dim3(128 * kConsumers + 32),
                      Stages<kConsumers, kChannels / kBox, kStages>::kBytes,
                      tensor_map(a.weight, 1, a.tokens, a.columns),
                      tensor_map(forward ? a.x : a.dy, a.batch, a.tokens, a.channels),
                      tensor_map(forward ? a.y : a.dx, a.batch, a.tokens, a.channels), a, order);
      }};
}

// The ladder of one direction.
template <Operation kOperation>
std::vector<Version> product_ladder(const char* first) {
  return {
      cublas_version(kOperation),
      {1,
       first,
       false,
       {naive<kOperation>(32, 8), naive<kOperation>(64, 4), naive<kOperation>(256, 1)}},
      {2,
       "tiles in shared memory, none above the diagonal",
       false,
       {shared_tiles<kOperation, 16>(), shared_tiles<kOperation, 32>()}},
      {3,
       "8x8 elements a thread in registers, 16-byte loads",
       false,
       {register_tiles<kOperation, 64, 64>(), register_tiles<kOperation, 64, 128>(),
        register_tiles<kOperation, 128, 128>()}},
      {4,
       "tensor cores: mma.sync and ldmatrix",
       false,
       {tensor_cores<kOperation, 64, 64, 32, 32>(), tensor_cores<kOperation, 128, 128, 64, 32>(),
        tensor_cores<kOperation, 128, 128, 64, 64>()}},
      {5,
       "cp.async pipeline, XOR swizzle, heavy tiles first",
       false,
       {pipelined<kOperation, 128, 128, 32, 64, 32, 3>(false),
        pipelined<kOperation, 128, 128, 32, 64, 32, 4>(false),
        pipelined<kOperation, 128, 128, 32, 64, 32, 4>(true),
        pipelined<kOperation, 128, 128, 64, 64, 32, 3>(true),
        pipelined<kOperation, 128, 256, 32, 64, 64, 4>(true)}},
      {6,
       "TMA, mbarriers, wgmma, a producer warp; tiles grouped for L2",
       true,
       {hopper<kOperation, 2, 128, 4, 1>(), hopper<kOperation, 2, 128, 3, 2>(),
        hopper<kOperation, 2, 256, 3, 1>(), hopper<kOperation, 2, 256, 4, 1>(),
        hopper<kOperation, 4, 128, 4, 1>()}},
      library_version(kOperation),
  };
}
