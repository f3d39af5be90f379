// What Hopper's kernels share: a ring of stages that TMA fills and several warpgroups multiply from.
#pragma once

#include "hopper_ptx.cuh"

namespace hopper {

// Full: the stage's bytes have landed. Empty: all multiplying warps have read it, those of kBlocks thread blocks: of one, or of
// all of the cluster where the loaders write into all. A multiplier that leaves stages out needs more full barriers than there
// are stages: waiting tells apart a phase and the one before it, no more, so nobody may be two rounds off.
template <int kStages, int kBlocks, int kMultipliers, int kFullBarriers = kStages>
struct Ring {
  static constexpr int kReaders = kBlocks * kMultipliers * kWarpgroup / 32;

  uint64_t full[kFullBarriers];
  uint64_t empty[kStages];

  // Where two threads load, both arrive at the full barriers and, with loaded(), at the empty ones.
  __device__ __forceinline__ void init(int loaders) {
    for (int barrier = 0; barrier < kFullBarriers; ++barrier) barrier_init(&full[barrier], loaders);
    for (int stage = 0; stage < kStages; ++stage) barrier_init(&empty[stage], kReaders + (loaders - 1) * 2 * kBlocks);
  }

  // By a loader that has done its part of a stage. A thread block that reads nothing of a stage is not waited for by those who
  // do; if its loaders then fell behind by a round of the ring, arrivals of two rounds would meet in one phase.
  __device__ __forceinline__ void loaded(int stage) {
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) barrier_arrive_at(shared_address(&empty[stage]), rank);
  }

  // By all lanes of a warp whose products on the stage have ended.
  __device__ __forceinline__ void release(int stage) {
    const int lane = threadIdx.x % 32;
    if (kBlocks == 1) {
      if (lane == 0) barrier_arrive(&empty[stage]);
    } else if (lane < kBlocks) {
      barrier_arrive_at(shared_address(&empty[stage]), lane);
    }
  }

  // By one thread for the four warps of its warpgroup; one by one, since a phase may end in between.
  __device__ __forceinline__ void release_for_warpgroup(int stage) {
#pragma unroll
    for (int i = 0; i < kBlocks * kWarpgroup / 32; ++i) {
      barrier_arrive_at(shared_address(&empty[stage]), kBlocks > 1 ? i % kBlocks : cluster_rank());
    }
  }
};

// sum += left (64 x 64) right (64 x kColumns), asynchronously; starts from zero unless `accumulate`.
template <typename Element, int kColumns, bool kLeftTransposed, bool kRightTransposed>
__device__ __forceinline__ void multiply_box(float (&sum)[kColumns / 2], uint32_t left, uint32_t right, bool accumulate) {
#pragma unroll
  for (int slice = 0; slice < kBox / 16; ++slice) {
    wgmma<Element, kColumns, kLeftTransposed, kRightTransposed>(sum, left + slice * slice_step<kLeftTransposed>(),
                                                                right + slice * slice_step<kRightTransposed>(),
                                                                accumulate || slice > 0);
  }
}

}  // namespace hopper
