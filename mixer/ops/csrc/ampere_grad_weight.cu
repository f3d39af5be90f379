// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
// zeros elsewhere.
#include "ampere_tile.cuh"
#include "tensor_grad_weight.cuh"

namespace ampere {
namespace {

template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, int splits) {
#if __CUDA_ARCH__ >= 800
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  const PartialTile tile(params, splits);
  GradWeightLoader<Element> loader(params, tile.head, tile.lower.row * kTile,
                                   tile.lower.column * kTile, tile.first);
  Accumulator sum;
  const auto multiply = [&](const Fragments& fragments) {
    multiply_lower_groups(tile.on_diagonal(), [&](int row_group, int column_group) {
      multiply_groups<Element>(sum, fragments, row_group, column_group);
    });
  };
  const int steps = static_cast<int>(tile.last - tile.first);
  int unloaded = steps;
  const auto load = [&](AsyncCopies& copies) {
    if (--unloaded >= 0) loader(copies);
  };
  Pipeline<Element, KMajor<Element>, KMajor<Element>, kGroupColumnStep> pipeline(
      shared_address(memory), first_group_column(), load);
  pipeline.run(steps, load, multiply);
  wait_copies<0>();

  float* partial = partial_tile(params);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
    for (int c = 0; c < 2 * kWarpGroups; ++c) {
      const float(&value)[4] = sum.value[group][c];
      const int row = group_row(group) + lane() / 4;
      const int column =
          first_group_column() + c / 2 * kGroupColumnStep + c % 2 * 8 + lane() % 4 * 2;
      *reinterpret_cast<float2*>(&partial[row * kTile + column]) = make_float2(value[0], value[1]);
      *reinterpret_cast<float2*>(&partial[(row + 8) * kTile + column]) =
          make_float2(value[2], value[3]);
    }
  }
#endif
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return launch_grad_weight(params, [&](unsigned blocks, int splits) {
    return dispatch_dtype(params.dtype, [&](auto element) {
      partial_kernel<decltype(element)>
          <<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params, splits);
      return cudaGetLastError();
    });
  });
}

}  // namespace ampere
