// dx[b,j,c] = sum over taps and i >= j of W[h,t,i,j] * dy[b,i,c - shift].
#include "portable_product.cuh"

cudaError_t portable::grad_input(const TriangularConvParams& params) {
  return launch_product<true>(params);
}
