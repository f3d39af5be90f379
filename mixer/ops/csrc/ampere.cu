// The kernels for sm_80 and newer.
#include "ampere_tile.cuh"
#include "kernels.h"
#include "tensor_grad_weight.cuh"
#include "tensor_product.cuh"

namespace ampere {

cudaError_t forward(const TriangularConvParams& params) {
  return dispatch_dtype(params.dtype, [&](auto element) {
    return launch_product<Set<decltype(element)>, false>(params);
  });
}
cudaError_t grad_input(const TriangularConvParams& params) {
  return dispatch_dtype(params.dtype, [&](auto element) {
    return launch_product<Set<decltype(element)>, true>(params);
  });
}
int64_t grad_weight_workspace(const TriangularConvParams& params) {
  return workspace_bytes(params);
}
cudaError_t grad_weight(const TriangularConvParams& params) {
  return dispatch_dtype(params.dtype, [&](auto element) {
    return launch_grad_weight<Set<decltype(element)>>(params);
  });
}

}  // namespace ampere
