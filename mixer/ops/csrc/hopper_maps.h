// Tensor maps: TMA's descriptions of tensors, made on the host and passed to kernels by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "numeric.cuh"
#include "params.h"

namespace hopper {

// Sizes are innermost first; strides are in bytes, for all dimensions but the innermost. Boxes are
// 64 x 64 in the dimensions 0 and `rows` and 1 in all others, with the 128-byte swizzle. Elements
// outside the tensor read as zero and are not written. Sets `status` if it fails.
inline CUtensorMap encode_map(const void* data, int dtype, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, int rows, cudaError_t& status) {
  // The driver's function, looked up at run time so that we need not link with libcuda.
  static const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuTensorMapEncodeTiled"));
  CUtensorMap map = {};
  cuuint32_t box[5] = {64, 1, 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  box[rows] = 64;
  const CUtensorMapDataType type =
      dtype == MIXER_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (encode == nullptr ||
      encode(&map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
    status = cudaErrorNotSupported;
  return map;
}

// A (batch, tokens, channels) tensor as {channels of a head, heads, tokens, batch}. The batch needs
// its own dimension: folded into the rows, a box at the end of one sample would read the next
// sample. So do the heads, because a box may extend beyond the channels of its head.
inline CUtensorMap encode_activations(const TriangularConvParams& params, const void* data,
                                      int64_t batch_stride, int64_t token_stride,
                                      cudaError_t& status) {
  const cuuint64_t width = params.channels / params.heads;
  const cuuint64_t sizes[4] = {width, cuuint64_t(params.heads), cuuint64_t(params.tokens),
                               cuuint64_t(params.batch)};
  // torch allows any stride for a dimension of size 1; here it must still be a valid one.
  const cuuint64_t row = 2 * (params.tokens > 1 ? token_stride : int64_t(params.channels));
  const cuuint64_t strides[3] = {
      2 * width, row, params.batch > 1 ? cuuint64_t(2 * batch_stride) : row * params.tokens};
  return encode_map(data, params.dtype, 4, sizes, strides, 2, status);
}

inline CUtensorMap encode_x(const TriangularConvParams& params, cudaError_t& status) {
  return encode_activations(params, params.x, params.x_batch_stride, params.x_token_stride, status);
}
inline CUtensorMap encode_dy(const TriangularConvParams& params, cudaError_t& status) {
  return encode_activations(params, params.dy, params.dy_batch_stride, params.dy_token_stride,
                            status);
}

// The packed weight, or the strip of one by lag, as {columns, rows, heads}.
inline CUtensorMap encode_weight(const TriangularConvParams& params, cudaError_t& status) {
  const cuuint64_t columns = params.columns;
  const cuuint64_t rows = params.lag_zero > 0 ? MIXER_STRIP_ROWS : params.tokens;
  const cuuint64_t sizes[3] = {columns, rows, cuuint64_t(params.heads)};
  const cuuint64_t strides[2] = {2 * columns, 2 * columns * rows};
  return encode_map(params.packed, params.dtype, 3, sizes, strides, 1, status);
}

}  // namespace hopper
