// Number types (values are stored as float, __half or __nv_bfloat16 and computed in fp32), launches,
// and the tiles of a triangle.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "params.h"

// Calls `function` with a zero of the type that `dtype` names: on the host to choose a kernel; on the
// GPU for values that are used too rarely for a kernel of each type, such as the bias.
#pragma nv_exec_check_disable
template <typename Function>
__host__ __device__ __forceinline__ auto with_dtype(int dtype, Function function) {
  if (dtype == MIXER_FLOAT16) return function(__half());
  if (dtype == MIXER_BFLOAT16) return function(__nv_bfloat16());
  return function(float());
}

// Calls `function` with zeros of the types of x and of the weight, which has x's type or is fp32.
template <typename Function>
cudaError_t with_dtypes(const TriangularConvParams& params, Function function) {
  return with_dtype(params.dtype, [&](auto element) {
    return params.weight_dtype == params.dtype ? function(element, element)
                                               : function(element, float());
  });
}

__device__ __forceinline__ float load_float(const void* values, int dtype, int64_t index) {
  return with_dtype(dtype, [&](auto zero) {
    return float(static_cast<const decltype(zero)*>(values)[index]);
  });
}

// Launches a kernel on the call's stream, with so many bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const TriangularConvParams& params, void (*kernel)(Parameters...),
                   int64_t blocks, int threads, int bytes, const Arguments&... arguments) {
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

__host__ __device__ constexpr int64_t ceil_div(int64_t value, int64_t step) {
  return (value + step - 1) / step;
}

// How many lags of a token's weights can be other than zero.
__host__ __device__ __forceinline__ int band(const TriangularConvParams& params) {
  const bool has_window = params.window > 0 && params.window < params.tokens;
  return has_window ? params.window : params.tokens;
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
