// Hopper's own instructions (compute capability 9.0, built for sm_90a), one small function each:
// bulk tensor copies (TMA), barriers in shared memory that count bytes (mbarrier), and matrix
// products that read shared memory (wgmma).
//
// All data moves in boxes of 64 x 64 bf16: 64 rows of 128 bytes, 8 KB, with the 128-byte swizzle:
// the hardware stores the 16-byte piece p of row r at place p ^ (r % 8). A box must start at a
// multiple of 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "tensor_core.cuh"

constexpr int kBox = 64;  // rows, and columns, of a box
constexpr int kBoxBytes = 64 * 64 * 2;

// ------------------------------------------------------------------------------ tensor maps (host)

// The tensor map of a (batch, rows, width) array of bf16 whose rows are `pitch` elements apart, in
// boxes of 64 x 64. Elements beyond an edge read as zero and are not written. The batch is its own
// dimension, so that a box at the end of a sample does not reach into the next one. The function
// that makes a map is in the driver. It is found through the runtime, so that we need not link with
// libcuda.
inline cudaError_t make_map(CUtensorMap* map, const bf16* data, int batch, int rows, int width,
                            int pitch) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  if (encode == nullptr) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess) return status;
    if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<Encode>(function);
  }
  const cuuint64_t sizes[3] = {cuuint64_t(width), cuuint64_t(rows), cuuint64_t(batch)};
  // bytes, of rows and samples
  const cuuint64_t strides[2] = {cuuint64_t(pitch) * 2, cuuint64_t(pitch) * rows * 2};
  const cuuint32_t box[3] = {kBox, kBox, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(data), sizes, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
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
      " [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(shared_address(shared)), "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row),
      "r"(sample)
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

// Prefetches the map.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

template <bool kLeftTransposed, bool kRightTransposed>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t left, uint64_t right, bool add) {
  asm volatile(
      "{.reg .pred accumulate; setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, accumulate, 1, 1, %67, %68;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(kLeftTransposed),
        "n"(kRightTransposed)
      : "memory");
}

template <bool kLeftTransposed, bool kRightTransposed>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t left, uint64_t right, bool add) {
  asm volatile(
      "{.reg .pred accumulate; setp.ne.b32 accumulate, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, accumulate, 1, 1, %131, %132;}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(left), "l"(right), "r"(static_cast<int>(add)), "n"(kLeftTransposed),
        "n"(kRightTransposed)
      : "memory");
}
