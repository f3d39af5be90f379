// Runs the Hopper kernels of mixer/ops/csrc on the CPU, to find hangs, races and wrong barrier
// counts without a GPU.
//
// The kernels are compiled from their own source, as C++. sources.py makes two changes: the
// functions of hopper_ptx.cuh that hold PTX get bodies that call the functions below, and
// `kernel<<<...>>>(arguments)` becomes launch(). This header, which every emulated file includes
// first, defines the rest: CUDA's keywords, threadIdx, __syncthreads and so on.
//
// What is emulated
//   - A cluster of two thread blocks, one after the other through the grid. Each CUDA thread is a
//     fiber with a stack of its own, and the scheduler decides at random who goes on. It also
//     starves warps, warpgroups, loaders and blocks for a long time: a kernel has to be right for
//     all of these orders.
//   - mbarriers, exactly: arrivals, announced bytes, phases, waiting by parity (which cannot tell a
//     phase from the second next). An arrival that no phase expects is an error; so is a barrier
//     not initialised, overwritten or unbalanced at the end.
//   - TMA. A load announces nothing and does not wait: the box turns into NaN at once and the
//     values come later, at a random time, which tells its barrier. A store reads its
//     box at a random later time; so does an arrival at the other block arrive later. Tensors end
//     where their maps say: reads beyond are zero, writes beyond are left out.
//   - wgmma: reads its operands, through descriptors and swizzle, and writes its sums at a random
//     later time, in order. A stage released too early is therefore overwritten under it. ldmatrix
//     and stmatrix, warp by warp.
//   - fence.proxy.async: TMA over or from ordinary writes to shared memory that no fence has
//     followed is an error.
//   - Collectives: lanes of a warp that meet at different ones are an error. A state in which
//     nobody can go on is a deadlock.
//
// What is not emulated
//   - Memory ordering: every access is seen at once by everybody. Registers, setmaxnreg, occupancy,
//     time, bank conflicts.
//   - More than one cluster at a time; clusters share nothing but the inputs. The order in which
//     wgmma adds: the test cases take small integers, whose sums are exact in any order.
//   - Only the forms of the instructions that the kernels use: boxes of 64 x 64 values of 16 bits,
//     swizzled by 128 bytes.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include "../emulated_cuda.h"

#undef __cluster_dims__
#undef __grid_constant__
#define __cluster_dims__(...)
#define __grid_constant__

namespace emulator {

// Prints the message, then ends the process with status 1.
[[noreturn]] void fail(const char* format, ...);
#define EMULATOR_CHECK(condition)                                                                  \
  do {                                                                                             \
    if (!(condition)) emulator::fail("%s:%d: not so: %s", __FILE__, __LINE__, #condition);         \
  } while (0)

constexpr int kMostSharedBytes = 232448;  // that a thread block of Hopper can have

extern std::mt19937_64 random_bits;

// Runs all blocks of a kernel. A kernel without shared memory has no clusters; its threads run one
// after the other.
void launch(int blocks, int threads, int shared_bytes, const std::function<void()>& kernel);

// ----------------------------------------------------------------------------------- what PTX does

uint32_t cluster_rank();
void cluster_sync();
void block_sync();
void named_barrier(int id, int threads);
void warp_sync();

void barrier_init(uint32_t barrier, uint32_t arrivals);
void barrier_arrive(uint32_t barrier, uint32_t arrivals);
void barrier_arrive_expect(uint32_t barrier, uint32_t bytes);
void barrier_arrive_at(uint32_t barrier, uint32_t rank);
void barrier_wait(uint32_t barrier, uint32_t parity);

void check_map(const CUtensorMap* map);
// `rank` dimensions; `for_all`: into every block of the cluster.
void load_box(uint32_t box, const CUtensorMap* map, uint32_t barrier, bool for_all, int rank,
              int c0, int c1, int c2, int c3);
void store_box(const CUtensorMap* map, uint32_t box, int c0, int c1, int c2, int c3);
void commit_stores();
void wait_stores_read(int pending);
void fence_async_proxy();

void wgmma_fence();
void wgmma(float* sum, int columns, bool is_half, bool left_transposed, bool right_transposed,
           uint32_t left, uint32_t right, bool accumulate);
void wgmma_commit();
void wgmma_wait(int pending);
void stmatrix(uint32_t address, const uint32_t* value);
void ldmatrix(uint32_t address, uint32_t* value);

char* dynamic_shared();
uint32_t shared_address(const void* pointer);

// ------------------------------------------------------------------------------- what CUDA C++ has

extern int current_thread, current_block, grid_blocks;

struct ThreadIndex {
  struct { operator unsigned() const { return current_thread; } } x;
};
struct BlockIndex {
  struct { operator unsigned() const { return current_block; } } x;
};
struct GridSize {
  struct { operator unsigned() const { return grid_blocks; } } x;
};

template <typename Value>
Value load_read_only(const Value* pointer) {
  EMULATOR_CHECK(reinterpret_cast<uintptr_t>(pointer) % sizeof(Value) == 0);
  return *pointer;
}

// The driver's cuTensorMapEncodeTiled.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                      CUtensorMapFloatOOBfill fill);

}  // namespace emulator

#define threadIdx (emulator::ThreadIndex())
#define blockIdx (emulator::BlockIndex())
#define gridDim (emulator::GridSize())
#define __syncthreads() emulator::block_sync()
#define __syncwarp() emulator::warp_sync()
#define __cvta_generic_to_shared(pointer) emulator::shared_address(pointer)
#define __ldg(pointer) emulator::load_read_only(pointer)
#define dlopen(name, flags) nullptr
#define dlsym(library, name) reinterpret_cast<void*>(&emulator::encode_tiled)
#define cudaFuncSetAttribute(kernel, attribute, bytes)                                             \
  ((bytes) <= emulator::kMostSharedBytes ? cudaSuccess : cudaErrorInvalidValue)
#define cudaGetLastError() cudaSuccess
