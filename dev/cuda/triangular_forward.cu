// The ladder of the forward product: y = W x, W lower triangular, with bias and residual if they
// are given.
//
//   y[b, i, c] = sum over j <= i of W[i, j] x[b, j, c]  + bias[i] + residual[b, i, c]
//
// x, y, residual (batch, tokens, channels), W (tokens, columns), bf16; sums in fp32. README.md says
// how to run it.
#include "common.cuh"
#include "hopper.cuh"
#include "library.cuh"

// What every version does last with two neighbouring channels: bias and residual, one rounding to
// bf16, one 4-byte store.
__device__ __forceinline__ uint32_t finish_pair(const Arguments& a, int sample, int row,
                                                int channel, float first, float second) {
  if (a.bias != nullptr) {
    first += a.bias[row];
    second += a.bias[row];
  }
  if (a.residual != nullptr) {
    const size_t index = (static_cast<size_t>(sample) * a.tokens + row) * a.channels + channel;
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(&a.residual[index]);
    first += low_half(pair);
    second += high_half(pair);
  }
  return pack_pair(first, second);
}

__device__ __forceinline__ void store_pair(const Arguments& a, int sample, int row, int channel,
                                           float first, float second) {
  // channels is even: both are inside or neither
  if (row >= a.tokens || channel >= a.channels) return;
  const size_t index = (static_cast<size_t>(sample) * a.tokens + row) * a.channels + channel;
  *reinterpret_cast<uint32_t*>(&a.y[index]) = finish_pair(a, sample, row, channel, first, second);
}

// ======================================================================================= version 1
// One thread for each output element, which adds its j <= i products. Neighbouring threads take
// neighbouring channels, so their loads of x are next to each other in memory and W[i, j] is one
// word for the whole warp. Half the work of the dense product is skipped from the start; what is
// slow is that every product fetches both of its factors.

__global__ void naive_kernel(const Arguments a) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y * blockDim.y + threadIdx.y;
  const int sample = blockIdx.z;
  if (channel >= a.channels || row >= a.tokens) return;
  const bf16* weight = a.weight + static_cast<size_t>(row) * a.columns;
  const size_t start = static_cast<size_t>(sample) * a.tokens * a.channels + channel;
  float sum = a.bias != nullptr ? a.bias[row] : 0.0f;
#pragma unroll 8
  for (int j = 0; j <= row; ++j) {
    sum += __bfloat162float(weight[j]) *
           __bfloat162float(a.x[start + static_cast<size_t>(j) * a.channels]);
  }
  const size_t index = start + static_cast<size_t>(row) * a.channels;
  if (a.residual != nullptr) sum += __bfloat162float(a.residual[index]);
  a.y[index] = __float2bfloat16_rn(sum);
}

Configuration naive(int across, int down) {
  const std::string name =
      std::to_string(across) + " channels x " + std::to_string(down) + " tokens a block";
  return {name, [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, across), ceil_div(a.tokens, down), a.batch);
            return launch(naive_kernel, blocks, dim3(across, down), 0, a);
          }};
}

// ======================================================================================= version 2
// A block computes a square tile of y and walks along j in steps of the tile's width. In each step
// it brings one tile of W and one of x into shared memory, as fp32, and every value brought in is
// used kTile times. The walk ends at the diagonal: tiles above it are neither loaded nor
// multiplied. Memory traffic falls by kTile; now shared memory is the limit, since each
// multiply-add still reads two values from it.

template <int kTile>
__global__ void __launch_bounds__(kTile* kTile) shared_kernel(const Arguments a) {
  __shared__ float weights[kTile][kTile];      // [row][j]
  __shared__ float activations[kTile][kTile];  // [j][channel]
  const int channel = blockIdx.x * kTile + threadIdx.x;
  const int row0 = blockIdx.y * kTile;
  const int row = row0 + threadIdx.y;
  const int sample = blockIdx.z;
  const bf16* x = a.x + static_cast<size_t>(sample) * a.tokens * a.channels;

  float sum = 0.0f;
  for (int j0 = 0; j0 <= row0; j0 += kTile) {
    const int column = j0 + threadIdx.x;
    const int token = j0 + threadIdx.y;
    float weight = 0.0f, activation = 0.0f;
    if (row < a.tokens && column < a.tokens) {
      weight = __bfloat162float(a.weight[static_cast<size_t>(row) * a.columns + column]);
    }
    if (token < a.tokens && channel < a.channels) {
      activation = __bfloat162float(x[static_cast<size_t>(token) * a.channels + channel]);
    }
    __syncthreads();  // all threads have read the previous step's tiles
    weights[threadIdx.y][threadIdx.x] = weight;
    activations[threadIdx.y][threadIdx.x] = activation;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += weights[threadIdx.y][k] * activations[k][threadIdx.x];
  }
  if (row >= a.tokens || channel >= a.channels) return;
  const size_t index = (static_cast<size_t>(sample) * a.tokens + row) * a.channels + channel;
  if (a.bias != nullptr) sum += a.bias[row];
  if (a.residual != nullptr) sum += __bfloat162float(a.residual[index]);
  a.y[index] = __float2bfloat16_rn(sum);
}

template <int kTile>
Configuration shared_tiles() {
  const std::string size = std::to_string(kTile);
  return {"tile " + size + "x" + size + ", a thread an element", [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kTile), ceil_div(a.tokens, kTile), a.batch);
            return launch(shared_kernel<kTile>, blocks, dim3(kTile, kTile), 0, a);
          }};
}

// ======================================================================================= version 3
// Each thread computes 8 x 8 elements and keeps them in registers: 16 values from shared memory now
// feed 64 multiply-adds instead of 2 feeding 1. Loads from global memory bring 8 bf16 (16 bytes) an
// instruction. The tile of W is stored with j as its row, so that a thread's 8 rows are two 16-byte
// reads; the 4 extra floats of a row keep the transposing stores out of each other's banks. The
// limit is now the fp32 units themselves.

template <int kRows, int kChannels>
__global__ void __launch_bounds__(kRows* kChannels / 64) register_kernel(const Arguments a) {
  constexpr int kDepth = 16;
  constexpr int kThreads = kRows * kChannels / 64;
  constexpr int kAcross = kChannels / 8;                              // threads side by side
  __shared__ __align__(16) float weights[kDepth][kRows + 4];          // [j][row]
  __shared__ __align__(16) float activations[kDepth][kChannels + 4];  // [j][channel]
  const int thread = threadIdx.x;
  // the thread's rows: down .. down + 3 and kRows / 2 further on
  const int down = thread / kAcross * 4;
  // and its channels: across .. across + 3 and kChannels / 2 further on
  const int across = thread % kAcross * 4;
  const int channel0 = blockIdx.x * kChannels;
  const int row0 = blockIdx.y * kRows;
  const int sample = blockIdx.z;
  const bf16* x = a.x + static_cast<size_t>(sample) * a.tokens * a.channels;

  float sum[8][8] = {};
  const int last = min(row0 + kRows, a.tokens);
  for (int j0 = 0; j0 < last; j0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int vector = thread; vector < kRows * kDepth / 8; vector += kThreads) {
      const int row = vector / (kDepth / 8);
      const int j = vector % (kDepth / 8) * 8;
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (row0 + row < a.tokens && j0 + j < a.columns) {
        packed = *reinterpret_cast<const uint4*>(
            &a.weight[static_cast<size_t>(row0 + row) * a.columns + j0 + j]);
      }
      float values[8];
      unpack(values, packed);
#pragma unroll
      for (int i = 0; i < 8; ++i) weights[j + i][row] = values[i];
    }
#pragma unroll
    for (int vector = thread; vector < kDepth * kChannels / 8; vector += kThreads) {
      const int j = vector / (kChannels / 8);
      const int channel = vector % (kChannels / 8) * 8;
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (j0 + j < a.tokens && channel0 + channel < a.channels) {
        packed = *reinterpret_cast<const uint4*>(
            &x[static_cast<size_t>(j0 + j) * a.channels + channel0 + channel]);
      }
      float values[8];
      unpack(values, packed);
      float4* target = reinterpret_cast<float4*>(&activations[j][channel]);
      target[0] = make_float4(values[0], values[1], values[2], values[3]);
      target[1] = make_float4(values[4], values[5], values[6], values[7]);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 w0 = *reinterpret_cast<const float4*>(&weights[k][down]);
      const float4 w1 = *reinterpret_cast<const float4*>(&weights[k][kRows / 2 + down]);
      const float4 x0 = *reinterpret_cast<const float4*>(&activations[k][across]);
      const float4 x1 = *reinterpret_cast<const float4*>(&activations[k][kChannels / 2 + across]);
      const float left[8] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
      const float right[8] = {x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w};
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[r][c] += left[r] * right[c];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = row0 + r / 4 * (kRows / 2) + down + r % 4;
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      const int channel = channel0 + c / 4 * (kChannels / 2) + across + c % 4;
      store_pair(a, sample, row, channel, sum[r][c], sum[r][c + 1]);
    }
  }
}

template <int kRows, int kChannels>
Configuration register_tiles() {
  constexpr int kThreads = kRows * kChannels / 64;
  const std::string name = "tile " + std::to_string(kRows) + "x" + std::to_string(kChannels) + ", ";
  return {name + std::to_string(kThreads) + " threads", [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kChannels), ceil_div(a.tokens, kRows), a.batch);
            return launch(register_kernel<kRows, kChannels>, blocks, dim3(kThreads), 0, a);
          }};
}

// ======================================================================================= version 4
// Tensor cores: one mma instruction of a warp multiplies 16 x 16 by 16 x 8, 2048 multiply-adds,
// from bf16 in registers with sums in fp32. ldmatrix brings its operands from shared memory in the
// layout it wants; x lies with channels along the row and is transposed on the way. Tiles stay bf16
// in shared memory, half the bytes of before. Rows are padded by 16 bytes, so that the 8 rows that
// ldmatrix reads at once lie in different banks. Loading and multiplying still take turns.

template <int kRows, int kChannels, int kWarpRows, int kWarpChannels>
__global__ void __launch_bounds__(kRows* kChannels / (kWarpRows * kWarpChannels) * 32, 1)
    mma_kernel(const Arguments a) {
  constexpr int kDepth = 32;
  constexpr int kThreads = kRows * kChannels / (kWarpRows * kWarpChannels) * 32;
  __shared__ __align__(16) bf16 weights[kRows][kDepth + 8];          // [row][j]
  __shared__ __align__(16) bf16 activations[kDepth][kChannels + 8];  // [j][channel]
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warp_row = warp / (kChannels / kWarpChannels) * kWarpRows;
  const int warp_channel = warp % (kChannels / kWarpChannels) * kWarpChannels;
  const int channel0 = blockIdx.x * kChannels;
  const int row0 = blockIdx.y * kRows;
  const int sample = blockIdx.z;
  const bf16* x = a.x + static_cast<size_t>(sample) * a.tokens * a.channels;

  float sum[kWarpRows / 16][kWarpChannels / 8][4] = {};
  const int last = min(row0 + kRows, a.tokens);
  for (int j0 = 0; j0 < last; j0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int vector = thread; vector < kRows * kDepth / 8; vector += kThreads) {
      const int row = vector / (kDepth / 8);
      const int j = vector % (kDepth / 8) * 8;
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (row0 + row < a.tokens && j0 + j < a.columns) {
        packed = *reinterpret_cast<const uint4*>(
            &a.weight[static_cast<size_t>(row0 + row) * a.columns + j0 + j]);
      }
      *reinterpret_cast<uint4*>(&weights[row][j]) = packed;
    }
#pragma unroll
    for (int vector = thread; vector < kDepth * kChannels / 8; vector += kThreads) {
      const int j = vector / (kChannels / 8);
      const int channel = vector % (kChannels / 8) * 8;
      uint4 packed = make_uint4(0, 0, 0, 0);
      if (j0 + j < a.tokens && channel0 + channel < a.channels) {
        packed = *reinterpret_cast<const uint4*>(
            &x[static_cast<size_t>(j0 + j) * a.channels + channel0 + channel]);
      }
      *reinterpret_cast<uint4*>(&activations[j][channel]) = packed;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        load_matrices(left[r], &weights[warp_row + 16 * r + lane % 16][k + lane / 16 * 8]);
      }
#pragma unroll
      for (int c = 0; c < kWarpChannels / 16; ++c) {
        uint32_t right[4];  // two operands of 16 x 8
        load_matrices_transposed(
            right, &activations[k + lane % 16][warp_channel + 16 * c + lane / 16 * 8]);
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          multiply_16x8x16(sum[r][2 * c], left[r], right[0], right[1]);
          multiply_16x8x16(sum[r][2 * c + 1], left[r], right[2], right[3]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int c = 0; c < kWarpChannels / 8; ++c) {
      const int row = row0 + warp_row + 16 * r + lane / 4;
      const int channel = channel0 + warp_channel + 8 * c + lane % 4 * 2;
      store_pair(a, sample, row, channel, sum[r][c][0], sum[r][c][1]);
      store_pair(a, sample, row + 8, channel, sum[r][c][2], sum[r][c][3]);
    }
  }
}

template <int kRows, int kChannels, int kWarpRows, int kWarpChannels>
Configuration tensor_cores() {
  constexpr int kWarps = kRows * kChannels / (kWarpRows * kWarpChannels);
  const std::string name =
      "tile " + std::to_string(kRows) + "x" + std::to_string(kChannels) + "x32, ";
  return {name + std::to_string(kWarps) + " warps", [](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, kChannels), ceil_div(a.tokens, kRows), a.batch);
            return launch(mma_kernel<kRows, kChannels, kWarpRows, kWarpChannels>, blocks,
                          dim3(32 * kWarps), 0, a);
          }};
}

// ======================================================================================= version 5
// cp.async copies from global to shared memory in the background. With kStages buffers the copies
// of the next kStages - 1 steps are under way while the tensor cores work on this one, and one
// __syncthreads a step is enough. An XOR swizzle takes the place of the padding. Row tile r needs r
// + 1 times the work of the first one, so the heavy ones start first: a light tile that ends late
// costs little. Warps whose rows lie above the diagonal of a step skip it.

template <int kRows, int kChannels, int kDepth, int kStages>
constexpr int pipeline_bytes() {
  return kStages * (kRows + kChannels) * kDepth * static_cast<int>(sizeof(bf16));
}

template <int kRows, int kChannels, int kDepth, int kWarpRows, int kWarpChannels, int kStages>
__global__ void __launch_bounds__(kRows* kChannels / (kWarpRows * kWarpChannels) * 32, 1)
    pipelined_kernel(const Arguments a, const TileOrder order) {
  constexpr int kThreads = kRows * kChannels / (kWarpRows * kWarpChannels) * 32;
  bf16* weights = reinterpret_cast<bf16*>(dynamic_shared());  // (stages, rows, depth), swizzled
  bf16* activations = weights + kStages * kRows * kDepth;     // (stages, depth, channels), swizzled
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warp_row = warp / (kChannels / kWarpChannels) * kWarpRows;
  const int warp_channel = warp % (kChannels / kWarpChannels) * kWarpChannels;
  const Tile tile = tile_of(blockIdx.x, order);
  // the last row tile is the heaviest
  const int row0 = (order.row_tiles - 1 - tile.weight_rank) * kRows;
  const int across = ceil_div(a.channels, kChannels);
  const int sample = tile.column / across;
  const int channel0 = tile.column % across * kChannels;
  const bf16* x = a.x + static_cast<size_t>(sample) * a.tokens * a.channels;
  const int steps = ceil_div(min(row0 + kRows, a.tokens), kDepth);

  const auto load = [&](int step) {
    const int j0 = step * kDepth;
    bf16* weight_stage = weights + step % kStages * (kRows * kDepth);
    bf16* activation_stage = activations + step % kStages * (kDepth * kChannels);
#pragma unroll
    for (int vector = thread; vector < kRows * kDepth / 8; vector += kThreads) {
      const int row = vector / (kDepth / 8);
      const int j = vector % (kDepth / 8) * 8;
      const bool inside = row0 + row < a.tokens && j0 + j < a.columns;
      const bf16* source =
          a.weight + (inside ? static_cast<size_t>(row0 + row) * a.columns + j0 + j : 0);
      copy_async(&weight_stage[swizzled<kDepth>(row, j)], source, inside);
    }
#pragma unroll
    for (int vector = thread; vector < kDepth * kChannels / 8; vector += kThreads) {
      const int j = vector / (kChannels / 8);
      const int channel = vector % (kChannels / 8) * 8;
      const bool inside = j0 + j < a.tokens && channel0 + channel < a.channels;
      const bf16* source =
          x + (inside ? static_cast<size_t>(j0 + j) * a.channels + channel0 + channel : 0);
      copy_async(&activation_stage[swizzled<kChannels>(j, channel)], source, inside);
    }
  };

  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    close_copy_group();  // also if empty, so that each step has exactly one group
  }
  float sum[kWarpRows / 16][kWarpChannels / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();  // this thread's copies of `step` have arrived
    // all threads' copies have arrived, and all have read step - 1, whose buffer is loaded next
    __syncthreads();
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    close_copy_group();
    // above the diagonal for all of this warp's rows
    if (step * kDepth > row0 + warp_row + kWarpRows - 1) continue;
    const bf16* weight_stage = weights + step % kStages * (kRows * kDepth);
    const bf16* activation_stage = activations + step % kStages * (kDepth * kChannels);
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        load_matrices(
            left[r],
            &weight_stage[swizzled<kDepth>(warp_row + 16 * r + lane % 16, k + lane / 16 * 8)]);
      }
#pragma unroll
      for (int c = 0; c < kWarpChannels / 16; ++c) {
        uint32_t right[4];
        const int channel = warp_channel + 16 * c + lane / 16 * 8;
        load_matrices_transposed(right,
                                 &activation_stage[swizzled<kChannels>(k + lane % 16, channel)]);
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          multiply_16x8x16(sum[r][2 * c], left[r], right[0], right[1]);
          multiply_16x8x16(sum[r][2 * c + 1], left[r], right[2], right[3]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int c = 0; c < kWarpChannels / 8; ++c) {
      const int row = row0 + warp_row + 16 * r + lane / 4;
      const int channel = channel0 + warp_channel + 8 * c + lane % 4 * 2;
      store_pair(a, sample, row, channel, sum[r][c][0], sum[r][c][1]);
      store_pair(a, sample, row + 8, channel, sum[r][c][2], sum[r][c][3]);
    }
  }
}

template <int kRows, int kChannels, int kDepth, int kWarpRows, int kWarpChannels, int kStages>
Configuration pipelined(bool grouped) {
  constexpr int kWarps = kRows * kChannels / (kWarpRows * kWarpChannels);
  constexpr int kBytes = pipeline_bytes<kRows, kChannels, kDepth, kStages>();
  const std::string name = "tile " + std::to_string(kRows) + "x" + std::to_string(kChannels) + "x" +
                           std::to_string(kDepth) + ", " + std::to_string(kStages) + " stages, " +
                           std::to_string(kWarps) + " warps" + (grouped ? ", grouped" : "");
  return {name, [grouped](const Arguments& a) {
            const int columns = a.batch * ceil_div(a.channels, kChannels);
            const int group = grouped ? columns_in_cache(a, kChannels) : columns;
            const TileOrder order = {ceil_div(a.tokens, kRows), columns, group};
            return launch(
                pipelined_kernel<kRows, kChannels, kDepth, kWarpRows, kWarpChannels, kStages>,
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
// Stage: the tile of W as kConsumers boxes (64 rows x 64 j, K-major), that of x as kChannels / 64
// boxes (64 j x 64 channels, MN-major).

template <int kConsumers, int kChannels, int kStages>
constexpr int hopper_bytes() {
  return 1024 + kStages * (kConsumers + kChannels / kBox) * kBoxBytes +
         2 * kStages * static_cast<int>(sizeof(Barrier));
}

template <int kConsumers, int kChannels, int kStages, int kBlocks>
__global__ void __launch_bounds__(128 * kConsumers + 32, kBlocks)
    hopper_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap x_map,
                  const __grid_constant__ CUtensorMap y_map, const Arguments a,
                  const TileOrder order) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = kBox * kConsumers;
  constexpr int kBoxesAcross = kChannels / kBox;
  constexpr int kStageBytes = (kConsumers + kBoxesAcross) * kBoxBytes;
  static_assert(kConsumers * kBoxesAcross * kBoxBytes <= kStages * kStageBytes,
                "the output tile takes the stages' place");
  static_assert(kConsumers <= kStages, "see the end of the consumer's loop");
  // Boxes must start at multiples of 1024 bytes.
  unsigned char* stages =
      dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
  Barrier* full = reinterpret_cast<Barrier*>(stages + kStages * kStageBytes);
  Barrier* empty = full + kStages;

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const Tile tile = tile_of(blockIdx.x, order);
  const int row0 = (order.row_tiles - 1 - tile.weight_rank) * kRows;
  const int across = ceil_div(a.channels, kChannels);
  const int sample = tile.column / across;
  const int channel0 = tile.column % across * kChannels;
  const int steps = ceil_div(min(row0 + kRows, a.tokens), kBox);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&full[stage], 1);            // the producer
      barrier_init(&empty[stage], kConsumers);  // one thread of each consumer
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp == 4 * kConsumers) {  // the producer
    if (lane != 0) return;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      unsigned char* memory = stages + stage * kStageBytes;
      barrier_wait(&empty[stage], (step / kStages + 1) % 2);
      barrier_arrive_expecting(&full[stage], kStageBytes);
      for (int box = 0; box < kConsumers; ++box) {
        load_box(memory + box * kBoxBytes, &weight_map, &full[stage], step * kBox,
                 row0 + box * kBox, 0);
      }
      for (int box = 0; box < kBoxesAcross; ++box) {
        load_box(memory + (kConsumers + box) * kBoxBytes, &x_map, &full[stage],
                 channel0 + box * kBox, step * kBox, sample);
      }
    }
    return;
  }

  // A consumer. Its 64 rows end at the diagonal: later steps of the tile are zeros for it.
  const int consumer = warp / 4;
  const int own_steps = min(steps, row0 / kBox + consumer + 1);
  // the first wgmma overwrites it, so it needs no zeros, which would delay the wgmma
  float sum[kChannels / 2];
  for (int step = 0; step < own_steps; ++step) {
    const int stage = step % kStages;
    const unsigned char* memory = stages + stage * kStageBytes;
    barrier_wait(&full[stage], step / kStages % 2);
    const uint64_t left = operand(memory + consumer * kBoxBytes, 0);
    const uint64_t right = operand(memory + kConsumers * kBoxBytes, kBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBox / 16; ++k) {
      wgmma<false, true>(sum, left + k * kNextK, right + k * kNextKTransposed, step + k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step has been read: its stage is free
    if (step > 0 && threadIdx.x % 128 == 0) barrier_arrive(&empty[(step - 1) % kStages]);
  }
  wgmma_wait<0>();
  // The output tile takes the stages' place. The last consumer has waited for every copy; once all
  // are here, all is read. (No stage that a consumer did not give back is filled again: it leaves
  // out fewer steps than there are stages.)
  named_barrier(1, 128 * kConsumers);

  // Bias and residual in registers, then the tile goes to shared memory as boxes of 64 x 64,
  // swizzled as TMA expects.
  unsigned char* boxes = stages + consumer * kBoxesAcross * kBoxBytes;
  const int warp_row = warp % 4 * 16;
  const int row = row0 + consumer * kBox + warp_row + lane / 4;
#pragma unroll
  for (int pair = 0; pair < kChannels / 16; ++pair) {  // 16 channels
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows +0 and +8 of the first 8 channels, then of the second 8
      const float first = sum[8 * pair + 2 * i], second = sum[8 * pair + 2 * i + 1];
      const int token = row + i % 2 * 8;
      const int channel = channel0 + 16 * pair + i / 2 * 8 + lane % 4 * 2;
      const bool inside = token < a.tokens && channel < a.channels;
      values[i] = inside ? finish_pair(a, sample, token, channel, first, second) : 0;
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
      store_box(&y_map, boxes + box * kBoxBytes, channel0 + box * kBox, row0 + consumer * kBox,
                sample);
    }
    finish_stores();
  }
#else
  __trap();  // not built for sm_90a
#endif
}

template <int kConsumers, int kChannels, int kStages, int kBlocks>
Configuration hopper() {
  constexpr int kRows = kBox * kConsumers;
  const std::string name = "tile " + std::to_string(kRows) + "x" + std::to_string(kChannels) +
                           "x64, " + std::to_string(kStages) + " stages, " +
                           std::to_string(kBlocks) + " blocks an SM";
  return {name, [](const Arguments& a) {
            CUtensorMap weight_map, x_map, y_map;
            cudaError_t status = make_map(&weight_map, a.weight, 1, a.tokens, a.columns, a.columns);
            if (status == cudaSuccess)
              status = make_map(&x_map, a.x, a.batch, a.tokens, a.channels, a.channels);
            if (status == cudaSuccess)
              status = make_map(&y_map, a.y, a.batch, a.tokens, a.channels, a.channels);
            if (status != cudaSuccess) return status;
            const int columns = a.batch * ceil_div(a.channels, kChannels);
            const TileOrder order = {ceil_div(a.tokens, kRows), columns,
                                     columns_in_cache(a, kChannels)};
            return launch(hopper_kernel<kConsumers, kChannels, kStages, kBlocks>,
                          dim3(order.row_tiles * columns), dim3(128 * kConsumers + 32),
                          hopper_bytes<kConsumers, kChannels, kStages>(), weight_map, x_map, y_map,
                          a, order);
          }};
}

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  return run_ladder(
      kForward, options,
      {
          {1,
           "one thread an element, j <= i only",
           false,
           {naive(32, 8), naive(64, 4), naive(256, 1)}},
          {2,
           "tiles in shared memory, none above the diagonal",
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
           "cp.async pipeline, XOR swizzle, heavy tiles first",
           false,
           {pipelined<128, 128, 32, 64, 32, 3>(false), pipelined<128, 128, 32, 64, 32, 4>(false),
            pipelined<128, 128, 32, 64, 32, 4>(true), pipelined<128, 128, 64, 64, 32, 3>(true),
            pipelined<128, 256, 32, 64, 64, 4>(true)}},
          {6,
           "TMA, mbarriers, wgmma, a producer warp; tiles grouped for L2",
           true,
           {hopper<2, 128, 4, 1>(), hopper<2, 128, 3, 2>(), hopper<2, 256, 3, 1>(),
            hopper<2, 256, 4, 1>(), hopper<4, 128, 4, 1>()}},
          library_version(kForward),
      });
}
