// Kernel sizes beyond 1: copies of x or dy, shifted along the channels. A TMA box must start at a
// multiple of 16 bytes, so all taps but the middle one read shifted copies. They cost one pass over
// memory, next to K passes of the product.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace hopper {

// The number of copies: one for every tap but the middle one, which needs no shift.
inline int shifted_copies(const TriangularConvParams& params) { return params.taps - 1; }

inline int64_t shifted_bytes(const TriangularConvParams& params) {
  return int64_t(shifted_copies(params)) * params.batch * params.tokens * params.channels * 2;
}

// The copy that a tap reads; none for the middle tap.
__host__ __device__ __forceinline__ int middle_tap(int taps) { return (taps - 1) / 2; }
__host__ __device__ __forceinline__ int copy_of_tap(int tap, int taps) {
  return tap < middle_tap(taps) ? tap : tap - 1;
}

// Writes `to` (copies, batch, tokens, channels), contiguous: to[copy,b,t,c] = from[b,t,c +
// direction * (tap - middle)], zero beyond the channels of a head. Direction is 1 for forward and
// grad-weight, -1 for grad-input. 16-bit types.
cudaError_t shift_taps(const TriangularConvParams& params, const void* from, int64_t batch_stride,
                       int64_t token_stride, int direction, void* to);

}  // namespace hopper
