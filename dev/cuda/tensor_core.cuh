// The instructions of versions 4 and 5, one small function each, and the loops over tiles that all
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

// ------------------------------------------------------------------------------------------- tiles

// A row-major array of which everything beyond the edges reads as zero. Its width is a multiple
// of 8.
struct Matrix {
  const bf16* values;
  int rows, width;

  __device__ const bf16* at(int row, int column) const {
    return values + static_cast<size_t>(row) * width + column;
  }
  __device__ bool inside(int row, int column) const { return row < rows && column < width; }
  __device__ float element(int row, int column) const {
    return inside(row, column) ? __bfloat162float(*at(row, column)) : 0.0f;
  }
  // 8 elements from a column that is a multiple of 8.
  __device__ uint4 vector(int row, int column) const {
    return inside(row, column) ? *reinterpret_cast<const uint4*>(at(row, column))
                               : make_uint4(0, 0, 0, 0);
  }
};

// tile[i][j] = source[row0 + i][column0 + j], kAcross wide, by all kThreads threads of the block,
// in fp32 or as it is.
template <int kAcross, int kThreads, int kDown, int kPitch, typename Value>
__device__ __forceinline__ void load_tile(Value (&tile)[kDown][kPitch], const Matrix& source,
                                          int row0, int column0) {
#pragma unroll
  for (int vector = threadIdx.x; vector < kDown * kAcross / 8; vector += kThreads) {
    const int i = vector / (kAcross / 8), j = vector % (kAcross / 8) * 8;
    const uint4 packed = source.vector(row0 + i, column0 + j);
    if constexpr (sizeof(Value) == 2) {
      *reinterpret_cast<uint4*>(&tile[i][j]) = packed;
    } else {
      float values[8];
      unpack(values, packed);
      float4* target = reinterpret_cast<float4*>(&tile[i][j]);
      target[0] = make_float4(values[0], values[1], values[2], values[3]);
      target[1] = make_float4(values[4], values[5], values[6], values[7]);
    }
  }
}

// tile[j][i] = source[row0 + i][column0 + j], kDown rows of the source. Rows of the tile are padded
// by 4 floats, which keeps these stores out of each other's banks.
template <int kDown, int kThreads, int kAcross, int kPitch>
__device__ __forceinline__ void load_transposed(float (&tile)[kAcross][kPitch],
                                                const Matrix& source, int row0, int column0) {
#pragma unroll
  for (int vector = threadIdx.x; vector < kDown * kAcross / 8; vector += kThreads) {
    const int i = vector / (kAcross / 8), j = vector % (kAcross / 8) * 8;
    float values[8];
    unpack(values, source.vector(row0 + i, column0 + j));
#pragma unroll
    for (int n = 0; n < 8; ++n) tile[j + n][i] = values[n];
  }
}

// The same in the background, to a swizzled tile of bf16.
template <int kDown, int kAcross, int kThreads>
__device__ __forceinline__ void copy_tile(bf16* tile, const Matrix& source, int row0, int column0) {
#pragma unroll
  for (int vector = threadIdx.x; vector < kDown * kAcross / 8; vector += kThreads) {
    const int i = vector / (kAcross / 8), j = vector % (kAcross / 8) * 8;
    const bool inside = source.inside(row0 + i, column0 + j);
    copy_async(&tile[swizzled<kAcross>(i, j)],
               inside ? source.at(row0 + i, column0 + j) : source.values, inside);
  }
}

// Version 3: the 8 rows and columns of a thread's elements in a tile of kRows x kColumns: 4 next to
// each other, and 4 half a tile further on.
template <int kRows, int kColumns>
__device__ __forceinline__ int register_row(int r) {
  return r / 4 * (kRows / 2) + threadIdx.x / (kColumns / 8) * 4 + r % 4;
}
template <int kColumns>
__device__ __forceinline__ int register_column(int c) {
  return c / 4 * (kColumns / 2) + threadIdx.x % (kColumns / 8) * 4 + c % 4;
}

// sum += left^T right for a thread's elements; both tiles have k as their row.
template <int kRows, int kColumns, int kDepth, int kLeftPitch, int kRightPitch>
__device__ __forceinline__ void multiply_registers(float (&sum)[8][8],
                                                   const float (&left)[kDepth][kLeftPitch],
                                                   const float (&right)[kDepth][kRightPitch]) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    float4 l[2], r[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] = *reinterpret_cast<const float4*>(&left[k][register_row<kRows, kColumns>(4 * half)]);
      r[half] = *reinterpret_cast<const float4*>(&right[k][register_column<kColumns>(4 * half)]);
    }
    const float down[8] = {l[0].x, l[0].y, l[0].z, l[0].w, l[1].x, l[1].y, l[1].z, l[1].w};
    const float across[8] = {r[0].x, r[0].y, r[0].z, r[0].w, r[1].x, r[1].y, r[1].z, r[1].w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[i][j] += down[i] * across[j];
    }
  }
}

// Versions 4 and 5: sum += left right for a warp's part of the tile, from `row` and `column` on.
// left_at(i, j) and right_at(i, j) are the places of a tile's elements; a tile lies with k as its
// column, or as its row (kByK), which ldmatrix then transposes.
template <int kDepth, bool kLeftByK, bool kRightByK, int kRowBlocks, int kColumnBlocks,
          typename Left, typename Right>
__device__ __forceinline__ void multiply_warp(float (&sum)[kRowBlocks][kColumnBlocks][4], int row,
                                              int column, Left left_at, Right right_at) {
  const int lane = threadIdx.x % 32;
  const int low = lane % 16, high = lane / 16 * 8;                       // of matrices one by one
  const int outer = lane / 16 * 8 + lane % 8, inner = lane / 8 % 2 * 8;  // of matrices two by two
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t left[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      const int i = row + 16 * r;
      if constexpr (kLeftByK)
        load_matrices_transposed(left[r], left_at(k + outer, i + inner));
      else
        load_matrices(left[r], left_at(i + low, k + high));
    }
#pragma unroll
    for (int c = 0; c < kColumnBlocks / 2; ++c) {
      const int j = column + 16 * c;
      uint32_t right[4];  // two operands of 16 x 8
      if constexpr (kRightByK)
        load_matrices_transposed(right, right_at(k + low, j + high));
      else
        load_matrices(right, right_at(j + outer, k + inner));
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        multiply_16x8x16(sum[r][2 * c], left[r], right[0], right[1]);
        multiply_16x8x16(sum[r][2 * c + 1], left[r], right[2], right[3]);
      }
    }
  }
}

// Version 5: load(step) starts a step's copies kStages - 1 steps before multiply(step) reads them.
template <int kStages, typename Load, typename Multiply>
__device__ __forceinline__ void run_pipeline(int steps, Load load, Multiply multiply) {
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(step);
    close_copy_group();  // also if empty, so that each step has exactly one group
  }
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();  // this thread's copies of `step` have arrived
    // all threads' copies have arrived, and all have read step - 1, whose buffer is loaded next
    __syncthreads();
    if (step + kStages - 1 < steps) load(step + kStages - 1);
    close_copy_group();
    multiply(step);
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
