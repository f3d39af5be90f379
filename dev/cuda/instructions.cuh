// The instructions of the ladder that CUDA C++ does not offer, one small function each. Those of
// versions 4 and 5 run on compute capability 8.0 and newer, those of version 6 on 9.0 (sm_90a).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

using bf16 = __nv_bfloat16;

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

// A pointer into shared memory as the 32-bit number that the instructions below take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
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

// ---------------------------------------------------------------------------- tensor maps (host)

// Hopper's copies move boxes of 64 x 64 bf16: 64 rows of 128 bytes, 8 KB, with the 128-byte
// swizzle: the hardware stores the 16-byte piece p of row r at place p ^ (r % 8). A box must start
// at a multiple of 1024 bytes.
constexpr int kBox = 64;  // rows, and columns, of a box
constexpr int kBoxBytes = 64 * 64 * 2;

// The tensor map of a (batch, rows, width) array of bf16 in boxes of 64 x 64. Elements beyond an
// edge read as zero and are not written. The batch is its own dimension, so that a box at the end
// of a sample does not reach into the next one. The function that makes a map is in the driver. It
// is found through the runtime, so that we need not link with libcuda. Throws cudaError_t.
inline CUtensorMap tensor_map(const void* data, int batch, int rows, int width) {
  static void* const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
    return function;
  }();
  if (encode == nullptr) throw cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {cuuint64_t(width), cuuint64_t(rows), cuuint64_t(batch)};
  // bytes, of rows and samples
  const cuuint64_t strides[2] = {cuuint64_t(width) * 2, cuuint64_t(width) * rows * 2};
  const cuuint32_t box[3] = {kBox, kBox, 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw cudaErrorInvalidValue;
  return map;
}

// ---------------------------------------------------------------------------------------- barriers

// A barrier completes a phase when `count` arrivals and all expected bytes are in; then the next
// phase begins. Phases alternate between parity 0 and 1.
using Barrier = uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

// Makes the barriers' initial state visible to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives, and makes the phase wait for this many bytes of TMA copies.
__device__ __forceinline__ void barrier_arrive_expecting(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity is over. On a new barrier, the phase before the first
// (parity 1) counts as over. A barrier that never completes is a bug: after some seconds the kernel
// stops with an error instead of hanging.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
  for (int attempt = 0; attempt < 1 << 23; ++attempt) {
    uint32_t done;
    asm volatile(
        "{.reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2; "
        "selp.u32 %0, 1, 0, done;}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
    if (done) return;
  }
  __trap();
}

// __syncthreads() for `threads` of the block's threads; ids 1 to 15 (0 is __syncthreads itself).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------ bulk tensor copies

// Starts to copy the box at (column, row, sample) to shared memory. Its bytes count on the barrier
// when they have landed.
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap* map, Barrier* barrier,
                                         int column, int row, int sample) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(sample)
      : "memory");
}

// Starts to copy a box from shared memory to (column, row, sample).
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* shared, int column,
                                          int row, int sample) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(shared_address(shared)), "r"(column), "r"(row), "r"(sample)
      : "memory");
}

// Waits until this thread's store_box copies have read shared memory; the block may end after that.
__device__ __forceinline__ void finish_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Makes this thread's ordinary writes to shared memory visible to the copy engine.
__device__ __forceinline__ void publish_to_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8 x 8 matrices of bf16, the opposite of load_matrices: lane l addresses row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&values)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
      : "memory");
}

// ------------------------------------------------------------------------------------------- wgmma

// The descriptor of an operand for wgmma: boxes with the 128-byte swizzle, starting at `shared`.
//   K-major (rows of the operand are rows of the box, k runs along them): groups of 8 rows are 1024
//     bytes apart, and 16 of k are 32 bytes. `box_stride` is not used.
//   MN-major (k runs down the rows of the box, the operand's rows or columns along them;
//     "transposed" for wgmma): 8 of k are 1024 bytes apart, 16 of k 2048 bytes, and the next 64
//     rows or columns are in the box `box_stride` bytes further on.
__device__ __forceinline__ uint64_t operand(const void* shared, int box_stride) {
  const uint64_t address = (shared_address(shared) & 0x3ffff) >> 4;
  return address | static_cast<uint64_t>(box_stride >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

constexpr int kNextK = 32 >> 4;              // added to a K-major descriptor for the next 16 of k
constexpr int kNextKTransposed = 2048 >> 4;  // and to an MN-major one

// Needed before the first wgmma of a batch: the accumulators' registers are ready.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the newest kPending batches are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d (64 x N) = left (64 x 16) right (16 x N), plus the old d if `add`, by the 128 threads of a
// warpgroup. Thread t holds rows 16 * (t / 32) + (t % 32) / 4 and that + 8. Of every 8 columns it
// holds the two from 2 * (t % 4) on: d[4 * block + {0, 1}], and d[4 * block + {2, 3}] 8 rows
// further down. N is 128 or 256, given by the size of d.

#define WGMMA_NAMES_64                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, " \
  "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_128_MORE                                                                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "    \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "    \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "     \
  "%127"
#define WGMMA_8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_64(i)                                                                               \
  WGMMA_8(i), WGMMA_8(i + 8), WGMMA_8(i + 16), WGMMA_8(i + 24), WGMMA_8(i + 32), WGMMA_8(i + 40), \
      WGMMA_8(i + 48), WGMMA_8(i + 56)

__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t left, uint64_t right, bool add) {
  asm volatile(
      "{.reg .pred accumulate; setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_NAMES_64
      "}, %64, %65, accumulate, 1, 1, 0, 1;}\n"
      : WGMMA_64(0)
      : "l"(left), "l"(right), "r"(static_cast<int>(add))
      : "memory");
}

__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t left, uint64_t right, bool add) {
  asm volatile(
      "{.reg .pred accumulate; setp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" WGMMA_NAMES_64
      ", " WGMMA_NAMES_128_MORE "}, %128, %129, accumulate, 1, 1, 0, 1;}\n"
      : WGMMA_64(0), WGMMA_64(64)
      : "l"(left), "l"(right), "r"(static_cast<int>(add))
      : "memory");
}
