// The sm_80 instructions that CUDA C++ does not offer: asynchronous copies, matrix loads and tensor
// core products. Each wrapper is one PTX instruction, with the layout of its registers described
// beside it.
#pragma once

#include "tensor_tile.cuh"

namespace ampere {

// A fragment of one warp: 16 rows of a factor and 32 bytes of depth (16 values of 16 bits, or 8 of
// 32), in four parts of 8 rows and 16 bytes. Of each part, lane l holds 4 bytes: row l / 4, bytes 4
// (l % 4) ... The parts are in the order in which mma takes its registers. The right factor's rows
// are columns of the result, and its fragment serves two mma.
//
//               left: depth 0-15 B  16-31 B      right: depth 0-15 B  16-31 B
//     rows 0-7            part 0    part 2                    part 0    part 1
//     rows 8-15           part 1    part 3                    part 2    part 3
struct Fragment {
  uint32_t part[4];
};

using namespace tensor;

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

__device__ __forceinline__ uint32_t load_shared(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared));
  return value;
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

// sum += left right, 16 x 8 values. Lane l holds
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
MIXER_MMA(float, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef MIXER_MMA

// Rounds to the nearest tf32 (10 bits of mantissa), ties away from zero. The mma itself would
// truncate, which biases the result.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(value)));
  return rounded;
}

}  // namespace ampere
