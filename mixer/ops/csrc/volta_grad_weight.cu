// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
// zeros elsewhere.
#include "tensor_grad_weight.cuh"
#include "volta_tile.cuh"

namespace volta {
namespace {

template <typename Plan>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, const Plan plan) {
  using Layout = KMajor<Element>;
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  for_each_task(params, plan, [&](const Task& task) {
    GradWeightLoader<Element> loader(params, task);
    Accumulator sum;
    const auto multiply = [&](int, const Fragments& fragments) {
      multiply_lower_groups(task.on_diagonal(), [&](int row_group, int column_group) {
        multiply_groups<Layout, Layout>(sum, fragments, row_group, column_group);
      });
    };
    run_pipeline<Layout, Layout, kGroupColumnStep>(memory, task.steps, first_group_column(),
                                                   loader, multiply);

#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
      for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float(&value)[8] = sum.value[group][column_group];
          const int row = group_row(group) + value_row(i);
          const int column =
              first_group_column() + column_group * kGroupColumnStep + value_column(i);
          *reinterpret_cast<float2*>(task.tile + row * kTile + column) =
              make_float2(value[i], value[i + 1]);
        }
      }
    }
  });
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return launch_grad_weight(params, [&](unsigned blocks, auto plan) {
    partial_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params, plan);
    return cudaGetLastError();
  });
}

}  // namespace volta
