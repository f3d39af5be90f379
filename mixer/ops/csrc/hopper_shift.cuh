// Kernel sizes beyond 1: copies of x or dy, shifted over the channels. TMA cannot start a box
// between two multiples of 16 bytes, so the taps to the left and right of the middle one read
// copies. They cost one pass over memory, beside the products' K.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace hopper {

// Copies that are needed: of all taps but the middle one, which is not shifted.
inline int shifted_copies(const TriangularConvParams& params) { return params.taps - 1; }

inline int64_t shifted_bytes(const TriangularConvParams& params) {
  return int64_t(shifted_copies(params)) * params.batch * params.tokens * params.channels * 2;
}

// The copy that a tap reads; none for the middle one.
__host__ __device__ __forceinline__ int middle_tap(int taps) { return (taps - 1) / 2; }
__host__ __device__ __forceinline__ int copy_of_tap(int tap, int taps) {
  return tap < middle_tap(taps) ? tap : tap - 1;
}

// to (copies, batch, tokens, channels), contiguous: to[copy,b,t,c] = from[b,t,c + direction * (tap
// - middle)], zero beyond the channels of a head. Forward and grad-weight look to the right
// (direction 1), grad-input looks back (-1). 16-bit types.
cudaError_t shift_taps(const TriangularConvParams& params, const void* from, int64_t batch_stride,
                       int64_t token_stride, int direction, void* to);

}  // namespace hopper
