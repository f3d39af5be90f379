// The gradient with respect to the weight: dW = lower triangle of the sum over the batch of dy x^T,
// exact zeros above the diagonal.
//
// The output is small and the sum is long, batch x channels products an element. So from version 2
// on the sum is split: blockIdx.y is the range of (sample, channels) that a block adds up, its tile
// of partial sums goes to a workspace, and a second kernel adds the partial tiles in a fixed order.
// No atomics: two runs agree bit for bit.
#include "versions.cuh"

// Scratch memory on the device. It is kept and grown between calls; its contents are lost.
static float* scratch(size_t bytes) {
  static void* memory = nullptr;
  static size_t size = 0;
  if (bytes > size) {
    cudaFree(memory);
    size = bytes;
    if (const cudaError_t status = cudaMalloc(&memory, bytes); status != cudaSuccess) {
      memory = nullptr, size = 0;
      throw status;
    }
  }
  return static_cast<float*>(memory);
}

// Adds up the partial tiles.
template <int kRows, int kColumns>
__global__ void finish_kernel(const Arguments a, int splits);

// Both factors lie with the channels as their row: nothing is transposed. Only tiles that touch the
// lower triangle have a block; they are counted row tile by row tile.
template <int kRows, int kColumns, int kDepth>
struct GradWeight {
  static constexpr bool kLeftByK = false, kRightByK = false;
  const Arguments& a;
  int row0, column0;
  int per_sample, first, last;  // slices of kDepth channels: of a sample, and this block's range

  __device__ __forceinline__ explicit GradWeight(const Arguments& a) : a(a) {
    const int tile = blockIdx.x;
    int r = 0;
    while (before(r + 1) <= tile) ++r;
    row0 = r * kRows;
    column0 = (tile - before(r)) * kColumns;
    per_sample = ceil_div(a.channels, kDepth);
    const int64_t slices = static_cast<int64_t>(a.batch) * per_sample;
    first = static_cast<int>(slices * blockIdx.y / gridDim.y);
    last = static_cast<int>(slices * (blockIdx.y + 1) / gridDim.y);
  }

  // Tiles above row tile r: the index of its first one.
  __host__ __device__ static int before(int r) {
    if (kRows >= kColumns) return kRows / kColumns * (r * (r + 1) / 2);
    constexpr int kRatio = kRows < kColumns ? kColumns / kRows : 1;  // row tiles as wide as a tile
    const int full = r / kRatio;
    return kRatio * (full * (full + 1) / 2) + r % kRatio * (full + 1);
  }
  __host__ __device__ static int count(int tokens) { return before(ceil_div(tokens, kRows)); }

  __device__ int steps() const { return last - first; }
  __device__ Factor left(int step) const { return factor(a.dy, row0, first + step); }
  __device__ Factor right(int step) const { return factor(a.x, column0, first + step); }
  __device__ Factor factor(const bf16* values, int token, int slice) const {
    const int sample = slice / per_sample;
    return {sample_of(values, a, sample), token, slice % per_sample * kDepth, sample};
  }
  __device__ bool skips(int, int, int) const { return false; }
  __device__ Span span(int) const { return {0, steps()}; }

  // Workspace: (splits, tiles, kRows, kColumns).
  __device__ float* partial(int row, int column) const {
    const size_t tile = static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    return a.workspace + (tile * kRows + row) * kColumns + column;
  }
  __device__ void store(int row, int column, float sum) const { *partial(row, column) = sum; }
  __device__ void store_pair(int row, int column, float first, float second) const {
    *reinterpret_cast<float2*>(partial(row, column)) = make_float2(first, second);
  }
  __device__ void store_warpgroup(const float (&sum)[kColumns / 2], int consumer, unsigned char*,
                                  const CUtensorMap&) const {
    const int row = consumer * kBox + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int block = 0; block < kColumns / 8; ++block) {
      const int column = 8 * block + threadIdx.x % 4 * 2;
      store_pair(row, column, sum[4 * block], sum[4 * block + 1]);
      store_pair(row + 8, column, sum[4 * block + 2], sum[4 * block + 3]);
    }
  }

  // Splits the sum so often that tiles x splits come close to the blocks that run at once but do
  // not exceed them (one block more would mean a second round for its sake), with at least 4 slices
  // a block.
  template <typename Kernel, typename Start>
  static cudaError_t run(Arguments a, Kernel kernel, int threads, int shared_bytes, Start start) {
    if (shared_bytes > 48 * 1024)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    int processors = 0, each = 0;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes);
    const int tiles = count(a.tokens);
    const int64_t slices = static_cast<int64_t>(a.batch) * ceil_div(a.channels, kDepth);
    const int64_t at_once = static_cast<int64_t>(each) * processors;
    const int splits = std::max<int64_t>(1, std::min({slices / 4, int64_t{1024}, at_once / tiles}));
    a.workspace = scratch(sizeof(float) * tiles * splits * kRows * kColumns);
    const cudaError_t status = start(a, dim3(tiles, splits));
    if (status != cudaSuccess) return status;
    return launch(finish_kernel<kRows, kColumns>, dim3(ceil_div(a.tokens, 256), a.tokens),
                  dim3(256), 0, a, splits);
  }

  static CUtensorMap left_map(const Arguments& a) {
    return tensor_map(a.dy, a.batch, a.tokens, a.channels);
  }
  static CUtensorMap right_map(const Arguments& a) {
    return tensor_map(a.x, a.batch, a.tokens, a.channels);
  }
  static CUtensorMap output_map(const Arguments& a) { return right_map(a); }  // nobody's
};

// dW from the partial tiles: a thread adds one element's partial sums in order, or writes a zero
// above the diagonal.
template <int kRows, int kColumns>
__global__ void finish_kernel(const Arguments a, int splits) {
  using Tile = GradWeight<kRows, kColumns, 8>;
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = blockIdx.y;
  if (column >= a.tokens) return;
  float sum = 0.0f;
  if (column <= row) {
    const size_t tile = Tile::before(row / kRows) + column / kColumns;
    const float* partial =
        a.workspace + (tile * kRows + row % kRows) * kColumns + column % kColumns;
    const size_t stride = static_cast<size_t>(Tile::count(a.tokens)) * kRows * kColumns;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) sum += partial[split * stride];
  }
  static_cast<float*>(a.output)[static_cast<size_t>(row) * a.tokens + column] = sum;
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
      const Factor left = {sample_of(a.dy, a, sample), row, 0, sample};
      const Factor right = {sample_of(a.x, a, sample), column, 0, sample};
#pragma unroll 4
      for (int channel = 0; channel < a.channels; channel += 8) {
        float dy[8], x[8];
        unpack(dy, left.vector(0, channel));
        unpack(x, right.vector(0, channel));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += dy[i] * x[i];
      }
    }
  }
  static_cast<float*>(a.output)[static_cast<size_t>(row) * a.tokens + column] = sum;
}

Configuration naive(int across, int down) {
  return {1, text(across, " columns x ", down, " rows a block"), [=](const Arguments& a) {
            const dim3 blocks(ceil_div(a.tokens, across), ceil_div(a.tokens, down));
            return launch(naive_kernel, blocks, dim3(across, down), 0, a);
          }};
}

std::vector<Configuration> make_configurations() {
  return ladder<GradWeight>({naive(32, 8), naive(16, 16), naive(8, 8)});
}
