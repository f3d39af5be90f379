// What the sm_80 kernels share: 4 warps hold a 128 x 128 tile of the result in registers and multiply slices that
// asynchronous copies bring to shared memory, three stages deep.
//
// A slice of a factor is 128 rows (rows of the result for the left factor, its columns for the right one) by 64 bytes
// of depth, 8 KB for every type: 32 values of 16 bits or 16 of 32. One mma takes 32 bytes of depth, so a slice is two
// steps.
#pragma once

#include "ampere_mma.cuh"
#include "triangle.cuh"

namespace ampere {

constexpr int kTile = 128;          // rows and columns of a result tile
constexpr int kThreads = 128;       // 2 x 2 warps
constexpr int kBlocksResident = 2;  // on a multiprocessor: one computes while the other waits, or stores its tile
constexpr int kStages = 3;
constexpr int kVectorBytes = 16;  // what one copy moves
constexpr int kSliceDepthBytes = 64;
constexpr int kMmaDepthBytes = 32;
constexpr int kMmaSteps = kSliceDepthBytes / kMmaDepthBytes;
constexpr int kSliceBytes = kTile * kSliceDepthBytes;
constexpr int kStageBytes = 2 * kSliceBytes;  // the left factor's slice, then the right one's
constexpr int kSharedBytes = kStages * kStageBytes;  // 48 KB: what a kernel may have without asking
constexpr int kVectorsPerThread = kSliceBytes / kVectorBytes / kThreads;  // of each slice

constexpr int kWarpGroups = 4;              // a warp's part of the result: 4 x 4 groups of 16 x 16 values
constexpr int kWarpTile = kWarpGroups * 16;

// Sizes in values instead of bytes.
template <typename Element>
struct Sizes {
  static constexpr int kVector = kVectorBytes / sizeof(Element);
  static constexpr int kSliceDepth = kSliceDepthBytes / sizeof(Element);
  static constexpr int kMmaDepth = kMmaDepthBytes / sizeof(Element);
};

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_row() { return threadIdx.x / 64; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % 2; }

// First row of a warp's group. The two rows of warps take turns every 16 rows, so that in a tile on the diagonal, where
// groups are skipped, all warps have the same work (and with them the four tensor cores, one for each warp of a block).
__device__ __forceinline__ int group_row(int group) { return group * 32 + warp_row() * 16; }

// ---------------------------------------------------------------------------------------------- slices
//
// Copies write, and matrix loads read, 8 vectors of 16 bytes at a time; these must lie in 8 different sixteenths of a
// 128-byte line, or they wait for one another. Hence the swizzle: the place of a vector in its line is XORed with bits
// of its depth (or row) that differ among the 8.

constexpr int kLineBytes = 128;

// The swizzled offset of what lies `bytes` further along a row than what is at offset `own`, where no bit is set in
// both before swizzling: inside a line the two are XORed, beyond it they add (and become constants of instructions).
__host__ __device__ __forceinline__ constexpr int add_to_offset(int own, int bytes) {
  return (own ^ (bytes & (kLineBytes - 1))) + (bytes & -kLineBytes);
}

// Depth lies side by side: slice[row][depth], 4 vectors to a row, two rows to a line.
template <typename Element>
struct KMajor {
  static constexpr int kVectorsAcross = kSliceDepthBytes / kVectorBytes;

  __host__ __device__ static constexpr int offset(int row, int vector) {
    return row * kSliceDepthBytes + (vector ^ (row / 2 % 4)) * kVectorBytes;
  }

  // Rows [row, row + 16) at one mma's depth, row a multiple of 16. Each matrix of the load is a part; lane l tells
  // where row l % 8 of part l / 8 lies.
  template <Side kSide>
  __device__ __forceinline__ static Fragment load(uint32_t slice, int row, int step) {
    const int part = lane() / 8;
    const int own = offset(row_half(kSide, part) * 8 + lane() % 8, depth_half(kSide, part));
    return load_matrices(slice + row * kSliceDepthBytes + (own ^ step * kMmaDepthBytes));
  }
};

// Rows lie side by side: slice[depth][row]; 16-bit values are transposed by the matrix load.
template <typename Element>
struct MnMajor {
  static constexpr int kVectorsAcross = kTile * sizeof(Element) / kVectorBytes;
  static constexpr int kRowBytes = kTile * sizeof(Element);

  __host__ __device__ static constexpr int offset(int depth, int vector) {
    return depth * kRowBytes + (vector ^ depth % 8) * kVectorBytes;
  }

  template <Side kSide>
  __device__ __forceinline__ static Fragment load(uint32_t slice, int row, int step) {
    const int part = lane() / 8;
    const int own = offset(depth_half(kSide, part) * 8 + lane() % 8, row_half(kSide, part));
    const int row_offset = add_to_offset(own, row * static_cast<int>(sizeof(Element)));
    return load_matrices_transposed(slice + step * Sizes<Element>::kMmaDepth * kRowBytes + row_offset);
  }
};

// No instruction transposes 32-bit values: they are read one by one. A warp then reads 8 neighbours (2 vectors) of 4
// depths at once, and the swizzle gives each depth a pair of vectors of its own.
template <>
struct MnMajor<float> {
  static constexpr int kVectorsAcross = kTile * sizeof(float) / kVectorBytes;
  static constexpr int kRowBytes = kTile * sizeof(float);

  __host__ __device__ static constexpr int offset(int depth, int vector) {
    return depth * kRowBytes + (vector ^ depth % 4 * 2) * kVectorBytes;
  }

  template <Side kSide>
  __device__ __forceinline__ static Fragment load(uint32_t slice, int row, int step) {
    const int own = offset(lane() % 4, lane() / 16) + lane() / 4 % 4 * 4;
    Fragment f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int depth = step * Sizes<float>::kMmaDepth + depth_half(kSide, part) * 4;
      const int row_offset = add_to_offset(own, (row + row_half(kSide, part) * 8) * 4);
      f.part[part] = load_shared(slice + depth * kRowBytes + row_offset);
    }
    return f;
  }
};

// A slice is filled by all threads: a thread's vectors lie in one column of vectors, kThreads / kVectorsAcross rows of
// the slice apart.
template <typename Layout>
__device__ __forceinline__ int vector_across() { return threadIdx.x % Layout::kVectorsAcross; }
template <typename Layout>
__device__ __forceinline__ int vector_down(int i) {
  return threadIdx.x / Layout::kVectorsAcross + i * (kThreads / Layout::kVectorsAcross);
}

// ---------------------------------------------------------------------------------------------- shifted vectors

// The 16 bytes that start `bytes` (even, below 16) into low, high.
__device__ __forceinline__ uint4 extract(uint4 low, uint4 high, int bytes) {
  uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) word[i] = bytes & 8 ? word[i + 2] : word[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) word[i] = bytes & 4 ? word[i + 1] : word[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = bytes & 2 ? __funnelshift_r(word[i], word[i + 1], 16) : word[i];
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// The vector at channel + shift, zero outside the head. Copies must start at multiples of 16 bytes, so the two aligned
// vectors that hold it are read and cut. `width` is a multiple of a vector: each lies inside the head or outside.
template <typename Element>
__device__ __forceinline__ uint4 load_shifted(const Element* head, int channel, int shift, int width) {
  constexpr int kVector = Sizes<Element>::kVector;
  const int low_channel = channel + (shift & -kVector);  // rounds down, negative shifts too
  const int high_channel = low_channel + kVector;
  uint4 low = make_uint4(0, 0, 0, 0), high = low;
  if (low_channel >= 0 && low_channel < width) low = *reinterpret_cast<const uint4*>(head + low_channel);
  if (high_channel >= 0 && high_channel < width) high = *reinterpret_cast<const uint4*>(head + high_channel);
  return extract(low, high, (shift & (kVector - 1)) * static_cast<int>(sizeof(Element)));
}

// ---------------------------------------------------------------------------------------------- multiplication

// A warp's part of the result: groups of 16 rows by 8 columns, as mma has them.
struct Accumulator {
  float value[kWarpGroups][2 * kWarpGroups][4] = {};
};

struct Fragments {
  Fragment left[kWarpGroups];
  Fragment right[kWarpGroups];
};

// Rounds the factors of an fp32 product to tf32.
template <typename Element>
__device__ __forceinline__ void round_factors(Fragments&) {}
template <>
__device__ __forceinline__ void round_factors<float>(Fragments& fragments) {
#pragma unroll
  for (int group = 0; group < kWarpGroups; ++group) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      fragments.left[group].part[part] = round_to_tf32(fragments.left[group].part[part]);
      fragments.right[group].part[part] = round_to_tf32(fragments.right[group].part[part]);
    }
  }
}

// sum += left right for one group of 16 rows and one of 16 columns.
template <typename Element>
__device__ __forceinline__ void multiply_groups(Accumulator& sum, const Fragments& fragments, int row_group,
                                                int column_group) {
  const Fragment& left = fragments.left[row_group];
  const Fragment& right = fragments.right[column_group];
  mma<Element>(sum.value[row_group][2 * column_group], left, right.part[0], right.part[1]);
  mma<Element>(sum.value[row_group][2 * column_group + 1], left, right.part[2], right.part[3]);
}

template <typename Element>
__device__ __forceinline__ void multiply_row_group(Accumulator& sum, const Fragments& fragments, int row_group) {
#pragma unroll
  for (int column_group = 0; column_group < kWarpGroups; ++column_group) {
    multiply_groups<Element>(sum, fragments, row_group, column_group);
  }
}

// Runs through `steps` slices. load(stage) starts to fill the stage at that shared address with the next slices;
// multiply(mma_step, fragments) uses them. While one step is multiplied, the fragments of the next are on their way
// from shared memory and the slices of the next but one from global memory. A warp's column group g starts at column
// first_column + g * kColumnStep.
template <typename Element, typename LeftLayout, typename RightLayout, int kColumnStep, typename Load,
          typename Multiply>
__device__ __forceinline__ void run_pipeline(uint32_t stages, int steps, int first_column, Load&& load,
                                             Multiply&& multiply) {
  const auto load_fragments = [&](Fragments& fragments, uint32_t stage, int mma_step) {
#pragma unroll
    for (int g = 0; g < kWarpGroups; ++g) {
      fragments.left[g] = LeftLayout::template load<kLeft>(stage, group_row(g), mma_step);
    }
#pragma unroll
    for (int g = 0; g < kWarpGroups; ++g) {
      const int column = first_column + g * kColumnStep;
      fragments.right[g] = RightLayout::template load<kRight>(stage + kSliceBytes, column, mma_step);
    }
  };
  const auto next_stage = [&](uint32_t stage) {
    return stage == stages + (kStages - 1) * kStageBytes ? stages : stage + kStageBytes;
  };

  static_assert(kMmaSteps == 2, "fragments alternate between two buffers");

  // A group of copies is committed for each step, though it be empty, so that "all but the newest" is always the same.
  uint32_t filling = stages;
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) load(filling);
    commit_copies();
    filling = next_stage(filling);
  }
  Fragments fragments[2];
  uint32_t reading = stages;
  wait_copies<kStages - 2>();
  __syncthreads();
  load_fragments(fragments[0], reading, 0);

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // This stage was last read in the step before, and the barrier there came after those reads.
    if (step + kStages - 1 < steps) load(filling);
    commit_copies();
    filling = next_stage(filling);
    load_fragments(fragments[1], reading, 1);
    round_factors<Element>(fragments[0]);
    multiply(0, fragments[0]);

    reading = next_stage(reading);
    wait_copies<kStages - 2>();
    __syncthreads();  // every thread's copies for the next step have arrived
    load_fragments(fragments[0], reading, 0);  // after the last step it reads what nobody uses
    round_factors<Element>(fragments[1]);
    multiply(1, fragments[1]);
  }
}

}  // namespace ampere
