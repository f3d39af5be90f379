// The instructions of versions 4 and 5, one small function each, and the index arithmetic that all
// versions share. Everything here runs on compute capability 8.0 and newer.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

// ----------------------------------------------------------------------------------- shared memory

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// A pointer into shared memory as the 32-bit number that the instructions below take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The place of element (row, column) in a tile whose rows hold kWidth elements, without padding.
// Shared memory has 32 banks of 4 bytes, so 8 pieces of 16 bytes can be read at once if they lie in
// different banks. ldmatrix reads one piece from each of 8 consecutive rows, which share banks in a
// plain layout. XOR with the row spreads them over all banks.
template <int kWidth>
__device__ __forceinline__ int swizzled(int row, int column) {
  static_assert(kWidth == 32 || kWidth % 64 == 0, "rows of 64 bytes, or of a multiple of 128");
  const int piece = column / 8;  // 8 bf16 = 16 bytes
  const int moved = kWidth == 32 ? piece ^ ((row / 2) % 4) : piece ^ (row % 8);
  return row * kWidth + moved * 8 + column % 8;
}

// -------------------------------------------------------------------------------- ldmatrix and mma

// Loads four 8 x 8 matrices of bf16. Lane l addresses row l % 8 of matrix l / 8 (16 bytes). From
// each matrix it receives the element [l / 4][2 * (l % 4)] and the one to its right: the layout of
// mma's operands.
__device__ __forceinline__ void load_matrices(uint32_t (&values)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed: lane l receives [2 * (l % 4)][l / 4] and the element below it.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&values)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum (16 x 8) += left (16 x 16) right (16 x 8). Lane l holds sum[l / 4][2 * (l % 4)], its right
// neighbour, and the same two 8 rows further down.
__device__ __forceinline__ void multiply_16x8x16(float (&sum)[4], const uint32_t (&left)[4],
                                                 uint32_t right0, uint32_t right1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// ---------------------------------------------------------------------------------------- cp.async

// Starts an asynchronous copy of 16 bytes from global to shared memory. If not `inside`, it writes
// zeros and reads nothing, but the address must still be valid.
__device__ __forceinline__ void copy_async(bf16* shared, const bf16* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(inside ? 16 : 0)
               : "memory");
}

// Commits the copies started since the last call as one group.
__device__ __forceinline__ void close_copy_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most this thread's newest kPending groups are still running.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ----------------------------------------------------------------------------------- small helpers

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// Two bf16 values in one register, the first in the lower half.
__device__ __forceinline__ uint32_t pack_pair(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// 16 bytes of bf16 as 8 floats.
__device__ __forceinline__ void unpack(float (&values)[8], uint4 packed) {
  const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(pairs[i]);
    values[2 * i + 1] = high_half(pairs[i]);
  }
}

// ------------------------------------------------------------------------------ order of the tiles

// Which tile a block computes. Blocks start roughly in the order of their index, so index 0 should
// be the heaviest tile: the light ones then fill the gaps at the end. Columns (tiles of channels,
// for all samples) come in groups. Within a group all row tiles run before the next group starts,
// so that the group's activations stay in L2 while every row tile reads them.
struct TileOrder {
  int row_tiles, columns, group;
};

struct Tile {
  int weight_rank;  // 0: the heaviest row tile
  int column;
};

__device__ __forceinline__ Tile tile_of(int block, const TileOrder& order) {
  const int group_blocks = order.row_tiles * order.group;
  const int first = block / group_blocks * order.group;
  const int width = min(order.group, order.columns - first);
  const int rest = block % group_blocks;
  return {rest / width, first + rest % width};
}
