// The sm_70 set: the tensor core instruction mma.m8n8k4, and how slices are multiplied. They pass
// from global memory through registers, which hold the next step's slices while this one is
// multiplied, to two stages of shared memory. A fragment takes a depth of 8, so a slice is four
// steps.
#pragma once

#include "tensor_tile.cuh"

namespace volta {

using namespace tensor;

// A warp has four *quad pairs* (pair q: lanes 4 q ... 4 q + 3, and these + 16). Each multiplies its
// own 8 x 4 by 4 x 8 values in one mma.m8n8k4.
//
// A fragment of one warp: 16 rows of a factor (for the right one, columns of the result) and a
// depth of 8, in two parts of depth 4 for two mma. Each quad pair has half of the rows, chosen by q
// % 2 for the left factor and by q / 2 for the right one, so that together the four multiply 16 x
// 16. Of its pair's 8 rows a lane holds, in each part,
//   if depth is contiguous: one row, a depth of four; if rows are contiguous: four rows at one
//   depth (lane % 4).
struct Fragment {
  uint2 part[2];
};

// Which rows of the 16 a quad pair has: four from 4 half on (lanes below 16), four from 8 + 4 half
// on (the other lanes).
__device__ __forceinline__ int half(Side side, int lane) {
  return side == kLeft ? lane / 4 % 2 : lane / 8 % 2;
}
__device__ __forceinline__ int first_row(Side side, int lane) {
  return lane / 16 * 8 + half(side, lane) * 4;
}

// sum += left right for one part: 16 x 16 values per warp, 8 per lane.
template <typename LeftLayout, typename RightLayout>
__device__ __forceinline__ void mma(float (&sum)[8], uint2 left, uint2 right);

#define MIXER_MMA(LeftLayout, RightLayout, layouts)                                                \
  template <>                                                                                      \
  __device__ __forceinline__ void mma<LeftLayout, RightLayout>(float (&sum)[8], uint2 left,        \
                                                               uint2 right) {                      \
    asm("mma.sync.aligned.m8n8k4." layouts ".f32.f16.f16.f32 "                                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "                                 \
        "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                        \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]),      \
          "+f"(sum[6]), "+f"(sum[7])                                                               \
        : "r"(left.x), "r"(left.y), "r"(right.x), "r"(right.y));                                   \
  }

MIXER_MMA(KMajor, MnMajor, "row.row")
MIXER_MMA(MnMajor, MnMajor, "col.row")
MIXER_MMA(KMajor, KMajor, "row.col")
#undef MIXER_MMA

using Element = __half;

constexpr int kStages = 2;
constexpr int kMmaDepth = 8;
constexpr int kMmaSteps = kSliceDepth / kMmaDepth;
#if __CUDA_ARCH__ >= 800
// newer GPUs, where these kernels only run in tests, need registers to emulate m8n8k4
constexpr int kUnrolledSteps = 1;
#else
// the fragments of the next step are read while this one is multiplied
constexpr int kUnrolledSteps = kMmaSteps;
#endif
// 32 KB: two blocks fit in the 64 KB of sm_75 as well
constexpr int kSharedBytes = kStages * kStageBytes;

// Holds a loader's vectors until they are written to a stage.
struct HeldCopies {
  uint4 vectors[2][kVectorsPerThread];

  template <typename Layout>
  __device__ __forceinline__ void copy(Side side, int i, const void* global, bool inside) {
    vectors[side][i] = inside ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
  }

  template <typename LeftLayout, typename RightLayout>
  __device__ __forceinline__ void write(unsigned char* stage) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      *reinterpret_cast<uint4*>(stage + vector_offset<LeftLayout>(kLeft, i)) = vectors[kLeft][i];
      *reinterpret_cast<uint4*>(stage + vector_offset<RightLayout>(kRight, i)) = vectors[kRight][i];
    }
  }
};

// --------------------------------------------------------------------------------------- fragments

// Rows [row, row + 16) at one step's depth (row is a multiple of 16): each lane reads one vector of
// its row. The 8 lanes that read at once have 8 neighbouring rows, or 4 rows twice, so the swizzle
// prevents bank conflicts.
template <Side kSide>
__device__ __forceinline__ Fragment load_fragment(KMajor, const unsigned char* slice,
                                                  int row, int step) {
  const int own = KMajor::offset(first_row(kSide, lane()) + lane() % 4, 0);
  const uint4 vector =
      *reinterpret_cast<const uint4*>(slice + row * kSliceDepthBytes + (own ^ step * kVectorBytes));
  return {{make_uint2(vector.x, vector.y), make_uint2(vector.z, vector.w)}};
}

// The same if rows are contiguous: half a vector at each of two depths. The 16 lanes that read at
// once have 4 depths, which the swizzle separates, and either both halves of a vector or the same
// half twice.
template <Side kSide>
__device__ __forceinline__ Fragment load_fragment(MnMajor, const unsigned char* slice,
                                                  int row, int step) {
  Fragment fragment;
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int own = MnMajor::offset(part * 4 + lane() % 4, lane() / 16);
    const int row_offset = add_to_offset(own, row * 2) + half(kSide, lane()) * 8;
    const unsigned char* place = slice + step * kMmaDepth * MnMajor::kRowBytes + row_offset;
    fragment.part[part] = *reinterpret_cast<const uint2*>(place);
  }
  return fragment;
}

// ---------------------------------------------------------------------------------- multiplication

// A warp's part of the result, in groups of 16 x 16.
struct Accumulator {
  float value[kWarpGroups][kWarpGroups][8] = {};

  __device__ __forceinline__ float at(int group, int half, int block, int i) const {
    return value[group][block / 2][block % 2 * 4 + 2 * half + i];
  }
};

struct Fragments {
  Fragment left[kWarpGroups];
  Fragment right[kWarpGroups];
};

// Multiplies slices in order. load(copies) reads the next slices, or nothing if none are left;
// multiply(fragments) uses the fragments of one step. While a slice is multiplied, the vectors of
// the next are loaded from global memory. A warp's column group g starts at column first_column + g
// * kColumnStep.
template <typename LeftLayout, typename RightLayout, int kColumnStep>
struct Pipeline {
  unsigned char* stages;
  int first_column;
  int reading = 0;  // stage
  HeldCopies copies;

  template <typename Load>
  __device__ __forceinline__ Pipeline(unsigned char* memory, int first_column, Load&& load)
      : stages(memory), first_column(first_column) {
    load(copies);
    copies.write<LeftLayout, RightLayout>(stages);
  }

  // Multiplies the next `steps` slices.
  template <typename Load, typename Multiply>
  __device__ __forceinline__ void run(int steps, Load&& load, Multiply&& multiply) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      const unsigned char* const slices = stages + reading * kStageBytes;
      __syncthreads();  // this step's slices are written, those of the step before have been read
      load(copies);
#pragma unroll kUnrolledSteps
      for (int mma_step = 0; mma_step < kMmaSteps; ++mma_step) {
        Fragments fragments;
#pragma unroll
        for (int g = 0; g < kWarpGroups; ++g) {
          const int column = first_column + g * kColumnStep;
          fragments.left[g] = load_fragment<kLeft>(LeftLayout(), slices, group_row(g), mma_step);
          fragments.right[g] =
              load_fragment<kRight>(RightLayout(), slices + kSliceBytes, column, mma_step);
        }
        multiply(fragments);
      }
      reading = (reading + 1) % kStages;
      copies.write<LeftLayout, RightLayout>(stages + reading * kStageBytes);
    }
  }
};

// ----------------------------------------------------------------------------------------- the set

struct Set {
  using Element = volta::Element;
  using Accumulator = volta::Accumulator;
  using Fragments = volta::Fragments;
  template <typename LeftLayout, typename RightLayout, int kColumnStep>
  using Pipeline = volta::Pipeline<LeftLayout, RightLayout, kColumnStep>;

  static constexpr bool kIsHere = true;
  static constexpr int kSharedBytes = volta::kSharedBytes;
  static constexpr int kMmaDepth = volta::kMmaDepth;
  static constexpr bool kOneLoop = true;

  // As ampere::Set has them: of the four pairs that a lane has in 16 x 16 values, the second lies
  // two rows below the first, and the others 8 columns to the right of these.
  static constexpr int kHalfRows = 2;
  static constexpr int kLowBit = 2, kHighBit = 8;
  __device__ __forceinline__ static int value_row(int lane) {
    return first_row(kLeft, lane) + lane % 2;
  }
  __device__ __forceinline__ static int quad_place(int lane) {
    return half(kRight, lane) * 2 + lane / 2 % 2;
  }

  // sum += left right for one group of 16 rows and one of 16 columns.
  template <typename LeftLayout, typename RightLayout>
  __device__ __forceinline__ static void multiply_groups(Accumulator& sum,
                                                         const Fragments& fragments, int row_group,
                                                         int column_group) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      mma<LeftLayout, RightLayout>(sum.value[row_group][column_group],
                                   fragments.left[row_group].part[part],
                                   fragments.right[column_group].part[part]);
    }
  }
};

}  // namespace volta
