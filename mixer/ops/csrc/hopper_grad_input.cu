// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c].
#include "hopper_product.cuh"

cudaError_t hopper::grad_input(const TriangularConvParams& params) {
  ProductArguments arguments = {};
  const cudaError_t status = make_arguments<true>(params, &arguments);
  return status == cudaSuccess ? launch_type<true, false>(params, arguments) : status;
}
