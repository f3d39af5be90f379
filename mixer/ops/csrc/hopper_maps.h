// Tensor maps: TMA's descriptions of tensors, made on the host and passed to kernels by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "numeric.cuh"
#include "params.h"

namespace hopper {

// The driver's cuTensorMapEncodeTiled, looked up at run time so that we need not link with libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
#else
  const cudaError_t status =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTiled>(function)
             : nullptr;
}

// Sizes are innermost first; strides are in bytes, for all dimensions but the innermost. Boxes are
// 64 x 64 in the dimensions 0 and `rows` and 1 in all others, with the 128-byte swizzle. Elements
// outside the tensor read as zero and are not written.
inline cudaError_t encode_map(CUtensorMap* map, const void* data, int dtype, int rank,
                              const cuuint64_t* sizes, const cuuint64_t* strides, int rows) {
  static const EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t box[5] = {64, 1, 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  box[rows] = 64;
  const CUtensorMapDataType type =
      dtype == MIXER_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(map, type, rank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A (batch, tokens, channels) tensor as {channels of a head, heads, tokens, batch}. The batch needs
// its own dimension: folded into the rows, a box at the end of one sample would read the next
// sample. So do the heads, because a box may extend beyond the channels of its head.
inline cudaError_t encode_activations(CUtensorMap* map, const void* data, int64_t batch_stride,
                                      int64_t token_stride, const TriangularConvParams& params) {
  const cuuint64_t width = params.channels / params.heads;
  const cuuint64_t sizes[4] = {width, cuuint64_t(params.heads), cuuint64_t(params.tokens),
                               cuuint64_t(params.batch)};
  // torch allows any stride for a dimension of size 1; here it must still be a valid one.
  const cuuint64_t row = 2 * (params.tokens > 1 ? token_stride : int64_t(params.channels));
  const cuuint64_t strides[3] = {
      2 * width, row, params.batch > 1 ? cuuint64_t(2 * batch_stride) : row * params.tokens};
  return encode_map(map, data, params.dtype, 4, sizes, strides, 2);
}

inline cudaError_t encode_output(CUtensorMap* map, void* data, const TriangularConvParams& params) {
  return encode_activations(map, data, int64_t(params.tokens) * params.channels, params.channels,
                            params);
}

// The packed weight, or the strip of one by lag, as {columns, rows, heads}.
inline cudaError_t encode_weight(CUtensorMap* map, const TriangularConvParams& params) {
  const cuuint64_t columns = params.columns;
  const cuuint64_t rows = params.lag_zero > 0 ? MIXER_STRIP_ROWS : params.tokens;
  const cuuint64_t sizes[3] = {columns, rows, cuuint64_t(params.heads)};
  const cuuint64_t strides[2] = {2 * columns, 2 * columns * rows};
  return encode_map(map, params.packed, params.dtype, 3, sizes, strides, 1);
}

}  // namespace hopper
