// dweight[h,t,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c + shift]
//   for j <= i < tokens, exact zeros elsewhere.
//
// Two kernels. The first computes the 64 x 64 tiles of the lower triangle. The long sum over
// (batch, channels) is cut into `splits` equal ranges, so that even a short context fills the GPU;
// each range writes its partial tile to the workspace in fp32. The second kernel
// (grad_weight_finish.cuh) adds the partial tiles in a fixed order, casts, and writes the zeros.
#include "grad_weight_finish.cuh"
#include "portable_tile.cuh"

namespace portable {
namespace {

using namespace grad_weight_finish;

constexpr int kBlocksPerProcessor = 8;   // target number of blocks per multiprocessor
constexpr int kMinSlicesPerSplit = 16;   // a shorter range costs more to add up than it saves
constexpr int kMaxSplits = 64;
constexpr int kTileSize = kTile * kTile;

// Slices of the whole sum: the channels of each sample are cut into slices of kDepth.
__host__ __device__ __forceinline__ int64_t slice_count(const TriangularConvParams& params) {
  return params.batch * ceil_div(params.channels / params.heads, kDepth);
}

int choose_splits(const TriangularConvParams& params) {
  const int64_t blocks = lower_tiles(params.tokens, kTile) * params.heads * params.taps;
  const int64_t wanted =
      ceil_div(static_cast<int64_t>(params.processors) * kBlocksPerProcessor, blocks);
  const int64_t most =
      min(slice_count(params) / kMinSlicesPerSplit, static_cast<int64_t>(kMaxSplits));
  return static_cast<int>(max(min(wanted, most), static_cast<int64_t>(1)));
}

// slice[k][row] = values[row0 + row, channel0 + k + shift]; zero beyond `tokens` and outside the
// head. A channel beyond the head must be zero in both slices, even where the shift moves it back
// inside: a NaN there must not reach the sum.
template <typename Element>
__device__ __forceinline__ void load_rows(float (&slice)[kDepth][kPitch], const Element* values,
                                          int64_t token_stride, int row0, int tokens, int channel0,
                                          int shift, int width) {
  const int across = threadIdx.x % kDepth;
  const int channel = channel0 + across + shift;
  const bool inside = channel0 + across < width && channel >= 0 && channel < width;
#pragma unroll
  for (int down = threadIdx.x / kDepth; down < kTile; down += kThreads / kDepth) {
    float value = 0.0f;
    if (inside && row0 + down < tokens)
      value = to_float(values[(row0 + down) * token_stride + channel]);
    slice[across][down] = value;
  }
}

// Blocks, fastest index first: lower tiles, taps, heads, splits. All do the same amount of work.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, int splits) {
  __shared__ Slices slices;
  const int width = params.channels / params.heads;  // channels of a head
  const int tiles = static_cast<int>(lower_tiles(params.tokens, kTile));
  int block = blockIdx.x;
  const int tile = block % tiles;
  block /= tiles;
  const int tap = block % params.taps;
  block /= params.taps;
  const int head = block % params.heads;
  const int split = block / params.heads;

  const LowerTile lower = locate_lower_tile(tile);
  const int row0 = lower.row * kTile;
  const int column0 = lower.column * kTile;

  const int shift = tap_shift(tap, params.taps);
  const Element* dy = static_cast<const Element*>(params.dy) + static_cast<int64_t>(head) * width;
  const Element* x = static_cast<const Element*>(params.x) + static_cast<int64_t>(head) * width;
  const int slices_per_sample = static_cast<int>(ceil_div(width, kDepth));
  const int64_t count = slice_count(params);
  const int64_t first = count * split / splits;
  const int64_t last = count * (split + 1) / splits;

  Accumulator sum;
  for (int64_t slice = first; slice < last; ++slice) {
    const int64_t sample = slice / slices_per_sample;
    const int channel0 = static_cast<int>(slice % slices_per_sample) * kDepth;
    __syncthreads();  // all threads have read the slices of the previous step
    load_rows(slices.left, dy + sample * params.dy_batch_stride, params.dy_token_stride, row0,
              params.tokens, channel0, 0, width);
    load_rows(slices.right, x + sample * params.x_batch_stride, params.x_token_stride, column0,
              params.tokens, channel0, shift, width);
    __syncthreads();
    multiply(slices, thread_row(), thread_column(), sum, KeepAll());
    if ((slice - first + 1) * kDepth % kChunk == 0) sum.close_chunk();
  }
  sum.close_chunk();

  float* partial =
      static_cast<float*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * kTileSize;
#pragma unroll
  for (int r = 0; r < kThreadRows; ++r) {
    const float4 values =
        make_float4(sum.total[r][0], sum.total[r][1], sum.total[r][2], sum.total[r][3]);
    *reinterpret_cast<float4*>(&partial[(thread_row() + r) * kTile + thread_column()]) = values;
  }
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  if (is_empty(params)) return 0;
  return choose_splits(params) * lower_tiles(params.tokens, kTile) * params.heads * params.taps *
         kTileSize * static_cast<int64_t>(sizeof(float));
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  if (is_empty(params)) return finish<kTile>(params, 0, 0);
  const int splits = choose_splits(params);
  const int64_t blocks = lower_tiles(params.tokens, kTile) * params.heads * params.taps * splits;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  const cudaError_t status = dispatch_dtype(params.dtype, [&](auto element) {
    partial_kernel<decltype(element)>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, splits);
    return cudaGetLastError();
  });
  return status == cudaSuccess ? finish<kTile>(params, params.tokens, splits) : status;
}

}  // namespace portable
