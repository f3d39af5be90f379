// Which calls the Hopper kernels support. All others go to another set of kernels.
#include "hopper_maps.h"
#include "hopper_shift.cuh"
#include "kernels.h"

int64_t hopper::product_workspace(const TriangularConvParams& params) {
  return shifted_bytes(params);
}

bool hopper::serves(const TriangularConvParams& params) {
  const bool types = params.dtype == MIXER_FLOAT16 || params.dtype == MIXER_BFLOAT16;
  const bool sizes = params.batch > 0 && params.tokens > 0 && params.channels > 0 &&
                     params.channels / params.heads % 8 == 0;
  return params.capability == 90 && params.processors >= 2 && types && sizes;
}

bool hopper::fits(const TriangularConvParams& params) {
  const void* tensors[] = {params.x, params.dy, params.residual,
                           params.y, params.dx, params.packed};
  for (const void* tensor : tensors) {
    if (!is_aligned(tensor)) return false;
  }
  return (params.x == nullptr ||
          strides_fit(params.x_batch_stride, params.x_token_stride, params)) &&
         (params.dy == nullptr ||
          strides_fit(params.dy_batch_stride, params.dy_token_stride, params)) &&
         (params.residual == nullptr ||
          strides_fit(params.residual_batch_stride, params.residual_token_stride, params));
}
