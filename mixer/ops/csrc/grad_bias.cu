// dbias[h, i] = sum over the batch and the head's channels of dy[b, i, c]; zero for rows beyond
// `tokens`. One block computes one row and adds in a fixed order, so results are reproducible bit
// for bit.
#include "kernels.h"
#include "numeric.cuh"

namespace {

constexpr int kLanes = 32;    // threads along the channels
constexpr int kSamples = 8;   // threads along the batch
constexpr int kThreads = kLanes * kSamples;
// independent sums per thread: shorter chains, smaller rounding error
constexpr int kSums = 4;

template <typename Element, typename Gradient>
__global__ void __launch_bounds__(kThreads) grad_bias_kernel(const TriangularConvParams params) {
  __shared__ float sums[kThreads];
  const int row = blockIdx.x % params.context;
  const int head = blockIdx.x / params.context;
  const int width = params.channels / params.heads;  // channels of a head
  const int lane = threadIdx.x % kLanes;

  float sum[kSums] = {};
  if (row < params.tokens) {
    for (int sample = threadIdx.x / kLanes; sample < params.batch; sample += kSamples) {
      const Element* dy = static_cast<const Element*>(params.dy) + sample * params.dy_batch_stride +
                          row * params.dy_token_stride + static_cast<int64_t>(head) * width;
      for (int start = lane; start < width; start += kLanes * kSums) {
#pragma unroll
        for (int part = 0; part < kSums; ++part) {
          const int channel = start + part * kLanes;
          if (channel < width) sum[part] += to_float(dy[channel]);
        }
      }
    }
  }
  sums[threadIdx.x] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0)
    static_cast<Gradient*>(params.dbias)[blockIdx.x] = from_float<Gradient>(sums[0]);
}

}  // namespace

cudaError_t grad_bias(const TriangularConvParams& params) {
  const int64_t blocks = static_cast<int64_t>(params.heads) * params.context;
  if (blocks == 0) return cudaSuccess;
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  const cudaStream_t stream = static_cast<cudaStream_t>(params.stream);
  return dispatch_dtype(params.dtype, [&](auto element) {
    return dispatch_dtype(params.gradient_dtype, [&](auto gradient) {
      grad_bias_kernel<decltype(element), decltype(gradient)>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
  });
}
