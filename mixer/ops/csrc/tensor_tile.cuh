// What the tensor core kernels of sm_70 and sm_80 share: 4 warps hold a 128 x 128 tile of the
// result in registers and multiply slices that lie in several stages of shared memory.
//
// Values have 16 bits. A slice of a factor is 128 rows by a depth of 32 values, 8 KB. (The rows of
// the left factor are rows of the result, those of the right factor its columns.)
//
// The kernels are templates of a set, volta::Set or ampere::Set<Element>, which has
//   kIsHere            whether this build's GPU has its instructions
//   Pipeline           brings slices to shared memory, and fragments of them to registers
//   Accumulator        a warp's part of the result
//   multiply_groups    adds one product of fragments to 16 x 16 values of it
//   value_row, quad_place and so on: where in the 16 x 16 a lane's values are
//   kOneLoop           whether a product's steps are one loop, which takes fewer registers
//
// A loader hands each vector of 16 bytes to a pipeline's `copies`, which have copy<Layout>(side, i,
// global, inside) for the i-th vector of this thread in the slice of the left or the right factor:
// the vector at `global`, or zeros if not `inside`; then `global` is not read.
#pragma once

#include <type_traits>

#include "numeric.cuh"

namespace tensor {

constexpr int kTile = 128;          // rows and columns of a result tile
constexpr int kThreads = 128;       // 2 x 2 warps
// per multiprocessor: one computes while the other waits or stores its tile
constexpr int kBlocksResident = 2;
constexpr int kVectorBytes = 16;    // bytes per copy
constexpr int kVector = 8;          // values per copy
constexpr int kSliceDepth = 32;
constexpr int kSliceDepthBytes = 64;
constexpr int kSliceBytes = kTile * kSliceDepthBytes;
constexpr int kStageBytes = 2 * kSliceBytes;  // the left factor's slice, then the right one's
constexpr int kVectorsPerThread = kSliceBytes / kVectorBytes / kThreads;  // of each slice

// a warp's part of the result: 4 x 4 groups of 16 x 16 values
constexpr int kWarpGroups = 4;
constexpr int kWarpTile = kWarpGroups * 16;

constexpr int kRowStep = 32;  // rows from a warp's group to its next

enum Side { kLeft, kRight };

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }

// The same, read again at each call. Values that are used outside the main loop, or rarely inside
// it, then occupy no registers in the loop.
__device__ __forceinline__ int read_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ int warp_row() { return threadIdx.x / 64; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % 2; }

// First row of a warp's group. The two rows of warps alternate every 16 rows. In a tile on the
// diagonal, where groups are skipped, all warps then have the same work, and so do the four tensor
// cores of a multiprocessor.
__device__ __forceinline__ int group_row(int group) { return group * kRowStep + warp_row() * 16; }

// ------------------------------------------------------------------------------------------ slices
//
// Vectors are written, and fragments read, as 8 times 16 bytes at once. To avoid bank conflicts,
// the 8 must lie in 8 different sixteenths of a 128-byte line. Hence the swizzle: the place of a
// vector in its line is XORed with bits of its depth (or row) that differ among the 8.

constexpr int kLineBytes = 128;

// The swizzled offset of the place `bytes` further along a row than offset `own`. Before swizzling,
// the two numbers must have no set bits in common. Within a line they are XORed; beyond it they are
// added, and become constants in the instructions.
__host__ __device__ __forceinline__ constexpr int add_to_offset(int own, int bytes) {
  return (own ^ (bytes & (kLineBytes - 1))) + (bytes & -kLineBytes);
}

// Depth is contiguous: slice[row][depth], 4 vectors per row, two rows per line.
struct KMajor {
  static constexpr int kVectorsAcross = kSliceDepthBytes / kVectorBytes;

  __host__ __device__ static constexpr int offset(int row, int vector) {
    return row * kSliceDepthBytes + (vector ^ (row / 2 % 4)) * kVectorBytes;
  }
};

// Rows are contiguous: slice[depth][row].
struct MnMajor {
  static constexpr int kVectorsAcross = kTile / kVector;
  static constexpr int kRowBytes = kTile * 2;

  __host__ __device__ static constexpr int offset(int depth, int vector) {
    return depth * kRowBytes + (vector ^ (depth % 8)) * kVectorBytes;
  }
};

// All threads fill a slice together: a thread's vectors lie in one column of vectors, kThreads /
// kVectorsAcross rows of the slice apart.
template <typename Layout>
__device__ __forceinline__ int vector_across() { return threadIdx.x % Layout::kVectorsAcross; }
template <typename Layout>
__device__ __forceinline__ int vector_down(int i) {
  return threadIdx.x / Layout::kVectorsAcross + i * (kThreads / Layout::kVectorsAcross);
}

// The place in a stage of this thread's i-th vector of a slice.
template <typename Layout>
__device__ __forceinline__ int vector_offset(Side side, int i) {
  return side * kSliceBytes + Layout::offset(vector_down<Layout>(i), vector_across<Layout>());
}

}  // namespace tensor
