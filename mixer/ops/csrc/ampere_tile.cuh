// The sm_80 set: the instructions that CUDA C++ does not offer, and how slices are multiplied.
// Asynchronous copies bring them to three stages of shared memory, and fragments are loaded from
// there and multiplied. One mma takes 32 bytes of depth, so a slice is two steps.
#pragma once

#include "tensor_tile.cuh"

namespace ampere {

using namespace tensor;

// A fragment of one warp: 16 rows of a factor and 32 bytes of depth (16 values), in four parts of 8
// rows and 16 bytes. Of each part, lane l holds 4 bytes: row l / 4, bytes 4
// (l % 4) ... The parts are in the order in which mma takes its registers. The right factor's rows
// are columns of the result, and its fragment serves two mma.
//
//               left: depth 0-15 B  16-31 B      right: depth 0-15 B  16-31 B
//     rows 0-7            part 0    part 2                    part 0    part 1
//     rows 8-15           part 1    part 3                    part 2    part 3
struct Fragment {
  uint32_t part[4];
};

// Which rows (0: 0-7, 1: 8-15) and which half of the depth a part holds.
__host__ __device__ constexpr int row_half(Side side, int part) {
  return side == kLeft ? part % 2 : part / 2;
}
__host__ __device__ constexpr int depth_half(Side side, int part) {
  return side == kLeft ? part / 2 : part % 2;
}

// ----------------------------------------------------------------------------------- shared memory

// The instructions below take addresses in shared memory as 32-bit numbers.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts an asynchronous copy of 16 bytes from global to shared memory. If not `valid`, it writes
// 16 zero bytes and does not read `global`.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

// Commits this thread's copies since the last commit as a group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the newest `kPending` groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four matrices of 8 rows by 16 bytes. Lane l gives the address of row l % 8 of matrix l / 8.
// Of each matrix it receives the 4 bytes at row l / 4, bytes 4 (l % 4) ...
__device__ __forceinline__ Fragment load_matrices(uint32_t shared) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3])
               : "r"(shared));
  return f;
}

// The same for 8 x 8 matrices of 16-bit values, each transposed: lane l receives rows 2 (l % 4) and
// 2 (l % 4) + 1 of column l / 4.
__device__ __forceinline__ Fragment load_matrices_transposed(uint32_t shared) {
  Fragment f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(f.part[0]), "=r"(f.part[1]), "=r"(f.part[2]), "=r"(f.part[3])
               : "r"(shared));
  return f;
}

// ---------------------------------------------------------------------------------------- products

// sum += left right, 16 x 8 values of the result. Lane l holds
//   sum[0], sum[1]: row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1; sum[2], sum[3]: the same
//   columns of row l / 4 + 8.
// right0, right1: parts 0 and 1, or 2 and 3, of the right fragment.
template <typename Element>
__device__ __forceinline__ void mma(float (&sum)[4], const Fragment& left, uint32_t right0,
                                    uint32_t right1);

#define MIXER_MMA(Element, shape_and_types)                                                        \
  template <>                                                                                      \
  __device__ __forceinline__ void mma<Element>(float (&sum)[4], const Fragment& left,              \
                                               uint32_t right0, uint32_t right1) {                 \
    asm("mma.sync.aligned." shape_and_types                                                        \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                         \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                   \
        : "r"(left.part[0]), "r"(left.part[1]), "r"(left.part[2]), "r"(left.part[3]),              \
          "r"(right0), "r"(right1));                                                               \
  }

MIXER_MMA(__half, "m16n8k16.row.col.f32.f16.f16.f32")
MIXER_MMA(__nv_bfloat16, "m16n8k16.row.col.f32.bf16.bf16.f32")
#undef MIXER_MMA

constexpr int kStages = 3;
constexpr int kMmaDepth = 16;
constexpr int kMmaDepthBytes = 32;
constexpr int kMmaSteps = kSliceDepth / kMmaDepth;
// 48 KB: the most that a kernel gets without asking
constexpr int kSharedBytes = kStages * kStageBytes;

// Copies a loader's vectors to a stage.
struct AsyncCopies {
  uint32_t stage;

  template <typename Layout>
  __device__ __forceinline__ void copy(Side side, int i, const void* global, bool inside) const {
    copy_async(stage + vector_offset<Layout>(side, i), global, inside);
  }
};

// --------------------------------------------------------------------------------------- fragments

// A warp's fragments of a factor are groups of 16 rows of a slice; `row` (a multiple of 16) counts
// from a first row. Each matrix of the load is a part, and lane l gives the address of row l % 8 of
// part l / 8. The part of the address that does not change from step to step is the lane's `own`
// offset, the one for the group that begins at `first_row`.
template <Side kSide>
__device__ __forceinline__ int own_offset(KMajor, int first_row) {
  const int part = lane() / 8;
  return KMajor::offset(first_row + row_half(kSide, part) * 8 + lane() % 8,
                        depth_half(kSide, part));
}

template <Side kSide>
__device__ __forceinline__ Fragment load_fragment(KMajor, uint32_t slice, int own, int row,
                                                  int step) {
  return load_matrices(slice + row * kSliceDepthBytes + (own ^ step * kMmaDepthBytes));
}

// The same if rows are contiguous: the matrix load transposes.
template <Side kSide>
__device__ __forceinline__ int own_offset(MnMajor, int first_row) {
  const int part = lane() / 8;
  const int offset =
      MnMajor::offset(depth_half(kSide, part) * 8 + lane() % 8, row_half(kSide, part));
  return add_to_offset(offset, first_row * 2);
}

template <Side kSide>
__device__ __forceinline__ Fragment load_fragment(MnMajor, uint32_t slice, int own, int row,
                                                  int step) {
  return load_matrices_transposed(slice + step * kMmaDepth * MnMajor::kRowBytes +
                                  add_to_offset(own, row * 2));
}

// ---------------------------------------------------------------------------------- multiplication

// A warp's part of the result: groups of 16 rows by 8 columns, in mma's layout.
struct Accumulator {
  float value[kWarpGroups][2 * kWarpGroups][4] = {};

  __device__ __forceinline__ float at(int group, int half, int block, int i) const {
    return value[group][block][2 * half + i];
  }
};

struct Fragments {
  Fragment left[kWarpGroups];
  Fragment right[kWarpGroups];
};

// Multiplies slices in order while later ones are copied. load(copies) starts copying the next
// slices, or nothing if none are left; multiply(fragments) uses the fragments of the next mma.
// During one product, the fragments of the next are loaded from shared memory and the slices after
// the next from global memory.
template <typename LeftLayout, typename RightLayout, int kColumnStep>
struct Pipeline {
  static_assert(kMmaSteps == 2, "fragments alternate between two buffers");

  uint32_t stages;
  int own_left, own_right;  // this lane's own offsets in the two slices of a stage
  uint32_t filling, reading;
  Fragments fragments[2];

  template <typename Load>
  __device__ __forceinline__ Pipeline(unsigned char* memory, int first_column, Load&& load)
      : stages(shared_address(memory)),
        own_left(own_offset<kLeft>(LeftLayout(), group_row(0))),
        own_right(kSliceBytes + own_offset<kRight>(RightLayout(), first_column)),
        filling(stages),
        reading(stages) {
    // The compiler does not repeat a shuffle, so it keeps the result. Otherwise it would compute
    // the offsets again in each step.
    own_left = __shfl_sync(0xffffffffu, own_left, read_lane());
    own_right = __shfl_sync(0xffffffffu, own_right, read_lane());
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) start_copies(load);
    wait_copies<kStages - 2>();
    __syncthreads();
    load_fragments(0);
  }

  // Multiplies the next `steps` slices.
  template <typename Load, typename Multiply>
  __device__ __forceinline__ void run(int steps, Load&& load, Multiply&& multiply) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      // The stage that is filled here was last read in the previous step, before that step's
      // barrier.
      start_copies(load);
      load_fragments(1);
      multiply(fragments[0]);

      reading = next_stage(reading);
      wait_copies<kStages - 2>();
      __syncthreads();  // every thread's copies for the next step have arrived
      load_fragments(0);  // after the last step it loads fragments that are not used
      multiply(fragments[1]);
    }
  }

  __device__ __forceinline__ uint32_t next_stage(uint32_t stage) const {
    return stage == stages + (kStages - 1) * kStageBytes ? stages : stage + kStageBytes;
  }

  // Commits a group of copies in every step, even an empty one, so that "all but the newest" always
  // means the same.
  template <typename Load>
  __device__ __forceinline__ void start_copies(Load&& load) {
    AsyncCopies copies = {filling};
    load(copies);
    commit_copies();
    filling = next_stage(filling);
  }

  // The fragments of a warp for one mma of the stage. Its column groups are kColumnStep apart.
  __device__ __forceinline__ void load_fragments(int mma_step) {
    Fragments& loaded = fragments[mma_step];
#pragma unroll
    for (int g = 0; g < kWarpGroups; ++g)
      loaded.left[g] =
          load_fragment<kLeft>(LeftLayout(), reading, own_left, g * kRowStep, mma_step);
#pragma unroll
    for (int g = 0; g < kWarpGroups; ++g)
      loaded.right[g] =
          load_fragment<kRight>(RightLayout(), reading, own_right, g * kColumnStep, mma_step);
  }
};

// ----------------------------------------------------------------------------------------- the set

template <typename Element_>
struct Set {
  using Element = Element_;
  using Accumulator = ampere::Accumulator;
  using Fragments = ampere::Fragments;
  template <typename LeftLayout, typename RightLayout, int kColumnStep>
  using Pipeline = ampere::Pipeline<LeftLayout, RightLayout, kColumnStep>;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr bool kIsHere = false;
#else
  static constexpr bool kIsHere = true;
#endif
  static constexpr int kSharedBytes = ampere::kSharedBytes;
  static constexpr int kMmaDepth = ampere::kMmaDepth;
  static constexpr bool kOneLoop = false;

  // Of each 16 x 8 values a lane holds two neighbours in each of two rows, kHalfRows apart. The
  // four lanes of a *quad*, whose numbers differ in kLowBit and kHighBit, hold a row.
  static constexpr int kHalfRows = 8;
  static constexpr int kLowBit = 1, kHighBit = 2;
  __device__ __forceinline__ static int value_row(int lane) { return lane / 4; }
  __device__ __forceinline__ static int quad_place(int lane) { return lane % 4; }

  // sum += left right for one group of 16 rows and one of 16 columns.
  template <typename LeftLayout, typename RightLayout>
  __device__ __forceinline__ static void multiply_groups(Accumulator& sum,
                                                         const Fragments& fragments, int row_group,
                                                         int column_group) {
    const Fragment& left = fragments.left[row_group];
    const Fragment& right = fragments.right[column_group];
    mma<Element>(sum.value[row_group][2 * column_group], left, right.part[0], right.part[1]);
    mma<Element>(sum.value[row_group][2 * column_group + 1], left, right.part[2], right.part[3]);
  }
};

}  // namespace ampere
