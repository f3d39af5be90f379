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

__host__ __device__ constexpr int64_t ceil_div(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}
