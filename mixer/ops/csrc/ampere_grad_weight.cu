// dweight[h,t,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c + shift] for j <= i < tokens, exact zeros
// elsewhere.
//
// Two kernels, as in portable_grad_weight.cu: lower 128 x 128 tiles, the sum over (batch, channels) cut into `splits`
// ranges whose partial tiles go to the workspace in fp32; then their sum in a fixed order (grad_weight_finish.cuh).
#include "ampere_tile.cuh"
#include "grad_weight_finish.cuh"

namespace ampere {
namespace {

using namespace grad_weight_finish;

constexpr int kTileSize = kTile * kTile;
constexpr int kMaxSplits = 128;

// Batch and channels of a head are summed as one dimension, (sample, channel), cut into slices. A vector of 16 bytes
// never crosses from one sample into the next.
__host__ __device__ __forceinline__ int64_t slice_count(const TriangularConvParams& params) {
  const int slice = params.dtype == MIXER_FLOAT32 ? Sizes<float>::kSliceDepth : Sizes<__half>::kSliceDepth;
  return ceil_div(static_cast<int64_t>(params.batch) * (params.channels / params.heads), slice);
}

// The number of ranges with the least time, in units of one slice's product (about half a microsecond). Blocks run in
// waves as long as one range each, plus a start and an end; then the finishing kernel reads the partial tiles of all
// ranges.
__host__ int choose_splits(const TriangularConvParams& params) {
  constexpr double kWaveCost = 24;          // filling the pipeline, storing the tile
  constexpr double kPartialTileCost = 0.1;  // a tile's 64 KB written and read, at a GPU's full bandwidth
  constexpr double kRangeCost = 0.3;        // the wait for one more value in each thread's sum
  const int64_t tiles = lower_tiles(params.tokens, kTile) * params.heads * params.taps;
  const int64_t places = static_cast<int64_t>(params.processors > 0 ? params.processors : 1) * kBlocksResident;
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

// Fills stages with the slices of dy and of x, one call after the other.
template <typename Element>
struct GradWeightLoader {
  static constexpr int kVector = Sizes<Element>::kVector;
  using Layout = KMajor<Element>;

  const TriangularConvParams& params;
  const Element* dy;  // of this thread's sample and this head
  const Element* x;
  int row0, column0, shift, width;
  int samples_left, channel;  // from this thread's sample on; its channel in the head

  __device__ __forceinline__ GradWeightLoader(const TriangularConvParams& params, int head, int row0, int column0,
                                              int shift, int64_t first_slice)
      : params(params), row0(row0), column0(column0), shift(shift), width(params.channels / params.heads) {
    const int64_t start = first_slice * Sizes<Element>::kSliceDepth + vector_across<Layout>() * kVector;
    const int64_t sample = start / width;
    channel = static_cast<int>(start - sample * width);
    samples_left = params.batch - static_cast<int>(sample);
    const int64_t first_channel = static_cast<int64_t>(head) * width;
    dy = static_cast<const Element*>(params.dy) + sample * params.dy_batch_stride + first_channel;
    x = static_cast<const Element*>(params.x) + sample * params.x_batch_stride + first_channel;
  }

  __device__ __forceinline__ void operator()(uint32_t stage) {
    load_rows(stage, dy, params.dy_token_stride, row0, 0);
    load_rows(stage + kSliceBytes, x, params.x_token_stride, column0, shift);
    for (channel += Sizes<Element>::kSliceDepth; channel >= width; channel -= width) {
      --samples_left;
      dy += params.dy_batch_stride;
      x += params.x_batch_stride;
    }
  }

  // slice(row, k) = values[first_row + row, channel of k + shift]; zero beyond `tokens`, outside the head and after the
  // batch.
  __device__ __forceinline__ void load_rows(uint32_t slice, const Element* values, int64_t token_stride, int first_row,
                                            int shift) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const int down = vector_down<Layout>(i);
      const bool inside = first_row + down < params.tokens && samples_left > 0;
      const Element* row = values + (first_row + down) * token_stride;
      const uint32_t target = slice + Layout::offset(down, vector_across<Layout>());
      if (shift == 0) {
        copy_async(target, row + channel, inside);
      } else {
        store_shared(target, inside ? load_shifted(row, channel, shift, width) : make_uint4(0, 0, 0, 0));
      }
    }
  }
};

// Blocks, fastest first: lower tiles, taps, heads, splits. Blocks that run at once thus read the same range.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, int splits) {
#if __CUDA_ARCH__ >= 800
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  const int tiles = static_cast<int>(lower_tiles(params.tokens, kTile));
  int block = blockIdx.x;
  const LowerTile lower = locate_lower_tile(block % tiles);
  block /= tiles;
  const int tap = block % params.taps;
  block /= params.taps;
  const int head = block % params.heads;
  const int split = block / params.heads;

  const int64_t count = slice_count(params);
  const int64_t first = count * split / splits;
  const int64_t last = count * (split + 1) / splits;
  GradWeightLoader<Element> loader(params, head, lower.row * kTile, lower.column * kTile, tap_shift(tap, params.taps),
                                   first);
  // Columns go to the warps as rows do, 16 by 16 in turn. On the diagonal, groups right of their row's number are then
  // above the diagonal in every warp: the same 6 of 16 groups are skipped by all.
  const int first_column = warp_column() * 16;
  constexpr int kColumnStep = 32;
  const bool on_diagonal = lower.row == lower.column;

  Accumulator sum;
  const auto multiply = [&](int, const Fragments& fragments) {
#pragma unroll
    for (int row_group = 0; row_group < kWarpGroups; ++row_group) {
#pragma unroll
      for (int column_group = 0; column_group <= row_group; ++column_group) {
        multiply_groups<Element>(sum, fragments, row_group, column_group);
      }
    }
    if (on_diagonal) return;
#pragma unroll
    for (int row_group = 0; row_group < kWarpGroups; ++row_group) {
#pragma unroll
      for (int column_group = row_group + 1; column_group < kWarpGroups; ++column_group) {
        multiply_groups<Element>(sum, fragments, row_group, column_group);
      }
    }
  };
  run_pipeline<Element, KMajor<Element>, KMajor<Element>, kColumnStep>(
      shared_address(memory), static_cast<int>(last - first), first_column, loader, multiply);
  wait_copies<0>();

  float* partial = static_cast<float*>(params.workspace) + static_cast<int64_t>(blockIdx.x) * kTileSize;
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
    for (int c = 0; c < 2 * kWarpGroups; ++c) {
      const float(&value)[4] = sum.value[group][c];
      const int row = group_row(group) + lane() / 4;
      const int column = first_column + c / 2 * kColumnStep + c % 2 * 8 + lane() % 4 * 2;
      *reinterpret_cast<float2*>(&partial[row * kTile + column]) = make_float2(value[0], value[1]);
      *reinterpret_cast<float2*>(&partial[(row + 8) * kTile + column]) = make_float2(value[2], value[3]);
    }
  }
#endif
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  if (is_empty(params)) return 0;
  return choose_splits(params) * lower_tiles(params.tokens, kTile) * params.heads * params.taps * kTileSize *
         static_cast<int64_t>(sizeof(float));
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  if (is_empty(params)) return finish<kTile>(params, 0, 0);
  const int splits = choose_splits(params);
  const int64_t blocks = lower_tiles(params.tokens, kTile) * params.heads * params.taps * splits;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  const cudaError_t status = dispatch_dtype(params.dtype, [&](auto element) {
    partial_kernel<decltype(element)><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params, splits);
    return cudaGetLastError();
  });
  return status == cudaSuccess ? finish<kTile>(params, params.tokens, splits) : status;
}

}  // namespace ampere
