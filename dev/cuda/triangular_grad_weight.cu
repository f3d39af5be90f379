// The ladder of the gradient with respect to the weight: dW = lower triangle of the sum over the
// batch of dy x^T.
//
//   dW[i, j] = sum over b, c of dy[b, i, c] x[b, j, c]  for j <= i, exact zeros above
//
// dy, x (batch, tokens, channels) bf16, dW (tokens, tokens) fp32. README.md says how to run it.
// Here the output is small and the sum is long, batch x channels products an element, so from
// version 2 on the sum is split: blockIdx.y is the range of (sample, channels) that a block adds
// up, its tile of partial sums goes to a workspace, and a second kernel adds the partial tiles in a
// fixed order. No atomics: two runs agree bit for bit.
#include "common.cuh"
#include "hopper.cuh"
#include "library.cuh"

// -------------------------------------------------------------------------------- tiles and splits

// Tiles of kRows x kColumns that touch the lower triangle, counted row tile by row tile. kColumns
// is a multiple of kRows, so row tile r has r / ratio + 1 of them.
template <int kRows, int kColumns>
struct LowerTiles {
  static_assert(kColumns % kRows == 0, "a row tile's diagonal must lie in one column tile");
  static constexpr int kRatio = kColumns / kRows;

  // Tiles above row tile r: the index of its first one.
  __host__ __device__ static int before(int r) {
    const int full = r / kRatio;
    return kRatio * (full * (full + 1) / 2) + r % kRatio * (full + 1);
  }
  __host__ __device__ static int count(int tokens) { return before(ceil_div(tokens, kRows)); }

  // The first row and column of a tile.
  __device__ static void origin(int tile, int* row0, int* column0) {
    // near the row tile; exact after the two loops
    int r = static_cast<int>(sqrtf(2.0f * kRatio * tile));
    while (before(r) > tile) --r;
    while (before(r + 1) <= tile) ++r;
    *row0 = r * kRows;
    *column0 = (tile - before(r)) * kColumns;
  }
};

// The part of the sum that block blockIdx.y of gridDim.y adds up: slices of kDepth channels of a
// sample, [first, last).
template <int kDepth>
struct Range {
  int per_sample, first, last;
  __device__ explicit Range(const Arguments& a) {
    per_sample = ceil_div(a.channels, kDepth);
    const int64_t slices = static_cast<int64_t>(a.batch) * per_sample;
    first = static_cast<int>(slices * blockIdx.y / gridDim.y);
    last = static_cast<int>(slices * (blockIdx.y + 1) / gridDim.y);
  }
  __device__ int sample(int slice) const { return slice / per_sample; }
  __device__ int channel(int slice) const { return slice % per_sample * kDepth; }
  // The sample of a slice, of dy or of x.
  __device__ Matrix of(const bf16* values, const Arguments& a, int slice) const {
    return {values + static_cast<size_t>(sample(slice)) * a.tokens * a.channels, a.tokens,
            a.channels};
  }
};

// How often to split the sum, so that tiles x splits come close to `wanted` blocks for each
// multiprocessor but do not exceed them (one block more would mean a second round for its sake),
// with at least 4 slices a block.
inline int choose_splits(const Arguments& a, int tiles, int depth, int wanted) {
  const int64_t slices = static_cast<int64_t>(a.batch) * ceil_div(a.channels, depth);
  const int64_t most = std::min<int64_t>(slices / 4, 1024);
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>(most, wanted * device().multiProcessorCount / tiles)));
}

// Where a block's partial tile goes: workspace (splits, tiles, kRows, kColumns) fp32.
template <int kRows, int kColumns>
__device__ __forceinline__ float* partial_tile(float* workspace) {
  const size_t index = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  return workspace + index * (kRows * kColumns);
}

// dW from the partial tiles: a thread adds one element's partial sums in order, or writes a zero
// above the diagonal.
template <int kRows, int kColumns>
__global__ void finish_kernel(const Arguments a, const float* workspace, int splits) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (column >= a.tokens) return;
  float sum = 0.0f;
  if (column <= row) {
    using Tiles = LowerTiles<kRows, kColumns>;
    const size_t tile = Tiles::before(row / kRows) + column / kColumns;
    const float* partial = workspace + (tile * kRows + row % kRows) * kColumns + column % kColumns;
    const size_t stride = static_cast<size_t>(Tiles::count(a.tokens)) * kRows * kColumns;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) sum += partial[split * stride];
  }
  a.dweight[static_cast<size_t>(row) * a.tokens + column] = sum;
}

// Launches `kernel`, whose arguments end with the workspace, for all tiles and so many splits that
// `wanted` blocks come on each multiprocessor, then adds the partial tiles up.
template <int kRows, int kColumns, typename Kernel, typename... Values>
cudaError_t launch_split(Kernel kernel, int depth, int wanted, int threads, int shared_bytes,
                         const Arguments& a, Values... maps) {
  const int tiles = LowerTiles<kRows, kColumns>::count(a.tokens);
  const int splits = choose_splits(a, tiles, depth, wanted);
  const size_t elements = static_cast<size_t>(tiles) * splits * kRows * kColumns;
  float* workspace = static_cast<float*>(scratch(sizeof(float) * elements));
  const cudaError_t status =
      launch(kernel, dim3(tiles, splits), dim3(threads), shared_bytes, maps..., a, workspace);
  if (status != cudaSuccess) return status;
  return launch(finish_kernel<kRows, kColumns>, dim3(ceil_div(a.tokens, 256), a.tokens), dim3(256),
                0, a, static_cast<const float*>(workspace), splits);
}

// ======================================================================================= version 1
// One thread for each element of dW, which adds its batch x channels products, 8 channels (16 bytes
// of each factor) at a time. Above the diagonal a thread writes its zero and is done. A short
// context has few elements, so few threads, each with a long sum: at 512 tokens 131 thousand
// threads of 131 thousand products, half of what fits on the GPU at once.

__global__ void naive_kernel(const Arguments a) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  if (column >= a.tokens || row >= a.tokens) return;
  float sum = 0.0f;
  if (column <= row) {
    for (int sample = 0; sample < a.batch; ++sample) {
      const size_t start = static_cast<size_t>(sample) * a.tokens;
      const uint4* left = reinterpret_cast<const uint4*>(&a.dy[(start + row) * a.channels]);
      const uint4* right = reinterpret_cast<const uint4*>(&a.x[(start + column) * a.channels]);
#pragma unroll 4
      for (int vector = 0; vector < a.channels / 8; ++vector) {
        float dy[8], x[8];
        unpack(dy, left[vector]);
        unpack(x, right[vector]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += dy[i] * x[i];
      }
    }
  }
  a.dweight[static_cast<size_t>(row) * a.tokens + column] = sum;
}

Configuration naive(int across, int down) {
  return {text(across, " columns x ", down, " rows a block"), [=](const Arguments& a) {
            return launch(naive_kernel, dim3(ceil_div(a.tokens, across), ceil_div(a.tokens, down)),
                          dim3(across, down), 0, a);
          }};
}

// ======================================================================================= version 2
// A block computes a square tile of dW for a part of the sum. Tiles of dy and x come into shared
// memory as fp32, with their rows along the tokens, and every value brought in is used kTile times.
// Only tiles that touch the lower triangle have a block. Splitting the sum gives the GPU enough
// blocks whatever the context.

template <int kTile>
__global__ void __launch_bounds__(kTile* kTile) shared_kernel(const Arguments a, float* workspace) {
  __shared__ float left[kTile][kTile];  // [i][channel]
  // [j][channel]; the extra word puts the rows into different banks
  __shared__ float right[kTile][kTile + 1];
  const int across = threadIdx.x % kTile, down = threadIdx.x / kTile;
  int row0, column0;
  LowerTiles<kTile, kTile>::origin(blockIdx.x, &row0, &column0);
  const Range<kTile> range(a);
  float sum = 0.0f;
  for (int slice = range.first; slice < range.last; ++slice) {
    const int channel = range.channel(slice) + across;
    const float dy = range.of(a.dy, a, slice).element(row0 + down, channel);
    const float x = range.of(a.x, a, slice).element(column0 + down, channel);
    __syncthreads();
    left[down][across] = dy;
    right[down][across] = x;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += left[down][k] * right[across][k];
  }
  partial_tile<kTile, kTile>(workspace)[threadIdx.x] = sum;
}

template <int kTile>
Configuration shared_tiles() {
  return {text("tile ", kTile, "x", kTile, ", a thread an element"), [](const Arguments& a) {
            return launch_split<kTile, kTile>(shared_kernel<kTile>, kTile, 8, kTile * kTile, 0, a);
          }};
}

// ======================================================================================= version 3
// Each thread computes 8 x 8 elements in registers: 16 values from shared memory feed 64
// multiply-adds instead of 2 feeding 1. Loads from global memory bring 8 bf16 (16 bytes) an
// instruction. Both tiles are stored with the channel as their row, so that a thread's 8 rows and 8
// columns are two 16-byte reads each; the 4 extra floats of a row keep the transposing stores out
// of each other's banks.

template <int kRows, int kColumns>
__global__ void __launch_bounds__(kRows* kColumns / 64)
    register_kernel(const Arguments a, float* workspace) {
  constexpr int kDepth = 16;
  constexpr int kThreads = kRows * kColumns / 64;
  __shared__ __align__(16) float left[kDepth][kRows + 4];
  __shared__ __align__(16) float right[kDepth][kColumns + 4];
  int row0, column0;
  LowerTiles<kRows, kColumns>::origin(blockIdx.x, &row0, &column0);
  const Range<kDepth> range(a);
  float sum[8][8] = {};
  for (int slice = range.first; slice < range.last; ++slice) {
    __syncthreads();
    const int channel = range.channel(slice);
    load_transposed<kRows, kThreads>(left, range.of(a.dy, a, slice), row0, channel);
    load_transposed<kColumns, kThreads>(right, range.of(a.x, a, slice), column0, channel);
    __syncthreads();
    multiply_registers<kRows, kColumns>(sum, left, right);
  }
  float* partial = partial_tile<kRows, kColumns>(workspace);
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float* row = &partial[register_row<kRows, kColumns>(r) * kColumns];
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
      *reinterpret_cast<float4*>(row + register_column<kColumns>(c)) =
          make_float4(sum[r][c], sum[r][c + 1], sum[r][c + 2], sum[r][c + 3]);
    }
  }
}

template <int kRows, int kColumns>
Configuration register_tiles() {
  constexpr int kThreads = kRows * kColumns / 64;
  return {text("tile ", kRows, "x", kColumns, ", ", kThreads, " threads"), [](const Arguments& a) {
            return launch_split<kRows, kColumns>(register_kernel<kRows, kColumns>, 16,
                                                 512 / kThreads, kThreads, 0, a);
          }};
}

// ======================================================================================= version 4
// Tensor cores: one mma instruction of a warp multiplies 16 x 16 by 16 x 8, 2048 multiply-adds,
// from bf16 in registers with sums in fp32. Channels run along the rows of dy and of x, just as mma
// wants both of its operands: ldmatrix transposes neither. Tiles stay bf16 in shared memory; rows
// are padded by 16 bytes, so that the 8 rows that ldmatrix reads at once lie in different banks.
// Loading and multiplying still take turns.

// Partial sums of a warp's tile of mma results to the block's partial tile.
template <int kColumns, int kRowBlocks, int kColumnBlocks>
__device__ __forceinline__ void store_partial(float* partial,
                                              const float (&sum)[kRowBlocks][kColumnBlocks][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      float* target = partial + (16 * r + lane / 4) * kColumns + 8 * c + lane % 4 * 2;
      *reinterpret_cast<float2*>(target) = make_float2(sum[r][c][0], sum[r][c][1]);
      *reinterpret_cast<float2*>(target + 8 * kColumns) = make_float2(sum[r][c][2], sum[r][c][3]);
    }
  }
}

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
__global__ void __launch_bounds__(kRows* kColumns / (kWarpRows * kWarpColumns) * 32, 1)
    mma_kernel(const Arguments a, float* workspace) {
  constexpr int kDepth = 32;
  constexpr int kThreads = kRows * kColumns / (kWarpRows * kWarpColumns) * 32;
  __shared__ __align__(16) bf16 left[kRows][kDepth + 8];      // [i][channel]
  __shared__ __align__(16) bf16 right[kColumns][kDepth + 8];  // [j][channel]
  const int warp_row = threadIdx.x / 32 / (kColumns / kWarpColumns) * kWarpRows;
  const int warp_column = threadIdx.x / 32 % (kColumns / kWarpColumns) * kWarpColumns;
  int row0, column0;
  LowerTiles<kRows, kColumns>::origin(blockIdx.x, &row0, &column0);
  const Range<kDepth> range(a);
  float sum[kWarpRows / 16][kWarpColumns / 8][4] = {};
  for (int slice = range.first; slice < range.last; ++slice) {
    __syncthreads();
    const int channel = range.channel(slice);
    load_tile<kDepth, kThreads>(left, range.of(a.dy, a, slice), row0, channel);
    load_tile<kDepth, kThreads>(right, range.of(a.x, a, slice), column0, channel);
    __syncthreads();
    multiply_warp<kDepth, false, false>(
        sum, warp_row, warp_column, [&](int i, int j) { return &left[i][j]; },
        [&](int i, int j) { return &right[i][j]; });
  }
  store_partial<kColumns>(
      partial_tile<kRows, kColumns>(workspace) + warp_row * kColumns + warp_column, sum);
}

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
Configuration tensor_cores() {
  constexpr int kWarps = kRows * kColumns / (kWarpRows * kWarpColumns);
  return {text("tile ", kRows, "x", kColumns, "x32, ", kWarps, " warps"), [](const Arguments& a) {
            return launch_split<kRows, kColumns>(
                mma_kernel<kRows, kColumns, kWarpRows, kWarpColumns>, 32, 16 / kWarps, 32 * kWarps,
                0, a);
          }};
}

// ======================================================================================= version 5
// cp.async copies from global to shared memory in the background. With kStages buffers the copies
// of the next kStages - 1 slices are under way while the tensor cores work on this one, and one
// __syncthreads a slice is enough. An XOR swizzle takes the place of the padding. All tiles have
// the same work here, so what decides the last round is the number of splits.

template <int kRows, int kColumns, int kDepth, int kWarpRows, int kWarpColumns, int kStages>
__global__ void __launch_bounds__(kRows* kColumns / (kWarpRows * kWarpColumns) * 32, 1)
    pipelined_kernel(const Arguments a, float* workspace) {
  constexpr int kThreads = kRows * kColumns / (kWarpRows * kWarpColumns) * 32;
  bf16* left = reinterpret_cast<bf16*>(dynamic_shared());  // (stages, rows, depth), swizzled
  bf16* right = left + kStages * kRows * kDepth;           // (stages, columns, depth), swizzled
  const int warp_row = threadIdx.x / 32 / (kColumns / kWarpColumns) * kWarpRows;
  const int warp_column = threadIdx.x / 32 % (kColumns / kWarpColumns) * kWarpColumns;
  int row0, column0;
  LowerTiles<kRows, kColumns>::origin(blockIdx.x, &row0, &column0);
  const Range<kDepth> range(a);
  float sum[kWarpRows / 16][kWarpColumns / 8][4] = {};
  run_pipeline<kStages>(
      range.last - range.first,
      [&](int step) {
        const int slice = range.first + step, stage = step % kStages;
        const int channel = range.channel(slice);
        copy_tile<kRows, kDepth, kThreads>(left + stage * (kRows * kDepth),
                                           range.of(a.dy, a, slice), row0, channel);
        copy_tile<kColumns, kDepth, kThreads>(right + stage * (kColumns * kDepth),
                                              range.of(a.x, a, slice), column0, channel);
      },
      [&](int step) {
        const bf16* dy = left + step % kStages * (kRows * kDepth);
        const bf16* x = right + step % kStages * (kColumns * kDepth);
        multiply_warp<kDepth, false, false>(
            sum, warp_row, warp_column, [&](int i, int j) { return &dy[swizzled<kDepth>(i, j)]; },
            [&](int i, int j) { return &x[swizzled<kDepth>(i, j)]; });
      });
  store_partial<kColumns>(
      partial_tile<kRows, kColumns>(workspace) + warp_row * kColumns + warp_column, sum);
}

template <int kRows, int kColumns, int kDepth, int kWarpRows, int kWarpColumns, int kStages>
Configuration pipelined(int blocks_per_processor) {
  constexpr int kWarps = kRows * kColumns / (kWarpRows * kWarpColumns);
  constexpr int kBytes = kStages * (kRows + kColumns) * kDepth * static_cast<int>(sizeof(bf16));
  return {text("tile ", kRows, "x", kColumns, "x", kDepth, ", ", kStages, " stages, ",
               blocks_per_processor, " blocks an SM"),
          [=](const Arguments& a) {
            return launch_split<kRows, kColumns>(
                pipelined_kernel<kRows, kColumns, kDepth, kWarpRows, kWarpColumns, kStages>, kDepth,
                blocks_per_processor, 32 * kWarps, kBytes, a);
          }};
}

// ======================================================================================= version 6
// Hopper. wgmma multiplies 64 x 16 by 16 x 256 for four warps at once and reads both operands from
// shared memory itself, so the operands no longer pass through registers. TMA copies boxes of 64 x
// 64 with one instruction of one thread: address arithmetic, bounds and swizzle are done by
// hardware. So the block divides the labour: one producer warp keeps the stages full, the consumer
// warpgroups (64 rows each) only multiply, and two barriers a stage, full and empty, are all they
// share.
//
// Stage: the tile of dy as kConsumers boxes (64 rows x 64 channels), that of x as kColumns / 64
// boxes of the same shape. Both are K-major, the sum runs along the rows of the boxes, so wgmma
// transposes nothing.

template <int kConsumers, int kColumns, int kStages, int kBlocks>
__global__ void __launch_bounds__(128 * kConsumers + 32, kBlocks)
    hopper_kernel(const __grid_constant__ CUtensorMap dy_map,
                  const __grid_constant__ CUtensorMap x_map, const Arguments a, float* workspace) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = kBox * kConsumers;
  constexpr int kBoxesAcross = kColumns / kBox;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int row0, column0;
  LowerTiles<kRows, kColumns>::origin(blockIdx.x, &row0, &column0);
  const Range<kBox> range(a);
  const int steps = range.last - range.first;
  const Stages<kConsumers, kBoxesAcross, kStages> ring;

  if (warp == 4 * kConsumers) {  // the producer
    if (lane != 0) return;
    ring.produce(steps, [&](int step, unsigned char* memory, Barrier* barrier) {
      const int sample = range.sample(range.first + step);
      const int channel = range.channel(range.first + step);
      for (int box = 0; box < kConsumers; ++box)
        load_box(memory + box * kBoxBytes, &dy_map, barrier, channel, row0 + box * kBox, sample);
      for (int box = 0; box < kBoxesAcross; ++box) {
        load_box(memory + (kConsumers + box) * kBoxBytes, &x_map, barrier, channel,
                 column0 + box * kBox, sample);
      }
    });
    return;
  }

  const int consumer = warp / 4;
  // the first wgmma overwrites it, so it needs no zeros, which would delay the wgmma
  float sum[kColumns / 2];
  ring.template consume<false, false>(sum, consumer, 0, steps);
  float* partial = partial_tile<kRows, kColumns>(workspace);
  const int row = consumer * kBox + warp % 4 * 16 + lane / 4;
#pragma unroll
  for (int block = 0; block < kColumns / 8; ++block) {
    float* target = partial + row * kColumns + 8 * block + lane % 4 * 2;
    *reinterpret_cast<float2*>(target) = make_float2(sum[4 * block], sum[4 * block + 1]);
    *reinterpret_cast<float2*>(target + 8 * kColumns) =
        make_float2(sum[4 * block + 2], sum[4 * block + 3]);
  }
#else
  __trap();  // not built for sm_90a
#endif
}

template <int kConsumers, int kColumns, int kStages, int kBlocks>
Configuration hopper(int blocks_per_processor) {
  constexpr int kRows = kBox * kConsumers;
  return {text("tile ", kRows, "x", kColumns, "x64, ", kStages, " stages, ", blocks_per_processor,
               " blocks an SM"),
          [=](const Arguments& a) {
            return launch_split<kRows, kColumns>(
                hopper_kernel<kConsumers, kColumns, kStages, kBlocks>, kBox, blocks_per_processor,
                128 * kConsumers + 32, Stages<kConsumers, kColumns / kBox, kStages>::kBytes, a,
                tensor_map(a.dy, a.batch, a.tokens, a.channels),
                tensor_map(a.x, a.batch, a.tokens, a.channels));
          }};
}

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  return run_ladder(
      kGradWeight, options,
      {
          cublas_version(kGradWeight),
          {1,
           "one thread an element, j <= i only",
           false,
           {naive(32, 8), naive(16, 16), naive(8, 8)}},
          {2,
           "tiles in shared memory, lower ones only, split sum",
           false,
           {shared_tiles<16>(), shared_tiles<32>()}},
          {3,
           "8x8 elements a thread in registers, 16-byte loads",
           false,
           {register_tiles<64, 64>(), register_tiles<64, 128>(), register_tiles<128, 128>()}},
          {4,
           "tensor cores: mma.sync and ldmatrix",
           false,
           {tensor_cores<64, 64, 32, 32>(), tensor_cores<128, 128, 64, 32>(),
            tensor_cores<128, 128, 64, 64>()}},
          {5,
           "cp.async pipeline, XOR swizzle",
           false,
           {pipelined<128, 128, 32, 64, 32, 3>(2), pipelined<128, 128, 32, 64, 32, 4>(1),
            pipelined<128, 128, 64, 64, 32, 3>(1), pipelined<128, 256, 32, 64, 64, 4>(1)}},
          {6,
           "TMA, mbarriers, wgmma, a producer warp",
           true,
           {hopper<2, 128, 4, 1>(1), hopper<2, 128, 3, 2>(2), hopper<2, 128, 3, 2>(4),
            hopper<2, 256, 4, 1>(1), hopper<2, 256, 4, 1>(2)}},
          library_version(kGradWeight),
      });
}
