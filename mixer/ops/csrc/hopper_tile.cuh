// What the Hopper kernels share: a ring of stages, filled by TMA and multiplied by several
// warpgroups, and tensor maps, TMA's descriptions of tensors, made on the host.
#pragma once

#include <dlfcn.h>

#include "hopper_ptx.cuh"

namespace hopper {

// warpgroups that multiply, 64 rows by 128 columns each
constexpr int kMultipliers = 4;
constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;  // the last warpgroup loads
constexpr int kColumns = 128;
constexpr int kLoaderRegisters = 64;
constexpr int kMultiplierRegisters = 104;

// Full: the stage's bytes have landed. Empty: all multiplying warps have read the stage; with
// kShared, those of both thread blocks of the cluster, because the loaders write into both. A
// barrier's parity only tells a phase from the one before it, so no thread may fall two rounds
// behind. A multiplier that skips stages therefore needs more full barriers than there are stages.
template <int kStages, bool kShared, int kFullBarriers = kStages>
struct Ring {
  static constexpr int kReaders = (kShared ? kClusterSize : 1) * kMultipliers * kWarpgroup / 32;

  uint64_t full[kFullBarriers];
  uint64_t empty[kStages];

  // If two threads load, both arrive at the full barriers and, through loaded(), at the empty ones.
  __device__ __forceinline__ void init(int loaders) {
    for (int barrier = 0; barrier < kFullBarriers; ++barrier) barrier_init(&full[barrier], loaders);
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(&empty[stage], kReaders + (loaders - 1) * 2 * kClusterSize);
  }

  // Called by a loader that has done its part of a stage. If a thread block reads nothing of a
  // stage, its readers do not hold the stage back. Without this arrival its loaders could fall a
  // whole round of the ring behind, and arrivals of two rounds would count in one phase.
  __device__ __forceinline__ void loaded(int stage) {
#pragma unroll
    for (int rank = 0; rank < kClusterSize; ++rank) barrier_arrive_at(&empty[stage], rank);
  }

  // Called by all lanes of a warp when its products on the stage have ended.
  __device__ __forceinline__ void release(int stage) {
    const int lane = threadIdx.x % 32;
    if (!kShared) {
      if (lane == 0) barrier_arrive(&empty[stage]);
    } else if (lane < kClusterSize) {
      barrier_arrive_at(&empty[stage], lane);
    }
  }

  // Called by one thread for the four warps of its warpgroup; one arrival at a time, since a phase
  // may end between them.
  __device__ __forceinline__ void release_for_warpgroup(int stage) {
#pragma unroll
    for (int i = 0; i < (kShared ? kClusterSize : 1) * kWarpgroup / 32; ++i) {
      barrier_arrive_at(&empty[stage], kShared ? i % kClusterSize : cluster_rank());
    }
  }
};

// sum += left (64 x 16 kSlices) right (16 kSlices x 128), asynchronously. Without `accumulate`,
// starts from zero.
template <typename Element, bool kLeftTransposed, bool kRightTransposed, int kSlices>
__device__ __forceinline__ void multiply_slices(float (&sum)[64], uint32_t left, uint32_t right,
                                                bool accumulate) {
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    wgmma_n128<Element, kLeftTransposed, kRightTransposed>(
        sum, left + slice * slice_step<kLeftTransposed>(),
        right + slice * slice_step<kRightTransposed>(), accumulate || slice > 0);
  }
}

// Launches a kernel with more shared memory than one gets without asking.
template <typename Kernel, typename Arguments>
cudaError_t launch_large(const TriangularConvParams& params, Kernel kernel, int64_t blocks,
                         int bytes, const Arguments& arguments) {
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return status == cudaSuccess ? launch(params, kernel, blocks, kThreads, bytes, arguments)
                               : status;
}

// ---------------------------------------------------------------------------------- tensor maps

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
  const cuuint64_t rows = params.window > 0 ? MIXER_STRIP_ROWS : params.tokens;
  const cuuint64_t sizes[3] = {columns, rows, cuuint64_t(params.heads)};
  const cuuint64_t strides[2] = {2 * columns, 2 * columns * rows};
  return encode_map(params.packed, params.dtype, 3, sizes, strides, 1, status);
}

}  // namespace hopper
