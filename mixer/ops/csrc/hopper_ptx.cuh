// Hopper's own instructions (PTX ISA 8.0, sm_90a), one small function each: barriers in shared
// memory, the tensor memory accelerator (TMA), the warpgroup matrix product (wgmma) and moving
// registers between warpgroups.
//
// TMA always moves a *box* here: 64 rows of 128 bytes (64 values of 16 bits), 8 KB, aligned to 1024
// bytes. In shared memory the box has the 128-byte swizzle: the 16-byte chunk c of row r lies at
// chunk c ^ (r % 8). Reading one chunk of eight rows then touches eight different groups of banks.
// wgmma reads this layout directly.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "numeric.cuh"

namespace hopper {

constexpr int kBox = 64;                       // rows of a box, and its columns
constexpr int kBoxBytes = kBox * kBox * 2;     // of 16-bit values
constexpr int kClusterSize = 2;                // blocks that share an operand by multicast
constexpr int kWarpgroup = 128;                // threads

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------------------------------- clusters

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronizes all threads of all blocks of the cluster, and makes their writes to shared memory
// visible to each other.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Synchronizes the 128 threads of one of the warpgroups 0 .. 7. (Barrier 0 is __syncthreads'.)
__device__ __forceinline__ void warpgroup_sync(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(kWarpgroup) : "memory");
}

// --------------------------------------------------------------------------------------- mbarriers

// A phase of a barrier ends when all `arrivals` have come and all expected bytes have landed. A
// wait names the parity of the phase whose end it waits for.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes newly initialized barriers visible to TMA and to the other block of the cluster.
// cluster_sync() must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrives, and adds `bytes` that TMA will write to what the phase expects.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives at the same barrier of another block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(const uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(const uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Position in a ring of `kSlots` barriers: the slot, and the parity of the rounds so far.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int slots) {
    for (slot += slots; slot >= kSlots; slot -= kSlots) parity ^= 1;
  }
};

// --------------------------------------------------------------------------------------------- TMA

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads one box of a (batch, tokens, heads, channels) tensor, with kForAll to the same place in every
// block of the cluster; the bytes count on each block's own barrier. Coordinates are innermost
// first; elements outside the tensor are zero.
template <bool kForAll>
__device__ __forceinline__ void load_box(void* box, const CUtensorMap* map, uint64_t* barrier,
                                         int channel, int head, int token, int sample) {
  if (!kForAll) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(shared_address(box)), "l"(map), "r"(shared_address(barrier)), "r"(channel),
        "r"(head), "r"(token), "r"(sample)
        : "memory");
    return;
  }
  const uint16_t everyone = (1 << kClusterSize) - 1;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
      ::"r"(shared_address(box)), "l"(map), "r"(shared_address(barrier)), "r"(channel), "r"(head),
      "r"(token), "r"(sample), "h"(everyone)
      : "memory");
}

// Loads one box of the packed weight (matrices, rows, columns).
__device__ __forceinline__ void load_weight(void* box, const CUtensorMap* map, uint64_t* barrier,
                                            int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(shared_address(box)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row),
      "r"(matrix)
      : "memory");
}

// Stores a box; elements outside the tensor are not written.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* box, int channel,
                                          int head, int token, int sample) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      ::"l"(map), "r"(shared_address(box)), "r"(channel), "r"(head), "r"(token), "r"(sample)
      : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last `kPending` committed groups of this thread's stores have read their
// boxes.
template <int kPending>
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma, once a barrier
// follows.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --------------------------------------------------------------------------------------- registers

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ------------------------------------------------------------------------------------------- wgmma

// The lower half of an operand's descriptor for wgmma: the address of its first box (or of a place
// inside it), and the distance `next_box` in bytes to the next box along the rows (or columns) of
// the product. The distance matters only if those are contiguous in memory. Bits 0-13: address /
// 16; bits 16-29: distance / 16. Adding bytes / 16 moves the operand.
__device__ __forceinline__ uint32_t operand(uint32_t address, int next_box = kBoxBytes) {
  // masks out the rank of the block in its cluster
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(next_box) >> 4 << 16;
}

// The upper half is the same for all operands. Bits 32-45: distance between groups of 8 rows of 128
// bytes, / 16; bits 62-63: swizzle (1: 128 bytes).
#define MIXER_OPERAND_UPPER "0x40000040"

// Bytes / 16 from one slice (depth 16) of a box to the next: along a row, or 16 rows down if the
// depth runs along the rows.
template <bool kDepthOverRows>
__device__ __forceinline__ constexpr uint32_t slice_step() {
  return (kDepthOverRows ? 16 * 128 : 32) >> 4;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the sums above the wait: it does not know that wgmma
// writes them until then.
template <int kCount>
__device__ __forceinline__ void pin(float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define MIXER_4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define MIXER_16(v, i) MIXER_4(v, i), MIXER_4(v, i + 4), MIXER_4(v, i + 8), MIXER_4(v, i + 12)
#define MIXER_WGMMA_N128(type)                                                                     \
  asm volatile(                                                                                    \
      "{\n.reg .pred keep;\n.reg .b64 left, right;\nsetp.ne.b32 keep, %66, 0;\n"                   \
      "mov.b64 left, {%64, " MIXER_OPERAND_UPPER "};\n"                                            \
      "mov.b64 right, {%65, " MIXER_OPERAND_UPPER "};\n"                                           \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                             \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "          \
      "left, right, keep, 1, 1, %67, %68;\n}"                                                      \
      : MIXER_16(sum, 0), MIXER_16(sum, 16), MIXER_16(sum, 32), MIXER_16(sum, 48)                  \
      : "r"(left), "r"(right), "r"(accumulate), "n"(kLeftTransposed), "n"(kRightTransposed))

// sum (64 x 128, fp32) = left (64 x 16) right (16 x 128), added to sum if `accumulate`. An operand
// is transposed if its rows in shared memory run along the depth. For each group g of 8 columns a
// thread holds
//   sum[4 g + 0, 1]   row 16 * warp + lane / 4, columns 8 g + 2 (lane % 4) + 0, 1
//   sum[4 g + 2, 3]   the same columns, eight rows below
template <typename Element, int kLeftTransposed, int kRightTransposed>
__device__ __forceinline__ void wgmma_n128(float (&sum)[64], uint32_t left, uint32_t right,
                                           int accumulate) {
  if constexpr (std::is_same<Element, __half>::value) {
    MIXER_WGMMA_N128("f16");
  } else {
    MIXER_WGMMA_N128("bf16");
  }
}

#define MIXER_WGMMA_N8(type)                                                                       \
  asm volatile(                                                                                    \
      "{\n.reg .pred keep;\n.reg .b64 left, right;\nsetp.ne.b32 keep, %6, 0;\n"                    \
      "mov.b64 left, {%4, " MIXER_OPERAND_UPPER "};\n"                                             \
      "mov.b64 right, {%5, " MIXER_OPERAND_UPPER "};\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " "                               \
      "{%0, %1, %2, %3}, left, right, keep, 1, 1, 0, 0;\n}"                                        \
      : MIXER_4(sum, 0)                                                                            \
      : "r"(left), "r"(right), "r"(accumulate))

// The same with 8 columns.
template <typename Element>
__device__ __forceinline__ void wgmma_n8(float (&sum)[4], uint32_t left, uint32_t right,
                                         int accumulate) {
  if constexpr (std::is_same<Element, __half>::value) {
    MIXER_WGMMA_N8("f16");
  } else {
    MIXER_WGMMA_N8("bf16");
  }
}

#undef MIXER_WGMMA_N8
#undef MIXER_WGMMA_N128
#undef MIXER_16
#undef MIXER_4
#undef MIXER_OPERAND_UPPER

// --------------------------------------------------------------------------------------- fragments

// Four 8 x 8 matrices in a swizzled box: rows 16 * warp .. + 15, columns 16 * group .. + 15, in the
// order of wgmma's results: upper left, lower left, upper right, lower right. Lane l addresses row
// l % 8 of matrix l / 8. Returns the offset in the box for group 0; for other groups flip bits 5
// and 6: offset ^ group * 32.
__device__ __forceinline__ uint32_t fragment_offset() {
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
  return row * 128 + (((lane / 16) ^ (row % 8)) * 16);
}

__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(value[0]), "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

__device__ __forceinline__ void load_fragments(uint32_t address, uint32_t (&value)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address)
               : "memory");
}

}  // namespace hopper
