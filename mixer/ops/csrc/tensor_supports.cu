// Which calls the tensor core kernels of sm_70 and sm_80 support: those whose 16-byte vectors are
// all 16-byte aligned.
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int64_t kVectorBytes = 16;

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// Whether a (batch, tokens, channels) tensor is aligned. A null pointer with zero strides is. The
// stride of a dimension of size one is never used, so it may have any value.
bool is_aligned(const TriangularConvParams& params, const void* pointer, int64_t batch_stride,
                int64_t token_stride, int64_t size) {
  return is_aligned(pointer) && (params.batch <= 1 || batch_stride * size % kVectorBytes == 0) &&
         (params.tokens <= 1 || token_stride * size % kVectorBytes == 0);
}

bool is_aligned(const TriangularConvParams& params) {
  const int64_t size = params.dtype == MIXER_FLOAT32 ? 4 : 2;
  return params.channels / params.heads * size % kVectorBytes == 0 &&
         params.columns * size % kVectorBytes == 0 && is_aligned(params.packed) &&
         is_aligned(params.y) && is_aligned(params.dx) &&
         is_aligned(params, params.x, params.x_batch_stride, params.x_token_stride, size) &&
         is_aligned(params, params.residual, params.residual_batch_stride,
                    params.residual_token_stride, size) &&
         is_aligned(params, params.dy, params.dy_batch_stride, params.dy_token_stride, size);
}

}  // namespace

bool ampere::supports(const TriangularConvParams& params) {
  return params.capability >= 80 && is_aligned(params);
}

bool volta::supports(const TriangularConvParams& params) {
  return params.capability >= 70 && params.dtype == MIXER_FLOAT16 && is_aligned(params);
}
