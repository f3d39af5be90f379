// dx[b,j,c] = sum over taps and i >= j of W[h,t,i,j] * dy[b,i,c - shift].
#include "ampere_product.cuh"

cudaError_t ampere::grad_input(const TriangularConvParams& params) {
  return launch_product<true>(params);
}
