// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
// zeros elsewhere.
#include "tensor_grad_weight.cuh"
#include "volta_tile.cuh"

namespace volta {
namespace {

__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, int splits) {
  using Layout = KMajor<Element>;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  const PartialTile tile(params, splits);
  GradWeightLoader<Element> loader(params, tile.head, tile.lower.row * kTile,
                                   tile.lower.column * kTile, tile.first);
  Accumulator sum;
  const auto multiply = [&](int, const Fragments& fragments) {
    multiply_lower_groups(tile.on_diagonal(), [&](int row_group, int column_group) {
      multiply_groups<Layout, Layout>(sum, fragments, row_group, column_group);
    });
  };
  run_pipeline<Layout, Layout, kGroupColumnStep>(memory, static_cast<int>(tile.last - tile.first),
                                                 first_group_column(), loader, multiply);

  float* partial = partial_tile(params);
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
    for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const float(&value)[8] = sum.value[group][column_group];
        const int column = first_group_column() + column_group * kGroupColumnStep + value_column(i);
        *reinterpret_cast<float2*>(&partial[(group_row(group) + value_row(i)) * kTile + column]) =
            make_float2(value[i], value[i + 1]);
      }
    }
  }
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return launch_grad_weight(params, [&](unsigned blocks, int splits) {
    partial_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params,
                                                                                     splits);
    return cudaGetLastError();
  });
}

}  // namespace volta
