// Number types: values are stored as Element and computed in fp32.
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

// Reads a value of any type, for values that are read once per row (the bias): a template instance
// per type would not pay off.
__device__ __forceinline__ float load_float(const void* values, int dtype, int64_t index) {
  if (dtype == MIXER_FLOAT16) return to_float(static_cast<const __half*>(values)[index]);
  if (dtype == MIXER_BFLOAT16) return to_float(static_cast<const __nv_bfloat16*>(values)[index]);
  return static_cast<const float*>(values)[index];
}

// Calls `function` with a zero of the type that `dtype` names.
template <typename Function>
cudaError_t dispatch_dtype(int dtype, Function function) {
  switch (dtype) {
    case MIXER_FLOAT32: return function(float());
    case MIXER_FLOAT16: return function(__half());
    case MIXER_BFLOAT16: return function(__nv_bfloat16());
    default: return cudaErrorInvalidValue;
  }
}

__host__ __device__ constexpr int64_t ceil_div(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}

// Grids are one-dimensional: y and z are limited to 65,535 blocks, which batch * heads can exceed.
constexpr int64_t kMaxBlocks = 2147483647;
