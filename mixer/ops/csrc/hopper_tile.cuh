// What Hopper's kernels share: a ring of stages that TMA fills and several warpgroups multiply
// from.
#pragma once

#include "hopper_ptx.cuh"

namespace hopper {

// warpgroups that multiply, 64 rows by 128 columns each
constexpr int kMultipliers = 4;
constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;  // the last warpgroup loads
constexpr int kColumns = 128;
constexpr int kLoaderRegisters = 64;
constexpr int kMultiplierRegisters = 104;

// Full: the stage's bytes have landed. Empty: all multiplying warps have read it; with kShared
// those of both thread blocks of the cluster, since the loaders then write into both. A multiplier
// that leaves stages out needs more full barriers than there are stages: waiting tells apart a
// phase and the one before it, no more, so nobody may be two rounds off.
template <int kStages, bool kShared, int kFullBarriers = kStages>
struct Ring {
  static constexpr int kReaders = (kShared ? kClusterSize : 1) * kMultipliers * kWarpgroup / 32;

  uint64_t full[kFullBarriers];
  uint64_t empty[kStages];

  // Where two threads load, both arrive at the full barriers and, with loaded(), at the empty ones.
  __device__ __forceinline__ void init(int loaders) {
    for (int barrier = 0; barrier < kFullBarriers; ++barrier) barrier_init(&full[barrier], loaders);
    for (int stage = 0; stage < kStages; ++stage)
      barrier_init(&empty[stage], kReaders + (loaders - 1) * 2 * kClusterSize);
  }

  // By a loader that has done its part of a stage. A thread block that reads nothing of a stage is
  // not waited for by those who do; if its loaders then fell behind by a round of the ring,
  // arrivals of two rounds would meet in one phase.
  __device__ __forceinline__ void loaded(int stage) {
#pragma unroll
    for (int rank = 0; rank < kClusterSize; ++rank)
      barrier_arrive_at(shared_address(&empty[stage]), rank);
  }

  // By all lanes of a warp whose products on the stage have ended.
  __device__ __forceinline__ void release(int stage) {
    const int lane = threadIdx.x % 32;
    if (!kShared) {
      if (lane == 0) barrier_arrive(&empty[stage]);
    } else if (lane < kClusterSize) {
      barrier_arrive_at(shared_address(&empty[stage]), lane);
    }
  }

  // By one thread for the four warps of its warpgroup; one by one, since a phase may end in
  // between.
  __device__ __forceinline__ void release_for_warpgroup(int stage) {
#pragma unroll
    for (int i = 0; i < (kShared ? kClusterSize : 1) * kWarpgroup / 32; ++i) {
      barrier_arrive_at(shared_address(&empty[stage]), kShared ? i % kClusterSize : cluster_rank());
    }
  }
};

// sum += left (64 x 16 kSlices) right (16 kSlices x 128), asynchronously; starts from zero unless
// `accumulate`.
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

}  // namespace hopper
