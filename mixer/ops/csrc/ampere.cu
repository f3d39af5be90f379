// The kernels for sm_80 and newer.
#include "ampere_tile.cuh"
#include "kernels.h"
#include "tensor_grad_weight.cuh"
#include "tensor_product.cuh"

namespace ampere {
namespace {

template <bool kTransposed>
cudaError_t product(const TriangularConvParams& params) {
  return with_dtype(params.dtype, [&](auto element) {
    return launch_product<Set<decltype(element)>, kTransposed>(params);
  });
}

cudaError_t grad_weight(const TriangularConvParams& params) {
  return with_dtype(params.dtype, [&](auto element) {
    return launch_grad_weight<Set<decltype(element)>>(params);
  });
}

}  // namespace
}  // namespace ampere

KernelSet ampere_kernels() {
  return {ampere::product<false>, ampere::product<true>, tensor::workspace_bytes,
          ampere::grad_weight, false};
}
