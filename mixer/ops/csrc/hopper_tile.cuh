// What the Hopper kernels share: a ring of stages, filled by TMA and multiplied by several
// warpgroups.
#pragma once

#include "hopper_ptx.cuh"
#include "numeric.cuh"

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

}  // namespace hopper
