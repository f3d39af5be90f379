// Number types (values are stored as Element and computed in fp32), and the tiles of a triangle.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "params.h"

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Calls `function` with a zero of the type that `dtype` names: on the GPU, for values that are used
// too rarely for a kernel of each type, such as the bias; and on the host.
template <typename Function>
__device__ __forceinline__ auto with_dtype(int dtype, Function function) {
  if (dtype == MIXER_FLOAT16) return function(__half());
  if (dtype == MIXER_BFLOAT16) return function(__nv_bfloat16());
  return function(float());
}
__device__ __forceinline__ float load_float(const void* values, int dtype, int64_t index) {
  return with_dtype(dtype, [&](auto zero) {
    return to_float(static_cast<const decltype(zero)*>(values)[index]);
  });
}
__device__ __forceinline__ void store_float(void* values, int dtype, int64_t index, float value) {
  with_dtype(dtype, [&](auto zero) {
    static_cast<decltype(zero)*>(values)[index] = from_float<decltype(zero)>(value);
  });
}
template <typename Function>
cudaError_t dispatch_dtype(int dtype, Function function) {
  switch (dtype) {
    case MIXER_FLOAT32: return function(float());
    case MIXER_FLOAT16: return function(__half());
    case MIXER_BFLOAT16: return function(__nv_bfloat16());
    default: return cudaErrorInvalidValue;
  }
}

// Calls `function` with zeros of the types of x and of the weight, which has x's type or is fp32.
template <typename Function>
cudaError_t dispatch_dtypes(const TriangularConvParams& params, Function function) {
  return dispatch_dtype(params.dtype, [&](auto element) {
    return params.weight_dtype == params.dtype ? function(element, element)
                                               : function(element, float());
  });
}

__host__ __device__ constexpr int64_t ceil_div(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}

__host__ __device__ __forceinline__ int64_t lower_tiles(int tokens, int tile) {
  const int64_t tiles = ceil_div(tokens, tile);
  return tiles * (tiles + 1) / 2;
}

// Tiles are numbered along the rows of the triangle: row_tile * (row_tile + 1) / 2 + column_tile.
struct LowerTile {
  int row, column;  // in tiles
};

__device__ __forceinline__ LowerTile locate_lower_tile(int tile) {
  int row = static_cast<int>((sqrtf(8.0f * tile + 1.0f) - 1.0f) / 2.0f);
  while (row * (row + 1) / 2 > tile) --row;
  while ((row + 1) * (row + 2) / 2 <= tile) ++row;
  return {row, tile - row * (row + 1) / 2};
}
