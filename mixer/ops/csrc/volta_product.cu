// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c] and (kTransposed)
// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c]. One kernel does both: transposing only flips
// the triangle.
#include "kernels.h"
#include "tensor_product.cuh"
#include "volta_tile.cuh"

namespace volta {
namespace {

// ----------------------------------------------------------------------------------------- storing

// 16 bytes, loaded and stored at once, computed value by value.
union Vector {
  uint4 bits = {};
  Element value[Sizes<Element>::kVector];
};

// Floats from one row of a group to the next in shared memory. The padding of 8 puts rows that are
// written at once into different banks.
constexpr int kGroupPitch = kWarpTile + 8;

// A warp's groups of 16 rows pass through shared memory one by one, in fp32. Each thread then holds
// whole vectors, and adds bias and residual to them before the only rounding. write_group(group,
// values) writes this thread's part of a group; rows are kGroupPitch floats apart.
template <bool kTransposed, typename WriteGroup>
__device__ __forceinline__ void store_result(WriteGroup&& write_group, unsigned char* memory,
                                             const TriangularConvParams& params, const Tile& tile) {
  constexpr int kVector = Sizes<Element>::kVector;
  constexpr int kLanesAcross = kWarpTile / kVector;
  static_assert(kThreads / 32 * 16 * kGroupPitch * sizeof(float) <= 2 * kStageBytes,
                "the groups fit where the stages were");
  float* group_values = reinterpret_cast<float*>(memory) + threadIdx.x / 32 * 16 * kGroupPitch;

  const int width = params.channels / params.heads;
  const int across = lane() % kLanesAcross * kVector;
  const int64_t column = tile.column0 + warp_column() * kWarpTile + across;
  const int64_t sample = column / width;
  // among all channels
  const int64_t position = static_cast<int64_t>(tile.head) * width + (column - sample * width);
  const bool has_bias = !kTransposed && params.bias != nullptr;
  const bool has_residual = !kTransposed && params.residual != nullptr;
  Element* output = static_cast<Element*>(kTransposed ? params.dx : params.y) +
                    sample * params.tokens * params.channels + position;
  const Element* residual = static_cast<const Element*>(params.residual) +
                            sample * params.residual_batch_stride + position;

  __syncthreads();  // no stage is read any more
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
    write_group(group, group_values);
    __syncwarp();
#pragma unroll
    for (int r = lane() / kLanesAcross; r < 16; r += 32 / kLanesAcross) {
      const int row = tile.row0 + group_row(group) + r;
      if (row >= params.tokens || sample >= params.batch) continue;
      const int64_t bias_index = static_cast<int64_t>(tile.head) * params.context + row;
      const float bias = has_bias ? load_float(params.bias, params.bias_dtype, bias_index) : 0.0f;
      Vector added;
      if (has_residual) {
        added.bits = *reinterpret_cast<const uint4*>(residual + row * params.residual_token_stride);
      }
      Vector result;
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 four =
            *reinterpret_cast<const float4*>(group_values + r * kGroupPitch + across + i);
        const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float value = values[j] + bias;
          if (has_residual) value += to_float(added.value[i + j]);
          result.value[i + j] = from_float<Element>(value);
        }
      }
      // The compiler would split a plain store into the parts that `result` was made of.
      __stcg(reinterpret_cast<uint4*>(output + static_cast<int64_t>(row) * params.channels),
             result.bits);
    }
    __syncwarp();  // the values have been read before the next group overwrites them
  }
}

// ------------------------------------------------------------------------------------------ kernel

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    product_kernel(const TriangularConvParams params) {
  using Loader = ProductLoader<Element, kTransposed>;
  using LeftLayout = typename Loader::WeightLayout;
  using RightLayout = typename Loader::InputLayout;
  constexpr int kSliceDepth = Sizes<Element>::kSliceDepth;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];

  const Tile tile = locate<kTransposed>(params, blockIdx.x);
  Loader loader(params, tile);
  const int first = loader.first(), last = loader.last();
  const int steps = (last - first + kSliceDepth - 1) / kSliceDepth;

  Accumulator sum;
  int depth = first;
  const auto multiply = [&](int mma_step, const Fragments& fragments) {
    const auto multiply_row_group = [&](int group) {
#pragma unroll
      for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
        multiply_groups<LeftLayout, RightLayout>(sum, fragments, group, column_group);
      }
    };
    // first row of the tile - first token of the step
    const int lead = tile.row0 - (depth + mma_step * kMmaDepth);
    const bool on_diagonal = kTransposed ? lead + kTile > 0 : lead < kMmaDepth;
    if (on_diagonal) {
      // Skips groups of 16 rows whose W is all zero here, so that an infinity or NaN in x does not
      // spread beyond its 16 tokens.
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) {
        // The maximum of row of W - column of W over the group's 16 rows and the step's tokens.
        const int most =
            kTransposed ? kMmaDepth - 1 - (lead + group_row(group)) : lead + group_row(group) + 15;
        if (most >= 0) multiply_row_group(group);
      }
    } else {
#pragma unroll
      for (int group = 0; group < kWarpGroups; ++group) multiply_row_group(group);
    }
    if (mma_step == kMmaSteps - 1) depth += kSliceDepth;
  };
  run_pipeline<LeftLayout, RightLayout, 16>(memory, steps, warp_column() * kWarpTile, loader,
                                            multiply);

  const auto write_group = [&](int group, float* values) {
#pragma unroll
    for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float(&value)[8] = sum.value[group][column_group];
        float* place = values + value_row(i) * kGroupPitch + column_group * 16 + value_column(i);
        *reinterpret_cast<float2*>(place) = make_float2(value[i], value[i + 1]);
      }
    }
  };
  store_result<kTransposed>(write_group, memory, params, locate<kTransposed>(params, blockIdx.x));
}

template <bool kTransposed>
cudaError_t launch_product(const TriangularConvParams& params) {
  const int64_t blocks = row_tiles(params) * column_tiles(params) * params.heads;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  product_kernel<kTransposed>
      <<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
          params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t forward(const TriangularConvParams& params) { return launch_product<false>(params); }
cudaError_t grad_input(const TriangularConvParams& params) { return launch_product<true>(params); }

}  // namespace volta
