// dbias[h, i] = sum over the batch and the head's channels of dy[b, i, c]; zero for rows beyond
// `tokens`. A block computes one row and adds in a fixed order, so results are reproducible bit for
// bit.
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // of a block

template <typename Element>
__global__ void __launch_bounds__(kWarps * kWarp)
    grad_bias_kernel(const TriangularConvParams params) {
  constexpr int kVector = 16 / sizeof(Element);
  const int64_t index = blockIdx.x;
  const int row = static_cast<int>(index % params.context);
  const int head = static_cast<int>(index / params.context);
  const int vectors = params.channels / params.heads / kVector;  // of a head in one sample
  const Element* const dy = static_cast<const Element*>(params.dy) + row * params.dy_token_stride +
                            static_cast<int64_t>(head) * vectors * kVector;
  float sum = 0.0f;
  if (row < params.tokens) {
    const int count = params.batch * vectors;
#pragma unroll 4
    for (int item = threadIdx.x; item < count; item += kWarps * kWarp) {
      const Element* from = dy + item / vectors * params.dy_batch_stride + item % vectors * kVector;
      const uint4 bits = *reinterpret_cast<const uint4*>(from);
      const Element* values = reinterpret_cast<const Element*>(&bits);
      float part = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i) part += float(values[i]);
      sum += part;
    }
  }
  for (int apart = kWarp / 2; apart > 0; apart /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  __shared__ float sums[kWarps];
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp];
  params.dbias[index] = sum;
}

}  // namespace

cudaError_t grad_bias(const TriangularConvParams& params) {
  const int64_t blocks = static_cast<int64_t>(params.heads) * params.context;
  const auto kernel = params.dtype == MIXER_FLOAT16 ? grad_bias_kernel<__half>
                                                    : grad_bias_kernel<__nv_bfloat16>;
  return launch(params, kernel, blocks, kWarps * kWarp, 0, params);
}
