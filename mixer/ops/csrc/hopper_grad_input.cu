// dx[b,j,c] = sum over i >= j of W[h,i,j] * dy[b,i,c].
#include "hopper_product.cuh"

cudaError_t hopper::grad_input(const TriangularConvParams& params) {
  return launch_product<true, false>(params);
}
