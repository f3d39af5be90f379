// y[b,i,c] = bias[h,i] + residual[b,i,c] + sum over taps t and j <= i
//            of W[h,t,i,j] * x[b,j,c + shift].
#include "volta_product.cuh"

cudaError_t volta::forward(const TriangularConvParams& params) {
  return launch_product<false>(params);
}
