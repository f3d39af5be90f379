// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c] and (kTransposed)
// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c]. One kernel does both: transposing only flips
// the triangle.
#include "ampere_tile.cuh"
#include "kernels.h"
#include "tensor_product.cuh"

namespace ampere {
namespace {

// ----------------------------------------------------------------------------------------- storing
//
// From registers to global memory. Bias and residual are added before the only rounding.

// How many columns of a row a lane stores at once, and how it gets them. In a block of 8 columns
// each of four lanes holds 2. For 16-bit types a lane stores 8 columns: the four lanes exchange
// their parts of 4 blocks.
template <typename Element>
struct Piece {
  using Bits = uint4;
  static constexpr int kBlocks = 4;
  static constexpr int kLaneColumns = 8;

  union Pair {
    uint32_t bits;
    Element value[2];
  };

  // Transposes the words among each four lanes: word i of lane q and word q of lane i change
  // places.
  __device__ __forceinline__ static void exchange(uint32_t (&word)[4]) {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = read_lane() & distance;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i & distance) continue;
        uint32_t &low = word[i], &high = word[i + distance];
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
        low = upper ? other : low;
        high = upper ? high : other;
      }
    }
  }

  __device__ __forceinline__ static void add(float (&value)[kBlocks][2], uint4 added) {
    uint32_t word[4] = {added.x, added.y, added.z, added.w};
    exchange(word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair pair = {word[i]};
      value[i][0] += to_float(pair.value[0]);
      value[i][1] += to_float(pair.value[1]);
    }
  }

  __device__ __forceinline__ static uint4 round(const float (&value)[kBlocks][2]) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair pair;
      pair.value[0] = from_float<Element>(value[i][0]);
      pair.value[1] = from_float<Element>(value[i][1]);
      word[i] = pair.bits;
    }
    exchange(word);
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

template <>
struct Piece<float> {
  using Bits = float2;
  static constexpr int kBlocks = 1;
  static constexpr int kLaneColumns = 2;

  __device__ __forceinline__ static void add(float (&value)[1][2], float2 added) {
    value[0][0] += added.x;
    value[0][1] += added.y;
  }

  __device__ __forceinline__ static float2 round(const float (&value)[1][2]) {
    return make_float2(value[0][0], value[0][1]);
  }
};

// Stores a warp's part of a tile.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void store_result(const Accumulator& sum,
                                             const TriangularConvParams& params, const Tile& tile) {
  using Piece = Piece<Element>;
  const int lane = read_lane();
  const int width = params.channels / params.heads;
  const int64_t column = tile.column0 + warp_column() * kWarpTile + lane % 4 * Piece::kLaneColumns;
  const int64_t first_channel = static_cast<int64_t>(tile.head) * width;
  const bool has_bias = !kTransposed && params.bias != nullptr;
  const bool has_residual = !kTransposed && params.residual != nullptr;
  Element* const output = static_cast<Element*>(kTransposed ? params.dx : params.y) + first_channel;
  const Element* const residual = static_cast<const Element*>(params.residual) + first_channel;

#pragma unroll
  for (int half_group = 0; half_group < 2 * kWarpGroups; ++half_group) {
    const int group = half_group / 2, half = half_group % 2;
    const int row = tile.row0 + group_row(group) + half * 8 + lane / 4;
    const bool row_inside = row < params.tokens;
    float bias = 0.0f;
    if (has_bias && row_inside) {
      bias = load_float(params.bias, params.bias_dtype,
                        static_cast<int64_t>(tile.head) * params.context + row);
    }
    int64_t sample = column / width;
    int channel = static_cast<int>(column - sample * width);
#pragma unroll
    for (int block = 0; block < 2 * kWarpGroups; block += Piece::kBlocks) {
      const bool inside = row_inside && sample < params.batch;
      float value[Piece::kBlocks][2];
#pragma unroll
      for (int i = 0; i < 2 * Piece::kBlocks; ++i) {
        value[i / 2][i % 2] = sum.value[group][block + i / 2][2 * half + i % 2] + bias;
      }
      if (has_residual) {
        const int64_t place =
            sample * params.residual_batch_stride + row * params.residual_token_stride + channel;
        typename Piece::Bits added = {};
        if (inside) added = *reinterpret_cast<const typename Piece::Bits*>(residual + place);
        Piece::add(value, added);
      }
      const typename Piece::Bits bits = Piece::round(value);
      const int64_t place = (sample * params.tokens + row) * params.channels + channel;
      if (inside) __stcg(reinterpret_cast<typename Piece::Bits*>(output + place), bits);
      for (channel += 8 * Piece::kBlocks; channel >= width; channel -= width) ++sample;
    }
  }
}

// ------------------------------------------------------------------------------------------ kernel

// One mma step of a tile on the diagonal. Skips the groups of 16 rows whose W is all zero here.
// `lead` = first row of the tile - first token of the step.
template <typename Element, bool kTransposed>
__device__ __forceinline__ void multiply_triangle(Accumulator& sum, const Fragments& fragments,
                                                  int lead) {
  // lets the compiler resolve, in unrolled steps, which groups are skipped
  __builtin_assume(warp_row() < 2);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    const int group_lead = lead + group_row(group);
    // the largest row of W - column of W over the group's 16 rows and the step's tokens
    const int most = kTransposed ? kMmaDepth<Element> - 1 - group_lead : group_lead + 15;
    if (most >= 0) multiply_row_group<Element>(sum, fragments, group);
  }
}

template <typename Element, bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    product_kernel(const TriangularConvParams params) {
#if __CUDA_ARCH__ >= 800
  using Loader = ProductLoader<Element, kTransposed>;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  // When unrolled, each step on the diagonal knows which groups it skips. Measured: faster for
  // forward, slower for grad-input.
  constexpr int kUnrolled = kTransposed ? 1 : kTile / kSliceDepth;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];

  const Tile tile = locate<kTransposed>(params, blockIdx.x);
  Loader loader(params, tile);
  const auto load = [&](AsyncCopies& copies) {
    if (!loader.done()) loader(copies);
  };
  Pipeline<Element, typename Loader::WeightLayout, typename Loader::InputLayout, 16> pipeline(
      shared_address(memory), warp_column() * kWarpTile, load);

  const auto slices = [](int tokens) { return (max(tokens, 0) + kSliceDepth - 1) / kSliceDepth; };
  const int before = kTransposed ? 0 : slices(tile.row0);
  const int diagonal = slices(min(params.tokens - tile.row0, kTile));
  const int after = kTransposed ? slices(params.tokens - tile.row0 - kTile) : 0;
  Accumulator sum;
  const auto multiply_all = [&](const Fragments& fragments) {
#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group)
      multiply_row_group<Element>(sum, fragments, group);
  };
  pipeline.run(before, load, multiply_all);
#pragma unroll(kUnrolled)
  for (int slice = 0; slice < kTile / kSliceDepth; ++slice) {
    if (slice >= diagonal) continue;
    int lead = -slice * kSliceDepth;  // first row of the tile - first token of the step
    pipeline.run(1, load, [&](const Fragments& fragments) {
      multiply_triangle<Element, kTransposed>(sum, fragments, lead);
      lead -= kMmaDepth<Element>;
    });
  }
  pipeline.run(after, load, multiply_all);
  store_result<Element, kTransposed>(sum, params, tile);
#endif
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = row_tiles(params) * column_tiles(params) * params.heads;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    product_kernel<decltype(element), kTransposed>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t forward(const TriangularConvParams& params) { return launch_product<false>(params); }
cudaError_t grad_input(const TriangularConvParams& params) { return launch_product<true>(params); }

}  // namespace ampere
