// Emulates a GPU on the CPU: threads, barriers, shuffles, clusters and launches. Kernels become
// functions of C++; sources.py puts calls to the emulators in place of what C++ does not have.
//
// The threads of a cluster of blocks are fibers. A random warp runs until it has to wait. The choice
// is unfair on purpose: some warps run for long, others get no turn for a long time, so that a
// missing barrier shows. What takes time on a GPU happens at a random later turn (`after`). Shared
// memory starts as NaN. All is random by seed, so a failure comes again.
//
// Not emulated: memory ordering (every access is seen at once by everybody), registers, time, bank
// conflicts, several clusters at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#undef __device__
#undef __host__
#undef __global__
#undef __forceinline__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __grid_constant__
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using std::max;
using std::min;

namespace emulator {

struct Index {
  int x;
};
inline Index thread_index, block_index, block_size, grid_size;
inline std::mt19937_64 random_bits;
inline uint64_t random_below(uint64_t limit) { return limit ? random_bits() % limit : 0; }

// -------------------------------------------------------------------------------------------- state

constexpr int kMostThreads = 4096, kMostBlocks = 8;
constexpr size_t kStackBytes = 64 << 10, kSharedBytes = 256 << 10;

// Where a group of threads waits for its last one; `generation` counts how often it has come.
struct Meeting {
  int arrived = 0, place = 0;
  uint64_t generation = 0;
};

struct Fiber {
  ucontext_t start;
  jmp_buf where;  // after the start, setjmp and longjmp switch fibers without system calls
  bool has_started, is_done;
  int block, thread, place;  // place: where it waits
  bool (*is_ready)(const void*);
  const void* argument;
};
inline std::unique_ptr<Fiber[]> fibers(new Fiber[kMostThreads]);
inline Fiber* current;  // or null, between the fibers
inline int block_threads, fiber_count, first_block;

struct Block {
  char* shared;
  Meeting sync, named[16];
};
inline Block blocks[kMostBlocks];  // of the cluster
inline Meeting cluster_meeting;

struct Warp {
  Meeting meeting;
  int live_lanes;
  uint64_t starves_until;
};
inline std::vector<Warp> warps;  // of the cluster
inline int warps_of_block() { return (block_threads + 31) / 32; }
inline int own_warp() { return current->block * warps_of_block() + current->thread / 32; }
inline Block& own_block() { return blocks[current->block]; }

[[noreturn]] inline void fail(const char* format, ...) {
  printf("EMULATOR FAIL block %d thread %d: ", current ? current->block : -1,
         current ? current->thread : -1);
  va_list values;
  va_start(values, format);
  vprintf(format, values);
  printf("\n");
  fflush(stdout);
  _exit(1);
}

// ------------------------------------------------------------------------------------------ waiting

inline jmp_buf scheduler;

// Other threads run until ready(), and for a while even if it is.
template <typename Ready>
void wait_until(const Ready& ready, int place = 0) {
  current->is_ready = [](const void* ready) { return (*static_cast<const Ready*>(ready))(); };
  current->argument = &ready;
  current->place = place;
  if (!_setjmp(current->where)) _longjmp(scheduler, 1);
}

// Lets other threads run, once in `odds` times.
inline void maybe_yield(int odds) {
  if (random_below(odds) == 0) wait_until([] { return true; });
}

// Waits for `count` threads, which must reach the same place. The last one does `work` for all.
template <typename Work>
void meet(Meeting& meeting, int count, int place, Work work) {
  if (meeting.arrived > 0 && meeting.place != place)
    fail("threads of a group wait at different places, %d and %d", meeting.place, place);
  meeting.place = place;
  if (++meeting.arrived < count) {
    const uint64_t before = meeting.generation;
    return wait_until([&meeting, before] { return meeting.generation != before; }, place);
  }
  meeting.arrived = 0;
  work();
  ++meeting.generation;
  maybe_yield(2);
}

template <typename Work>
void meet_warp(int place, Work work) {
  meet(warps[own_warp()].meeting, std::min(32, block_threads - current->thread / 32 * 32), place,
       work);
}
inline void meet_warp(int place) {
  meet_warp(place, [] {});
}
inline void meet_block(int place) {
  meet(own_block().sync, block_threads, place, [] {});
}
inline void meet_cluster(int place) {
  meet(cluster_meeting, fiber_count, place, [] {});
}

// The values of all threads of the warp, before any thread continues.
template <typename Value>
Value exchange(Value value, int from) {
  static Value given[kMostThreads];
  Value* const warp = given + own_warp() * 32;
  warp[current->thread % 32] = value;
  meet_warp(-1);
  const Value got = warp[from];
  meet_warp(-2);  // all have read
  return got;
}

// ------------------------------------------------------------------------------------------- events

struct Event {
  uint64_t due, key;  // a random key orders the events of one turn
  std::function<void()> happen;
};
inline std::vector<Event> events;  // a heap, the next in front
inline uint64_t turn;

inline bool is_later(const Event& a, const Event& b) {
  return a.due != b.due ? a.due > b.due : a.key > b.key;
}

inline void at(uint64_t due, std::function<void()> happen) {
  events.push_back({due, random_bits(), std::move(happen)});
  std::push_heap(events.begin(), events.end(), is_later);
}

inline void fire_due_events() {
  while (!events.empty() && events.front().due <= turn) {
    std::pop_heap(events.begin(), events.end(), is_later);
    const Event event = std::move(events.back());
    events.pop_back();
    current = nullptr;
    event.happen();
  }
}

// -------------------------------------------------------------------------------------- the scheduler

inline const std::function<void()>* kernel;
inline void (*end_thread)() = [] {};
inline void (*end_cluster)() = [] {};

inline void run_fiber() {
  (*kernel)();
  end_thread();
  current->is_done = true;
  _longjmp(scheduler, 1);
}

inline void go_on(Fiber& fiber) {
  current = &fiber;
  thread_index.x = fiber.thread;
  block_index.x = first_block + fiber.block;
  if (_setjmp(scheduler)) return;
  if (fiber.has_started) _longjmp(fiber.where, 1);
  fiber.has_started = true;
  setcontext(&fiber.start);
}

// Decides which warp runs next.
struct Scheduler {
  const uint64_t patience;  // how long a warp goes on, at most
  int favourite = 0;
  uint64_t favoured = 0;  // turns that it has left

  static bool can_run(const Fiber& fiber) {
    return !fiber.is_done && fiber.is_ready(fiber.argument);
  }
  static int first_fiber(int warp) {
    return warp / warps_of_block() * block_threads + warp % warps_of_block() * 32;
  }
  static int lanes(int warp) {
    return std::min(32, block_threads - warp % warps_of_block() * 32);
  }
  static bool can_run(int warp) {
    if (warps[warp].live_lanes == 0 || warps[warp].starves_until > turn) return false;
    const Fiber* lane = &fibers[first_fiber(warp)];
    return std::any_of(lane, lane + lanes(warp), [](const Fiber& f) { return can_run(f); });
  }

  // Now and then a warp, its warpgroup or its block gets no turn for a while.
  static void starve_some() {
    if (random_below(150) != 0) return;
    const int sizes[] = {1, 4, warps_of_block()}, size = sizes[random_below(3)];
    const uint64_t until = turn + random_below(random_below(4) ? 300 : 5000);
    const size_t begin = random_below(warps.size()) / size * size;
    for (size_t warp = begin; warp < std::min(begin + size, warps.size()); ++warp)
      warps[warp].starves_until = until;
  }

  // A warp that can run, or -1.
  int choose() {
    if (favoured > 0 && can_run(favourite)) {
      --favoured;
      return favourite;
    }
    favoured = random_below(16) ? 0 : random_below(patience);
    const int count = static_cast<int>(warps.size()), first = random_below(count);
    for (int i = 0; i < count; ++i) {
      if (can_run((first + i) % count)) return favourite = (first + i) % count;
    }
    return -1;
  }

  // Runs each lane that can run until it waits; now and then some are left out. Returns how many
  // ended.
  static int run(int warp) {
    const int count = lanes(warp), first = random_below(count);
    const bool leaves_out = random_below(8) == 0;
    int ended = 0, ran = 0;
    for (int i = 0; i < count; ++i) {
      Fiber& fiber = fibers[first_fiber(warp) + (first + i) % count];
      if (!can_run(fiber) || (ran > 0 && leaves_out && random_below(2))) continue;
      ++ran;
      go_on(fiber);
      ended += fiber.is_done;
    }
    warps[warp].live_lanes -= ended;
    return ended;
  }

  void run_all() {
    for (int live = fiber_count; live > 0;) {
      ++turn;
      fire_due_events();
      starve_some();
      const int warp = choose();
      if (warp >= 0) {
        live -= run(warp);
        continue;
      }
      const bool starves = std::any_of(warps.begin(), warps.end(),
                                       [](const Warp& warp) { return warp.starves_until > turn; });
      if (starves && (events.empty() || random_below(2))) {
        for (Warp& warp : warps) warp.starves_until = 0;
      } else if (!events.empty()) {
        turn = std::max(turn, events.front().due - 1);
      } else {
        for (int i = 0; i < fiber_count; ++i) {
          current = &fibers[i];
          if (!current->is_done) fail("DEADLOCK: it waits at %d", current->place);
        }
      }
    }
    current = nullptr;
    if (!events.empty()) fail("the blocks end before what they have started");
    end_cluster();
  }
};

inline void prepare_cluster() {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    const size_t bytes = kStackBytes * kMostThreads + kSharedBytes * kMostBlocks;
    stacks = static_cast<char*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    for (int block = 0; block < kMostBlocks; ++block)
      blocks[block].shared = stacks + kStackBytes * kMostThreads + kSharedBytes * block;
  }
  if (fiber_count > kMostThreads) fail("%d threads", fiber_count);
  for (int i = 0; i < fiber_count; ++i) {
    Fiber& fiber = fibers[i];
    fiber.has_started = fiber.is_done = false;
    fiber.block = i / block_threads;
    fiber.thread = i % block_threads;
    fiber.is_ready = [](const void*) { return true; };
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks + kStackBytes * i;
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, run_fiber, 0);
  }
  warps.assign(fiber_count / block_threads * warps_of_block(), Warp());
  for (size_t warp = 0; warp < warps.size(); ++warp)
    warps[warp].live_lanes = Scheduler::lanes(static_cast<int>(warp));
  for (int block = 0; block < fiber_count / block_threads; ++block)
    memset(blocks[block].shared, 0xff, kSharedBytes);
  turn = 0;
}

// Runs the grid, `together` blocks at a time, in any order.
inline void launch(int64_t blocks, int threads, const std::function<void()>& body,
                   int together = 1) {
  kernel = &body;
  block_threads = block_size.x = threads;
  fiber_count = threads * together;
  grid_size.x = static_cast<int>(blocks);
  std::vector<int> order;
  for (int block = 0; block < blocks; block += together) order.push_back(block);
  std::shuffle(order.begin(), order.end(), random_bits);
  for (int block : order) {
    first_block = block;
    prepare_cluster();
    const uint64_t patience[] = {1, 20, 2000};
    Scheduler{patience[random_below(3)]}.run_all();
  }
}

// The part of shared memory for a declaration with this number.
inline char* shared_memory(int declaration) { return own_block().shared + declaration * (32 << 10); }

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define __syncthreads() emulator::meet_block(__LINE__)
#define __syncwarp() emulator::meet_warp(__LINE__)
#define __shfl_sync(mask, value, lane) emulator::exchange(value, lane)
#define __shfl_xor_sync(mask, value, distance) \
  emulator::exchange(value, (threadIdx.x % 32) ^ (distance))
#define __builtin_assume(condition)
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
