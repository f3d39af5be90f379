// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over j <= i of W[h,i,j] * x[b,j,c].
#include "hopper_product.cuh"

cudaError_t hopper::forward(const TriangularConvParams& params) {
  return params.residual ? launch_product<false, true>(params)
                         : launch_product<false, false>(params);
}
