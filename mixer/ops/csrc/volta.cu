// The kernels for sm_70 and sm_75, fp16 alone.
#include "kernels.h"
#include "tensor_grad_weight.cuh"
#include "tensor_product.cuh"
#include "volta_tile.cuh"

namespace volta {

cudaError_t forward(const TriangularConvParams& params) {
  return launch_product<Set, false>(params);
}
cudaError_t grad_input(const TriangularConvParams& params) {
  return launch_product<Set, true>(params);
}
int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}
cudaError_t grad_weight(const TriangularConvParams& params) {
  return launch_grad_weight<Set>(params);
}

}  // namespace volta
