// The tile product of the portable kernels: 128 threads hold a 64 x 64 tile of the result, 8 x 4
// values each, and multiply slices of 64 x 16 and 16 x 64 that lie in shared memory as fp32.
#pragma once

#include "triangle.cuh"

namespace portable {

constexpr int kTile = 64;         // rows and columns of a result tile
constexpr int kDepth = 16;        // depth of a slice
constexpr int kThreads = 128;
// blocks resident on a multiprocessor: leaves 128 registers per thread, enough to avoid spills
constexpr int kBlocksResident = 4;
constexpr int kThreadRows = 8;
constexpr int kThreadColumns = 4;
constexpr int kThreadsAcross = kTile / kThreadColumns;  // 16

// A row of a slice holds 64 values and 4 of padding. float4 reads stay aligned, and threads that
// write one column of the slice (the transposing loads) have two-way bank conflicts, not
// sixteen-way.
constexpr int kPitch = kTile + 4;

struct Slices {
  alignas(16) float left[kDepth][kPitch];   // left[k][row]
  alignas(16) float right[kDepth][kPitch];  // right[k][column]
};

// Sums of more than kChunk products are built from partial sums of kChunk. The rounding error of a
// long chain grows with the square root of its length; that of two short chains is far smaller.
constexpr int kChunk = 128;

struct Accumulator {
  float part[kThreadRows][kThreadColumns] = {};
  float total[kThreadRows][kThreadColumns] = {};

  __device__ __forceinline__ void close_chunk() {
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        total[r][c] += part[r][c];
        part[r][c] = 0.0f;
      }
    }
  }
};

struct KeepAll {
  __device__ __forceinline__ bool operator()(int, int) const { return true; }
};

// Skips the products above the diagonal. Multiplying them by zero would not do: 0 * NaN is NaN, so
// a later token would affect an earlier one.
template <bool kTransposed>
struct KeepTriangle {
  int row;    // of the thread's first result
  int depth;  // of the slice's first product
  __device__ __forceinline__ bool operator()(int r, int k) const {
    return kTransposed ? depth + k >= row + r : depth + k <= row + r;
  }
};

// part += left^T right over one slice, in the order of k. (row, column) is the position of the
// thread's first result in the tile.
template <typename Keep>
__device__ __forceinline__ void multiply(const Slices& slices, int row, int column,
                                         Accumulator& sum, Keep keep) {
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    const float4 upper = *reinterpret_cast<const float4*>(&slices.left[k][row]);
    const float4 lower = *reinterpret_cast<const float4*>(&slices.left[k][row + 4]);
    const float4 across = *reinterpret_cast<const float4*>(&slices.right[k][column]);
    const float left[kThreadRows] = {upper.x, upper.y, upper.z, upper.w,
                                     lower.x, lower.y, lower.z, lower.w};
    const float right[kThreadColumns] = {across.x, across.y, across.z, across.w};
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
#pragma unroll
      for (int c = 0; c < kThreadColumns; ++c) {
        if (keep(r, k)) sum.part[r][c] = fmaf(left[r], right[c], sum.part[r][c]);
      }
    }
  }
}

__device__ __forceinline__ int thread_row() { return threadIdx.x / kThreadsAcross * kThreadRows; }
__device__ __forceinline__ int thread_column() {
  return threadIdx.x % kThreadsAcross * kThreadColumns;
}

}  // namespace portable
