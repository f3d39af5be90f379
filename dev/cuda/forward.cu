// The development of the forward product, one idea at a time:
//
//   y[b, i, c] = sum over j <= i of W[i, j] x[b, j, c]
//
// W is (tokens, columns), lower triangular; x and y are (batch, tokens, channels). All are bf16, sums
// are fp32.
//
// Each version begins with what it changes and why that should help. From version 2 on a block
// computes a `Tile` of y, kRows x kColumns, in steps of kDepth tokens: a tile of W times one of x.
#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "instructions.cuh"

// The arguments of every version. kernel_ladder.py fills them up to `columns`.
struct Arguments {
  const bf16 *weight, *x;
  bf16* y;
  int batch, tokens, channels;
  int columns;  // tokens rounded up to 8: rows of W start at multiples of 16 bytes
  int group;    // column tiles that run together: see Tile
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ------------------------------------------------------------------------------ the host's side

struct Configuration {
  int version;
  std::string name;
  std::function<cudaError_t(const Arguments&)> launch;
};

// The values next to each other, as text.
template <typename... Values>
std::string text(const Values&... values) {
  std::ostringstream stream;
  (stream << ... << values);
  return stream.str();
}

// Launches a kernel, after asking for more than 48 KB of shared memory if it needs that.
template <typename... Parameters, typename... Values>
cudaError_t launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared_bytes,
                   const Values&... values) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (status != cudaSuccess) return status;
  }
  kernel<<<blocks, threads, shared_bytes>>>(values...);
  return cudaGetLastError();
}

// A configuration of one of the kernels from version 2 on, whose arguments are tensor maps, if any,
// and then `Arguments`.
template <int kRows, int kColumns, typename Kernel, typename... Maps>
Configuration configuration(int version, std::string name, Kernel kernel, int threads,
                            int shared_bytes, Maps... maps) {
  return {version, name, [=](Arguments a) {
            const int columns = a.batch * ceil_div(a.channels, kColumns);
            a.group = std::clamp(static_cast<int>(25e6 / (2.0 * a.tokens * kColumns)), 1, columns);
            return launch(kernel, dim3(ceil_div(a.tokens, kRows) * columns), dim3(threads),
                          shared_bytes, maps(a)..., a);
          }};
}

// ----------------------------------------------------------------------------- matrices and tiles

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Two bf16 values in one register, the first in the lower half.
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 16 bytes of bf16 as 8 floats.
__device__ __forceinline__ void unpack(float (&values)[8], uint4 packed) {
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(pairs[i]);
    values[2 * i + 1] = high_half(pairs[i]);
  }
}

// A row-major array of which everything beyond the edges reads as zero. Its width is a multiple
// of 8.
struct Matrix {
  const bf16* values;
  int rows, width;

  __device__ const bf16* at(int row, int column) const {
    return values + static_cast<size_t>(row) * width + column;
  }
  __device__ bool inside(int row, int column) const { return row < rows && column < width; }
};

// A factor's tile: what lies from (row, column) on in W (sample 0), or in a sample of x.
struct Factor {
  Matrix matrix;
  int row, column, sample;

  __device__ float element(int i, int j) const {
    return matrix.inside(row + i, column + j) ? __bfloat162float(*matrix.at(row + i, column + j))
                                              : 0.0f;
  }
  // 8 elements from a column that is a multiple of 8.
  __device__ uint4 vector(int i, int j) const {
    return matrix.inside(row + i, column + j)
               ? *reinterpret_cast<const uint4*>(matrix.at(row + i, column + j))
               : make_uint4(0, 0, 0, 0);
  }
};

// A block's tile of y: kRows tokens by kColumns channels of one sample. Its steps go from token 0 to
// the diagonal, so the last row tile is the heaviest. Blocks start roughly in the order of their
// index, so index 0 has the heaviest row tile: the light ones then fill the gaps at the end.
// Columns of tiles come in groups whose activations fill half of a Hopper GPU's L2, 25 MB. Within a
// group all row tiles run before the next group starts, so that its activations stay in L2 while
// every row tile reads them.
template <int kRows, int kColumns, int kDepth>
struct Tile {
  const Arguments& a;
  int sample, row0, channel0;

  __device__ __forceinline__ explicit Tile(const Arguments& a) : a(a) {
    const int across = ceil_div(a.channels, kColumns);
    const int group_blocks = ceil_div(a.tokens, kRows) * a.group;
    const int first = blockIdx.x / group_blocks * a.group;
    const int width = min(a.group, a.batch * across - first);
    const int rest = blockIdx.x % group_blocks;
    const int column = first + rest % width;
    sample = column / across;
    channel0 = column % across * kColumns;
    row0 = (ceil_div(a.tokens, kRows) - 1 - rest / width) * kRows;
  }

  __device__ int steps() const { return ceil_div(min(row0 + kRows, a.tokens), kDepth); }
  // The tiles of W and of x.
  __device__ Factor left(int step) const {
    return {{a.weight, a.tokens, a.columns}, row0, step * kDepth, 0};
  }
  __device__ Factor right(int step) const {
    const size_t place = static_cast<size_t>(sample) * a.tokens * a.channels;
    return {{a.x + place, a.tokens, a.channels}, step * kDepth, channel0, sample};
  }

  __device__ size_t index(int token, int channel) const {
    return (static_cast<size_t>(sample) * a.tokens + token) * a.channels + channel;
  }
  __device__ bool inside(int token, int channel) const {
    return token < a.tokens && channel < a.channels;
  }
  // Stores an element; two neighbouring channels. (Channels are even: both are inside or neither.)
  __device__ void store(int row, int column, float sum) const {
    const int token = row0 + row, channel = channel0 + column;
    if (inside(token, channel)) a.y[index(token, channel)] = __float2bfloat16_rn(sum);
  }
  __device__ void store_pair(int row, int column, float first, float second) const {
    const int token = row0 + row, channel = channel0 + column;
    if (inside(token, channel))
      *reinterpret_cast<uint32_t*>(a.y + index(token, channel)) = pack_pair(first, second);
  }
};

// ======================================================================================= version 1
// One thread for each output element. Neighbouring threads take neighbouring channels, so their
// loads of x are next to each other in memory and W's element is one word for the whole warp. Half
// the work of the dense product is skipped from the start; what is slow is that every product
// fetches both of its factors.

__global__ void naive_kernel(const Arguments a) {
  const int channel = blockIdx.x * blockDim.x + threadIdx.x;
  const int token = blockIdx.y * blockDim.y + threadIdx.y;
  if (channel >= a.channels || token >= a.tokens) return;
  const size_t sample = static_cast<size_t>(blockIdx.z) * a.tokens * a.channels;
  const bf16* weights = a.weight + static_cast<size_t>(token) * a.columns;
  const bf16* x = a.x + sample + channel;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k <= token; ++k) {
    sum += __bfloat162float(weights[k]) *
           __bfloat162float(x[static_cast<size_t>(k) * a.channels]);
  }
  a.y[sample + static_cast<size_t>(token) * a.channels + channel] = __float2bfloat16_rn(sum);
}

Configuration naive(int across, int down) {
  return {1, text(across, " channels x ", down, " tokens a block"), [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.channels, across), ceil_div(a.tokens, down), a.batch);
            return launch(naive_kernel, blocks, dim3(across, down), 0, a);
          }};
}

// ======================================================================================= version 2
// A block computes a square tile of the output. In each step it brings one tile of each factor into
// shared memory, as fp32, and every value brought in is used kTile times. Tiles above the diagonal
// are neither loaded nor multiplied. Memory traffic falls by kTile; now shared memory is the limit,
// since each multiply-add still reads two values from it.

template <int kTile>
__global__ void __launch_bounds__(kTile* kTile) shared_kernel(const Arguments a) {
  // as the factors lie; the extra word puts the rows into different banks
  __shared__ float left[kTile][kTile + 1], right[kTile][kTile + 1];
  const Tile<kTile, kTile, kTile> tile(a);
  const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
  float sum = 0.0f;
  for (int step = 0; step < tile.steps(); ++step) {
    const float l = tile.left(step).element(row, column);
    const float r = tile.right(step).element(row, column);
    __syncthreads();  // all threads have read the previous step's tiles
    left[row][column] = l;
    right[row][column] = r;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kTile; ++k) sum += left[row][k] * right[k][column];
  }
  tile.store(row, column, sum);
}

template <int kTile>
Configuration shared_tiles() {
  return configuration<kTile, kTile>(
      2, text("tile ", kTile, "x", kTile, ", a thread an element"), shared_kernel<kTile>,
      kTile * kTile, 0);
}

// ======================================================================================= version 3
// Each thread computes 8 x 8 elements and keeps them in registers: 16 values from shared memory now
// feed 64 multiply-adds instead of 2 feeding 1. Loads from global memory bring 8 bf16 (16 bytes) an
// instruction. Both tiles are stored with k as their row, so that a thread's 8 rows and 8 columns
// are two 16-byte reads each; W's is transposed on its way. The limit is now the fp32 units.

// tile[i][j] = factor's element (i, j), by all kThreads threads of the block, in fp32 or as it is.
// Rows of a tile are padded by 16 bytes, which keeps its columns out of each other's banks.
template <int kThreads, int kDown, int kPitch, typename Value>
__device__ __forceinline__ void load_tile(Value (&tile)[kDown][kPitch], const Factor& factor) {
  constexpr int kVectors = (kPitch - 16 / static_cast<int>(sizeof(Value))) / 8;  // in a row
#pragma unroll
  for (int vector = threadIdx.x; vector < kDown * kVectors; vector += kThreads) {
    const int i = vector / kVectors, j = vector % kVectors * 8;
    const uint4 packed = factor.vector(i, j);
    if constexpr (sizeof(Value) == 2) {
      *reinterpret_cast<uint4*>(&tile[i][j]) = packed;
    } else {
      float values[8];
      unpack(values, packed);
      float4* target = reinterpret_cast<float4*>(&tile[i][j]);
      target[0] = make_float4(values[0], values[1], values[2], values[3]);
      target[1] = make_float4(values[4], values[5], values[6], values[7]);
    }
  }
}

// tile[j][i] = factor's element (i, j).
template <int kThreads, int kDepth, int kPitch>
__device__ __forceinline__ void load_transposed(float (&tile)[kDepth][kPitch],
                                                const Factor& factor) {
#pragma unroll
  for (int vector = threadIdx.x; vector < (kPitch - 4) * kDepth / 8; vector += kThreads) {
    const int i = vector / (kDepth / 8), j = vector % (kDepth / 8) * 8;
    float values[8];
    unpack(values, factor.vector(i, j));
#pragma unroll
    for (int n = 0; n < 8; ++n) tile[j + n][i] = values[n];
  }
}

// The 8 rows and columns of a thread's elements in a tile of kRows x kColumns: 4 next to each
// other, and 4 half a tile further on.
template <int kRows, int kColumns>
__device__ __forceinline__ int own_row(int r) {
  return r / 4 * (kRows / 2) + threadIdx.x / (kColumns / 8) * 4 + r % 4;
}
template <int kColumns>
__device__ __forceinline__ int own_column(int c) {
  return c / 4 * (kColumns / 2) + threadIdx.x % (kColumns / 8) * 4 + c % 4;
}

template <int kRows, int kColumns>
__global__ void __launch_bounds__(kRows* kColumns / 64) register_kernel(const Arguments a) {
  constexpr int kDepth = 16, kThreads = kRows * kColumns / 64;
  __shared__ __align__(16) float left[kDepth][kRows + 4];      // [k][row]
  __shared__ __align__(16) float right[kDepth][kColumns + 4];  // [k][column]
  const Tile<kRows, kColumns, kDepth> tile(a);
  float sum[8][8] = {};
  for (int step = 0; step < tile.steps(); ++step) {
    __syncthreads();
    load_transposed<kThreads>(left, tile.left(step));
    load_tile<kThreads>(right, tile.right(step));
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      float down[8], across[8];
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        *reinterpret_cast<float4*>(&down[half]) =
            *reinterpret_cast<const float4*>(&left[k][own_row<kRows, kColumns>(half)]);
        *reinterpret_cast<float4*>(&across[half]) =
            *reinterpret_cast<const float4*>(&right[k][own_column<kColumns>(half)]);
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[r][c] += down[r] * across[c];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      tile.store_pair(own_row<kRows, kColumns>(r), own_column<kColumns>(c), sum[r][c],
                      sum[r][c + 1]);
    }
  }
}

template <int kRows, int kColumns>
Configuration register_tiles() {
  constexpr int kThreads = kRows * kColumns / 64;
  return configuration<kRows, kColumns>(
      3, text("tile ", kRows, "x", kColumns, ", ", kThreads, " threads"),
      register_kernel<kRows, kColumns>, kThreads, 0);
}

// ======================================================================================= version 4
// Tensor cores: one mma instruction of a warp multiplies 16 x 16 by 16 x 8, 2048 multiply-adds,
// from bf16 in registers with sums in fp32. ldmatrix brings its operands from shared memory in the
// layout it wants, transposing where that is needed. So tiles stay as they lie, and bf16: half the
// bytes of before. Rows are padded by 16 bytes, so that the 8 rows that ldmatrix reads at once lie
// in different banks. Loading and multiplying still take turns.

// Warps share a tile in parts of kWarpRows x kWarpColumns.
template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
struct WarpTile {
  static constexpr int kWarps = kRows * kColumns / (kWarpRows * kWarpColumns);
  static constexpr int kThreads = 32 * kWarps;
  int row, column;
  float sum[kWarpRows / 16][kWarpColumns / 8][4] = {};

  __device__ __forceinline__ WarpTile() {
    const int warp = threadIdx.x / 32;
    row = warp / (kColumns / kWarpColumns) * kWarpRows;
    column = warp % (kColumns / kWarpColumns) * kWarpColumns;
  }

  // sum += left right. left_at(i, j) and right_at(i, j) are the places of a tile's elements.
  template <int kDepth, typename Left, typename Right>
  __device__ __forceinline__ void multiply(Left left_at, Right right_at) {
    const int lane = threadIdx.x % 32;
    const int low = lane % 16, high = lane / 16 * 8;  // where the lane's row of a matrix lies
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t left[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        load_matrices(left[r], left_at(row + 16 * r + low, k + high));
      }
#pragma unroll
      for (int c = 0; c < kWarpColumns / 16; ++c) {
        uint32_t right[4];  // two operands of 16 x 8
        load_matrices_transposed(right, right_at(k + low, column + 16 * c + high));
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          multiply_16x8x16(sum[r][2 * c], left[r], right[0], right[1]);
          multiply_16x8x16(sum[r][2 * c + 1], left[r], right[2], right[3]);
        }
      }
    }
  }

  template <typename Tile>
  __device__ __forceinline__ void store(const Tile& tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
      for (int c = 0; c < kWarpColumns / 8; ++c) {
        const int i = row + 16 * r + lane / 4, j = column + 8 * c + lane % 4 * 2;
        tile.store_pair(i, j, sum[r][c][0], sum[r][c][1]);
        tile.store_pair(i + 8, j, sum[r][c][2], sum[r][c][3]);
      }
    }
  }
};

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
__global__ void __launch_bounds__(kRows* kColumns / (kWarpRows * kWarpColumns) * 32, 1)
    mma_kernel(const Arguments a) {
  constexpr int kDepth = 32;
  __shared__ __align__(16) bf16 left[kRows][kDepth + 8], right[kDepth][kColumns + 8];
  const Tile<kRows, kColumns, kDepth> tile(a);
  WarpTile<kRows, kColumns, kWarpRows, kWarpColumns> warp;
  for (int step = 0; step < tile.steps(); ++step) {
    __syncthreads();
    load_tile<warp.kThreads>(left, tile.left(step));
    load_tile<warp.kThreads>(right, tile.right(step));
    __syncthreads();
    warp.template multiply<kDepth>([&](int i, int j) { return &left[i][j]; },
                                   [&](int i, int j) { return &right[i][j]; });
  }
  warp.store(tile);
}

template <int kRows, int kColumns, int kWarpRows, int kWarpColumns>
Configuration tensor_cores() {
  constexpr int kWarps = WarpTile<kRows, kColumns, kWarpRows, kWarpColumns>::kWarps;
  return configuration<kRows, kColumns>(
      4, text("tile ", kRows, "x", kColumns, "x32, ", kWarps, " warps"),
      mma_kernel<kRows, kColumns, kWarpRows, kWarpColumns>, 32 * kWarps, 0);
}

// ======================================================================================= version 5
// cp.async copies from global to shared memory in the background. With kStages buffers the copies
// of the next kStages - 1 steps are under way while the tensor cores work on this one, and one
// __syncthreads a step is enough. An XOR swizzle takes the place of the padding. Warps whose rows
// lie above the diagonal of a step skip it.

// The place of element (row, column) in a tile whose rows hold kWidth elements, without padding.
// Shared memory has 32 banks of 4 bytes, so 8 pieces of 16 bytes can be read at once if they lie in
// different banks. ldmatrix reads one piece from each of 8 consecutive rows, which share banks in a
// plain layout. XOR with the row spreads them over all banks.
template <int kWidth>
__device__ __forceinline__ int swizzled(int row, int column) {
  static_assert(kWidth == 32 || kWidth % 64 == 0, "rows of 64 bytes, or of a multiple of 128");
  const int piece = column / 8;  // 8 bf16 = 16 bytes
  const int moved = kWidth == 32 ? piece ^ ((row / 2) % 4) : piece ^ (row % 8);
  return row * kWidth + moved * 8 + column % 8;
}

// Starts to copy a factor's tile, kDown x kAcross, to a swizzled one.
template <int kThreads, int kDown, int kAcross>
__device__ __forceinline__ void copy_tile(bf16* tile, const Factor& factor) {
#pragma unroll
  for (int vector = threadIdx.x; vector < kDown * kAcross / 8; vector += kThreads) {
    const int i = vector / (kAcross / 8), j = vector % (kAcross / 8) * 8;
    const bool inside = factor.matrix.inside(factor.row + i, factor.column + j);
    const bf16* source = factor.matrix.at(factor.row + i, factor.column + j);
    copy_async(&tile[swizzled<kAcross>(i, j)], inside ? source : factor.matrix.values, inside);
  }
}

template <int kRows, int kColumns, int kDepth, int kWarpRows, int kWarpColumns, int kStages>
__global__ void __launch_bounds__(kRows* kColumns / (kWarpRows * kWarpColumns) * 32, 1)
    pipelined_kernel(const Arguments a) {
  bf16* const left = reinterpret_cast<bf16*>(dynamic_shared());  // stages of the left tile
  bf16* const right = left + kStages * kRows * kDepth;           // and of the right one
  const Tile<kRows, kColumns, kDepth> tile(a);
  const int steps = tile.steps();
  WarpTile<kRows, kColumns, kWarpRows, kWarpColumns> warp;
  const auto load = [&](int step) {
    const int stage = step % kStages;
    copy_tile<warp.kThreads, kRows, kDepth>(left + stage * kRows * kDepth, tile.left(step));
    copy_tile<warp.kThreads, kDepth, kColumns>(right + stage * kColumns * kDepth,
                                               tile.right(step));
  };

  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    close_copy_group();  // also if empty, so that each step has exactly one group
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();  // this thread's copies of `step` have arrived
    // all threads' copies have arrived, and all have read step - 1, whose buffer is loaded next
    __syncthreads();
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    close_copy_group();
    if (step * kDepth > tile.row0 + warp.row + kWarpRows - 1) continue;  // W is zero there
    const bf16* l = left + step % kStages * (kRows * kDepth);
    const bf16* r = right + step % kStages * (kColumns * kDepth);
    warp.template multiply<kDepth>([&](int i, int j) { return &l[swizzled<kDepth>(i, j)]; },
                                   [&](int i, int j) { return &r[swizzled<kColumns>(i, j)]; });
  }
  warp.store(tile);
}

template <int kRows, int kColumns, int kDepth, int kWarpRows, int kWarpColumns, int kStages>
Configuration pipelined() {
  constexpr int kWarps = WarpTile<kRows, kColumns, kWarpRows, kWarpColumns>::kWarps;
  return configuration<kRows, kColumns>(
      5,
      text("tile ", kRows, "x", kColumns, "x", kDepth, ", ", kStages, " stages, ", kWarps,
           " warps"),
      pipelined_kernel<kRows, kColumns, kDepth, kWarpRows, kWarpColumns, kStages>,
      32 * kWarps, kStages * (kRows + kColumns) * kDepth * static_cast<int>(sizeof(bf16)));
}

// ======================================================================================= version 6
// Hopper. wgmma multiplies 64 x 16 by 16 x 256 for four warps at once and reads both operands from
// shared memory itself, so the operands no longer pass through registers. TMA copies boxes of 64 x
// 64 with one instruction of one thread: address arithmetic, bounds and swizzle are done by
// hardware. So the block divides the labour: one producer warp keeps the stages full, the consumer
// warpgroups (64 rows each) only multiply, and two barriers a stage, full and empty, are all they
// share.

// The ring of stages. A stage holds the left factor's tile as kConsumers boxes, then the right
// one's as kBoxesAcross boxes; all boxes as the factors lie.
template <int kConsumers, int kBoxesAcross, int kStages>
struct Stages {
  static constexpr int kStageBytes = (kConsumers + kBoxesAcross) * kBoxBytes;
  static constexpr int kBytes =
      1024 + kStages * (kStageBytes + 2 * static_cast<int>(sizeof(Barrier)));
  unsigned char* memory;  // boxes must start at multiples of 1024 bytes
  Barrier *full, *empty;

  // By all threads of the block.
  __device__ __forceinline__ Stages() {
    memory = dynamic_shared() + (1024 - shared_address(dynamic_shared()) % 1024) % 1024;
    full = reinterpret_cast<Barrier*>(memory + kStages * kStageBytes);
    empty = full + kStages;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        barrier_init(&full[stage], 1);            // the producer
        barrier_init(&empty[stage], kConsumers);  // one thread of each consumer
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void release(int step) const {
    if (threadIdx.x % 128 == 0) barrier_arrive(&empty[step % kStages]);
  }
};

// Starts to copy a factor's tile: kCount boxes side by side, or one below the other.
template <int kCount, bool kSideBySide>
__device__ __forceinline__ void load_boxes(unsigned char* memory, const CUtensorMap& map,
                                           Barrier* barrier, const Factor& factor) {
  for (int box = 0; box < kCount; ++box) {
    const int offset = box * kBox;
    load_box(memory + box * kBoxBytes, &map, barrier, factor.column + kSideBySide * offset,
             factor.row + !kSideBySide * offset, factor.sample);
  }
}

// Brings a warpgroup's sums, 64 rows of the tile from `consumer` * 64 on, to boxes of 64 x 64 in
// shared memory, swizzled as TMA expects, and from there to y; TMA drops what lies outside.
template <int kColumns, typename Tile>
__device__ __forceinline__ void store_boxes(const Tile& tile, const float (&sum)[kColumns / 2],
                                            int consumer, unsigned char* boxes,
                                            const CUtensorMap& map) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
#pragma unroll
  for (int pair = 0; pair < kColumns / 16; ++pair) {  // 16 channels
    uint32_t values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)  // rows +0 and +8 of the first 8 channels, then of the second 8
      values[i] = pack_pair(sum[8 * pair + 2 * i], sum[8 * pair + 2 * i + 1]);
    const int box_row = warp_row + lane % 16, piece = pair % 4 * 2 + lane / 16;
    store_matrices(boxes + pair / 4 * kBoxBytes + box_row * 128 + (piece ^ box_row % 8) * 16,
                   values);
  }
  publish_to_copy_engine();
  named_barrier(2 + consumer, 128);
  if (threadIdx.x % 128 == 0) {
    for (int box = 0; box < kColumns / kBox; ++box) {
      store_box(&map, boxes + box * kBoxBytes, tile.channel0 + box * kBox,
                tile.row0 + consumer * kBox, tile.sample);
    }
    finish_stores();
  }
}

template <int kConsumers, int kColumns, int kStages, int kBlocks>
__global__ void __launch_bounds__(128 * kConsumers + 32, kBlocks)
    hopper_kernel(const __grid_constant__ CUtensorMap left_map,
                  const __grid_constant__ CUtensorMap right_map,
                  const __grid_constant__ CUtensorMap output_map, const Arguments a) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBoxesAcross = kColumns / kBox;
  using Ring = Stages<kConsumers, kBoxesAcross, kStages>;
  static_assert(kConsumers * kBoxesAcross * kBoxBytes <= kStages * Ring::kStageBytes,
                "the output tile takes the stages' place");
  static_assert(kConsumers <= kStages, "a stage that a consumer leaves out is not loaded anew");
  const Tile<kBox * kConsumers, kColumns, kBox> tile(a);
  const int steps = tile.steps();
  const Ring ring;

  if (threadIdx.x >= 128 * kConsumers) {  // the producer
    if (threadIdx.x % 32 != 0) return;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kStages;
      unsigned char* const memory = ring.memory + stage * Ring::kStageBytes;
      barrier_wait(&ring.empty[stage], (step / kStages + 1) % 2);
      barrier_arrive_expecting(&ring.full[stage], Ring::kStageBytes);
      load_boxes<kConsumers, false>(memory, left_map, &ring.full[stage], tile.left(step));
      load_boxes<kBoxesAcross, true>(memory + kConsumers * kBoxBytes, right_map,
                                     &ring.full[stage], tile.right(step));
    }
    return;
  }

  // A consumer. Its steps end at the diagonal of its own 64 rows. (Rows beyond the last token have
  // no step of their own: the last step then serves them, with zeros.)
  const int consumer = threadIdx.x / 128;
  const int own_steps = min(steps, tile.row0 / kBox + consumer + 1);
  // the first wgmma overwrites it, so it needs no zeros, which would delay the wgmma
  float sum[kColumns / 2];
  for (int step = 0; step < own_steps; ++step) {
    const int stage = step % kStages;
    const unsigned char* boxes = ring.memory + stage * Ring::kStageBytes;
    barrier_wait(&ring.full[stage], step / kStages % 2);
    const uint64_t left = operand(boxes + consumer * kBoxBytes, kBoxBytes);
    const uint64_t right = operand(boxes + kConsumers * kBoxBytes, kBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBox / 16; ++k) {
      wgmma(sum, left + k * kNextK, right + k * kNextKTransposed, step > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();  // the previous step has been read: its stage is free
    if (step > 0) ring.release(step - 1);
  }
  wgmma_wait<0>();
  // The output tile takes the stages' place, once all consumers are here: then all is read. The
  // last one has waited for every copy.
  named_barrier(1, 128 * kConsumers);
  store_boxes<kColumns>(tile, sum, consumer,
                        ring.memory + consumer * kBoxesAcross * kBoxBytes, output_map);
#else
  __trap();  // not built for sm_90a
#endif
}

template <int kConsumers, int kColumns, int kStages, int kBlocks>
Configuration hopper() {
  constexpr int kRows = kBox * kConsumers;
  return configuration<kRows, kColumns>(
      6,
      text("tile ", kRows, "x", kColumns, "x64, ", kStages, " stages, ", kBlocks, " blocks an SM"),
      hopper_kernel<kConsumers, kColumns, kStages, kBlocks>, 128 * kConsumers + 32,
      Stages<kConsumers, kColumns / kBox, kStages>::kBytes,
      [](const Arguments& a) { return tensor_map(a.weight, 1, a.tokens, a.columns); },
      [](const Arguments& a) { return tensor_map(a.x, a.batch, a.tokens, a.channels); },
      [](const Arguments& a) { return tensor_map(a.y, a.batch, a.tokens, a.channels); });
}

// -------------------------------------------------------------------------- the whole ladder

// What kernel_ladder.py calls. A configuration is known by its place in the list.
static const std::vector<Configuration>& configurations() {
  static const std::vector<Configuration> all = {
      naive(32, 8),
      naive(64, 4),
      naive(256, 1),
      shared_tiles<16>(),
      shared_tiles<32>(),
      register_tiles<64, 64>(),
      register_tiles<64, 128>(),
      register_tiles<128, 128>(),
      tensor_cores<64, 64, 32, 32>(),
      tensor_cores<128, 128, 64, 32>(),
      tensor_cores<128, 128, 64, 64>(),
      pipelined<128, 128, 32, 64, 32, 3>(),
      pipelined<128, 128, 32, 64, 32, 4>(),
      pipelined<128, 128, 64, 64, 32, 3>(),
      pipelined<128, 256, 32, 64, 64, 4>(),
      hopper<2, 128, 4, 1>(),
      hopper<2, 128, 3, 2>(),
      hopper<2, 256, 4, 1>(),
      hopper<4, 128, 4, 1>(),
  };
  return all;
}
extern "C" {
int configuration_count() { return static_cast<int>(configurations().size()); }
int configuration_version(int index) { return configurations()[index].version; }
const char* configuration_name(int index) { return configurations()[index].name.c_str(); }
// Returns a cudaError_t.
int launch_configuration(int index, const Arguments* a) {
  try {
    return configurations()[index].launch(*a);
  } catch (cudaError_t status) {
    return status;
  }
}
}
