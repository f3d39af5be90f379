// Emulates a GPU on the CPU for kernels with one-dimensional blocks: threads, barriers, shuffles
// and launches.
//
// The threads of a block are fibers. A random warp runs until it has to wait; some warps run for
// long, others take turns, so that a missing barrier shows. Shared memory starts as NaN. Not
// emulated: time, registers, bank conflicts.
#pragma once

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <memory>

#include "../emulated_cuda.h"

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads() emulator::meet(emulator::kBlock, __LINE__)
#define __builtin_assume(condition)
#define __syncwarp() emulator::meet(emulator::kWarp, __LINE__)

namespace emulator {

struct Index {
  int x;
};
Index thread_index, block_index;
std::mt19937_64 random_bits;

constexpr int kMostThreads = 256, kStackBytes = 256 << 10;
enum Group { kBlock, kWarp };

struct Fiber {
  ucontext_t start;
  // after the start, setjmp and longjmp switch fibers without system calls
  jmp_buf place;
  std::vector<char> stack;
  bool has_started, is_done, is_waiting;
  Group group;
  int line;  // where it waits
};
Fiber fibers[kMostThreads];
jmp_buf scheduler;
int threads;
alignas(128) unsigned char shared[96 << 10];

void go_on(int thread) {
  thread_index.x = thread;
  if (_setjmp(scheduler)) return;
  if (fibers[thread].has_started) _longjmp(fibers[thread].place, 1);
  fibers[thread].has_started = true;
  setcontext(&fibers[thread].start);
}

void wait() {
  Fiber& me = fibers[thread_index.x];
  me.is_waiting = true;
  if (!_setjmp(me.place)) _longjmp(scheduler, 1);
}

// Waits for all threads of the block or the warp, which must reach the same place. The last one
// does `work` for all.
template <typename Work>
void meet(Group group, int line, Work work) {
  Fiber& me = fibers[thread_index.x];
  me.group = group;
  me.line = line;
  const int begin = group == kWarp ? thread_index.x / 32 * 32 : 0,
            end = group == kWarp ? begin + 32 : threads;
  bool all = true;
  for (int i = begin; i < end; ++i) all = all && (i == thread_index.x || fibers[i].is_waiting);
  if (!all) return wait();
  for (int i = begin; i < end; ++i) {
    if (fibers[i].is_done || fibers[i].group != group || fibers[i].line != line) {
      printf("threads %d and %d of a group wait at different places\n", thread_index.x, i);
      exit(1);
    }
    fibers[i].is_waiting = false;
  }
  work();
}
void meet(Group group, int line) { meet(group, line, [] {}); }

// The values of all threads of the warp, before any thread continues.
template <typename Value>
Value exchange(Value value, int from) {
  static Value given[kMostThreads];
  given[thread_index.x] = value;
  meet(kWarp, -1);
  const Value got = given[thread_index.x / 32 * 32 + from];
  meet(kWarp, -2);  // all have read
  return got;
}

const std::function<void()>* kernel;
void run_fiber() {
  (*kernel)();
  Fiber& me = fibers[thread_index.x];
  me.is_done = me.is_waiting = true;
  me.line = 0;
  _longjmp(scheduler, 1);
}

void run_block() {
  memset(shared, 0xff, sizeof(shared));
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.has_started = fiber.is_done = fiber.is_waiting = false;
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, run_fiber, 0);
  }
  const int warps = (threads + 31) / 32, patience[] = {1, 64, 4096};
  const int turns = patience[random_bits() % 3];  // that one warp has before the others, about
  int start = 0;
  for (;;) {
    if (random_bits() % turns == 0) start = random_bits() % warps;
    bool went_on = false;
    for (int w = 0; w < warps && !went_on; ++w) {
      const int warp = (start + w) % warps;
      for (int i = warp * 32; i < std::min(warp * 32 + 32, threads); ++i) {
        if (fibers[i].is_waiting) continue;
        go_on(i);
        went_on = true;
      }
    }
    if (went_on) continue;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].is_done) continue;
      printf("thread %d waits for ever at line %d\n", i, fibers[i].line);
      exit(1);
    }
    return;
  }
}

void launch(int64_t blocks, int block_threads, const std::function<void()>& body) {
  threads = block_threads;
  kernel = &body;
  for (block_index.x = 0; block_index.x < blocks; ++block_index.x) run_block();
}

}  // namespace emulator

#define __shfl_sync(mask, value, lane) emulator::exchange(value, lane)
#define __shfl_xor_sync(mask, value, distance) \
  emulator::exchange(value, (threadIdx.x % 32) ^ (distance))
template <typename Value>
void __stcg(Value* place, Value value) { *place = value; }
template <typename Value>
Value __ldcs(const Value* place) { return *place; }
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
inline cudaError_t emulated_last_error() { return cudaSuccess; }
#define cudaGetLastError emulated_last_error
