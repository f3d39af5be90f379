// dweight[h,i,j] = sum over batch and channels of dy[b,i,c] * x[b,j,c] for j <= i < tokens, exact
// zeros elsewhere.
#include "ampere_tile.cuh"
#include "tensor_grad_weight.cuh"

namespace ampere {
namespace {

template <typename Element, typename Plan>
__global__ void __launch_bounds__(kThreads, kBlocksResident)
    partial_kernel(const TriangularConvParams params, const Plan plan) {
#if __CUDA_ARCH__ >= 800
  alignas(128) __shared__ unsigned char memory[kSharedBytes];
  for_each_task(params, plan, [&](const Task& task) {
    GradWeightLoader<Element> loader(params, task);
    Accumulator sum;
    const auto multiply = [&](const Fragments& fragments) {
      multiply_lower_groups(task.on_diagonal(), [&](int row_group, int column_group) {
        multiply_groups<Element>(sum, fragments, row_group, column_group);
      });
    };
    int unloaded = task.steps;
    const auto load = [&](AsyncCopies& copies) {
      if (--unloaded >= 0) loader(copies);
    };
    Pipeline<Element, KMajor<Element>, KMajor<Element>, kGroupColumnStep> pipeline(
        shared_address(memory), first_group_column(), load);
    pipeline.run(task.steps, load, multiply);
    wait_copies<0>();

#pragma unroll
    for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
      for (int c = 0; c < 2 * kWarpGroups; ++c) {
        const float(&value)[4] = sum.value[group][c];
        const int row = group_row(group) + lane() / 4;
        const int column =
            first_group_column() + c / 2 * kGroupColumnStep + c % 2 * 8 + lane() % 4 * 2;
        float* const place = task.tile + row * kTile + column;
        *reinterpret_cast<float2*>(place) = make_float2(value[0], value[1]);
        *reinterpret_cast<float2*>(place + 8 * kTile) = make_float2(value[2], value[3]);
      }
    }
  });
#endif
}

}  // namespace

int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return launch_grad_weight(params, [&](unsigned blocks, auto plan) {
    return dispatch_dtype(params.dtype, [&](auto element) {
      partial_kernel<decltype(element), decltype(plan)>
          <<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(params, plan);
      return cudaGetLastError();
    });
  });
}

}  // namespace ampere
