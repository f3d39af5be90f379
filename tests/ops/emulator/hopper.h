// What Hopper's PTX does, to find hangs, races and wrong barrier counts without a GPU.
//
//   - mbarriers, exactly: arrivals, announced bytes, phases, waiting by parity (which cannot tell a
//     phase from the second next). An arrival that no phase expects is an error; so is a barrier not
//     initialised, overwritten or unbalanced at the end.
//   - TMA. A load announces nothing and does not wait: the box turns into NaN at once and the values
//     come later, which tells its barrier. A store reads its box later; so does an arrival at the
//     other block arrive later. Tensors end where their maps say: reads beyond are zero, writes
//     beyond are left out.
//   - wgmma: reads its operands, through descriptors and swizzle, and writes its sums later, in
//     order. A stage released too early is therefore overwritten under it.
//   - fence.proxy.async: TMA over or from ordinary writes to shared memory that no fence has
//     followed is an error.
//
// Not emulated: the order in which wgmma adds (the test cases take small integers, whose sums are
// exact in any order), and forms of the instructions that the kernels do not use: boxes are 64 x 64
// values of 16 bits, swizzled by 128 bytes.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include "threads.h"

namespace emulator {

constexpr int kClusterBlocks = 2, kMostSharedBytes = 232448, kSharedBegin = 1024;
constexpr int kBoxRows = 64, kRowBytes = 128, kBoxBytes = kBoxRows * kRowBytes, kChunk = 16;
// found in memory where an mbarrier is, and at the start of a tensor map
constexpr uint64_t kMagic = 0xfeedfacecafebeefull;

// An address is an offset in a block's shared memory, and the block's rank in the bits above.
inline uint32_t shared_address(const void* pointer) {
  const int64_t offset = static_cast<const char*>(pointer) - own_block().shared;
  if (offset < kSharedBegin || offset >= int64_t(kSharedBytes))
    fail("a pointer outside of this block's shared memory");
  return offset | current->block << 24;
}
inline uint32_t own_offset(uint32_t address, uint32_t alignment) {
  if (address >> 24 != uint32_t(current->block)) fail("address %x is another block's", address);
  const uint32_t offset = address & 0xffffff;
  if (offset % alignment) fail("shared address %u is misaligned", offset);
  return offset;
}
// Kernels align it themselves.
inline char* dynamic_shared() {
  return own_block().shared + kSharedBegin + 16 * (first_block / kClusterBlocks % 64);
}

// When something ends: in each cluster all loads, stores and so on take about as long.
enum Kind { kLoad, kStore, kArrival, kProduct };
inline int longest[4] = {40, 40, 40, 40};
inline uint64_t delay(Kind kind) {
  const uint64_t turns = random_below(longest[kind]);
  return turn + (random_below(12) ? turns : turns * 10);
}

// ---------------------------------------------------------------------------------------- mbarriers

struct Barrier {
  int expected = 0, pending = 0;  // arrivals of a phase, and those still to come in this one
  int64_t bytes = 0;              // announced less landed
  uint64_t phase = 0;
};
inline Barrier barriers[kMostBlocks][kSharedBytes / 8];

inline Barrier& barrier_at(int block, uint32_t offset) {
  if (*reinterpret_cast<uint64_t*>(blocks[block].shared + offset) != kMagic)
    fail("barrier @%d not initialised, or overwritten", offset);
  return barriers[block][offset / 8];
}

inline void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
}

inline void arrive(int block, uint32_t offset, int arrivals) {
  Barrier& barrier = barrier_at(block, offset);
  if (arrivals < 1 || arrivals > barrier.pending) {
    fail("barrier @%d of block %d: %d arrivals, %d pending of %d (phase %ld bytes %ld)", offset,
         block, arrivals, barrier.pending, barrier.expected, long(barrier.phase),
         long(barrier.bytes));
  }
  barrier.pending -= arrivals;
  end_phase_if_complete(barrier);
}

// What a thread has started and not seen end.
struct Started {
  int remote_arrivals = 0;
  std::deque<std::shared_ptr<int>> store_groups;  // stores of each that have not read their box
  std::shared_ptr<int> open_group = std::make_shared<int>(0);
  std::vector<short*> unfenced;  // its ordinary writes
  int products = 0;
  bool is_fenced = false;  // wgmma.fence since the last wait
};
inline Started started[kMostThreads];
inline Started& own() { return started[current->block * block_threads + current->thread]; }

// An arrival at the own block, or the cluster's barrier, releases what the thread did before,
// including its arrivals at the other block.
inline void wait_for_remote_arrivals() {
  const Started& mine = own();
  if (mine.remote_arrivals > 0) wait_until([&mine] { return mine.remote_arrivals == 0; });
}

inline void barrier_init(uint32_t address, uint32_t arrivals) {
  const uint32_t offset = own_offset(address, 8);
  auto& word = *reinterpret_cast<uint64_t*>(own_block().shared + offset);
  if (word == kMagic) fail("barrier initialised twice");
  word = kMagic;
  Barrier& barrier = barriers[current->block][offset / 8] = Barrier();
  barrier.expected = barrier.pending = arrivals;
}

// Arrives, and announces bytes.
inline void barrier_arrive(uint32_t address, uint32_t arrivals, uint32_t bytes) {
  wait_for_remote_arrivals();
  maybe_yield(2);
  const uint32_t offset = own_offset(address, 8);
  barrier_at(current->block, offset).bytes += bytes;
  arrive(current->block, offset, arrivals);
  maybe_yield(2);
}

inline void barrier_arrive_at(uint32_t address, uint32_t rank) {
  const uint32_t offset = own_offset(address, 8);
  if (rank >= kClusterBlocks) fail("no block %u in the cluster", rank);
  if (int(rank) == current->block) return arrive(rank, offset, 1);
  int& remote = ++own().remote_arrivals;
  at(delay(kArrival), [=, &remote] {
    arrive(rank, offset, 1);
    --remote;
  });
  maybe_yield(4);
}

// Passes if the phase before the current one has that parity: a barrier does not remember earlier
// phases.
inline void barrier_wait(uint32_t address, uint32_t parity) {
  const Barrier& barrier = barrier_at(current->block, own_offset(address, 8));
  const auto passes = [&barrier, parity] { return ((barrier.phase - 1) & 1) == parity; };
  passes() ? maybe_yield(8) : wait_until(passes);
}

// --------------------------------------------------------------------------------------------- TMA

struct Map {
  int rank;
  char* data;
  int64_t size[5], stride[5];  // stride in bytes
  uint32_t box[5];
};

// The driver's cuTensorMapEncodeTiled.
inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                             const cuuint64_t* sizes, const cuuint64_t* strides,
                             const cuuint32_t* box, const cuuint32_t* steps,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  bool is_valid = rank >= 3 && rank <= 5 && data && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                  interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && box[0] * 2 == kRowBytes &&
                  swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
                  fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  Map made = {static_cast<int>(rank), static_cast<char*>(data)};
  for (unsigned i = 0; is_valid && i < rank; ++i) {
    made.size[i] = sizes[i];
    made.box[i] = box[i];
    made.stride[i] = i > 0 ? strides[i - 1] : 2;
    is_valid = sizes[i] >= 1 && sizes[i] <= 1ull << 32 && steps[i] == 1 &&
               (i == 0 || (strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40));
  }
  auto* words = reinterpret_cast<uint64_t*>(map);
  words[0] = kMagic;
  words[1] = reinterpret_cast<uint64_t>(new Map(made));  // for as long as this process lives
  return is_valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline const Map& map_of(const CUtensorMap* map) {
  const auto* words = reinterpret_cast<const uint64_t*>(map);
  if (words[0] != kMagic) fail("not a tensor map");
  return *reinterpret_cast<const Map*>(words[1]);
}

struct Box {
  const Map& map;
  int block;
  uint32_t offset;
  int coordinate[4];

  // The 16-byte chunk of a row, swizzled.
  char* chunk(int row, int chunk) const {
    return blocks[block].shared + offset + row * kRowBytes + (chunk ^ (row % 8)) * kChunk;
  }
  // For each row: its number, its place in the tensor, and how many bytes of it are inside.
  template <typename Action>
  void each_row(Action action) const {
    for (int row = 0; row < kBoxRows; ++row) {
      const int64_t left = map.size[0] - coordinate[0];
      bool is_inside = left > 0 && coordinate[0] >= 0;
      int64_t place = int64_t(coordinate[0]) * 2;
      for (int i = 1; i < map.rank; ++i) {
        const int64_t at = coordinate[i] + (map.box[i] == kBoxRows ? row : 0);
        is_inside = is_inside && at >= 0 && at < map.size[i];
        place += at * map.stride[i];
      }
      action(row, map.data + place, is_inside ? 2 * std::min<int64_t>(kBoxRows, left) : 0);
    }
  }
};

// By address / 16: whether somebody wrote there without a fence since.
inline short unfenced[kMostBlocks][kSharedBytes / kChunk];

inline Box make_box(const CUtensorMap* map, int block, uint32_t address, int c0, int c1, int c2,
                    int c3) {
  const Box box = {map_of(map), block, own_offset(address, 1024), {c0, c1, c2, c3}};
  if (c0 < 0 && c0 > -kBoxRows) fail("a box that begins before the tensor and ends inside");
  for (int i = 0; i < kBoxBytes / kChunk; ++i) {
    if (unfenced[block][box.offset / kChunk + i])
      fail("TMA over or from ordinary writes without a proxy fence");
  }
  return box;
}

inline void load_box(uint32_t address, const CUtensorMap* map, uint32_t barrier, bool for_all,
                     int c0, int c1, int c2, int c3 = 0) {
  maybe_yield(2);
  const uint32_t barrier_offset = own_offset(barrier, 8);
  for (int block = 0; block < kClusterBlocks; ++block) {
    if (!for_all && block != current->block) continue;
    const Box box = make_box(map, block, address, c0, c1, c2, c3);
    // from now on the hardware may write at any time
    memset(blocks[block].shared + box.offset, 0xff, kBoxBytes);
    at(delay(kLoad), [=] {
      box.each_row([&](int row, const char* source, int bytes) {
        char values[kRowBytes] = {};
        if (bytes > 0) memcpy(values, source, bytes);
        for (int i = 0; i < 8; ++i) memcpy(box.chunk(row, i), values + i * kChunk, kChunk);
      });
      Barrier& full = barrier_at(block, barrier_offset);
      full.bytes -= kBoxBytes;
      end_phase_if_complete(full);
    });
  }
  maybe_yield(2);
}

inline void store_box(const CUtensorMap* map, uint32_t address, int c0, int c1, int c2, int c3) {
  const Box box = make_box(map, current->block, address, c0, c1, c2, c3);
  const std::shared_ptr<int> group = own().open_group;
  ++*group;
  at(delay(kStore), [=] {
    box.each_row([&](int row, char* target, int bytes) {
      char values[kRowBytes];
      for (int i = 0; i < 8; ++i) memcpy(values + i * kChunk, box.chunk(row, i), kChunk);
      if (bytes > 0) memcpy(target, values, bytes);
    });
    --*group;
  });
  maybe_yield(2);
}

inline void commit_stores() {
  own().store_groups.push_back(own().open_group);
  own().open_group = std::make_shared<int>(0);
}

inline void wait_stores_read(size_t pending) {
  auto& groups = own().store_groups;
  for (; groups.size() > pending; groups.pop_front()) {
    const std::shared_ptr<int> group = groups.front();
    wait_until([&group] { return *group == 0; });
  }
}

inline void fence_async_proxy() {
  for (short* place : own().unfenced) {
    if (*place == current->thread + 1) *place = 0;
  }
  own().unfenced.clear();
}

// ---------------------------------------------------------------------------------------- matrices

// Each lane addresses a row of 16 bytes and holds two values of each of the four 8 x 8 matrices.
struct LaneMatrix {
  char* row;
  uint32_t* value;
};
inline LaneMatrix lane_matrices[kMostThreads];

// Calls action(in shared memory, in a lane's register) for all 128 pairs of values.
template <typename Action>
void move_matrices(int place, uint32_t offset, uint32_t* value, Action action) {
  LaneMatrix* const lanes = lane_matrices + own_warp() * 32;
  lanes[current->thread % 32] = {own_block().shared + offset, value};
  meet_warp(place, [&] {
    for (int i = 0; i < 128; ++i)
      action(lanes[i / 32 * 8 + i / 4 % 8].row + i % 4 * 4, &lanes[i % 32].value[i / 32]);
  });
}

inline void stmatrix(uint32_t address, const uint32_t* value) {
  const uint32_t offset = own_offset(address, kChunk);
  move_matrices(-11, offset, const_cast<uint32_t*>(value),
                [](char* place, const uint32_t* pair) { memcpy(place, pair, 4); });
  // A fence covers the writes of its own thread. Here the row belongs to the lane that addresses
  // it, because all lanes fence alike.
  short& writer = unfenced[current->block][offset / kChunk];
  writer = current->thread + 1;
  own().unfenced.push_back(&writer);
}

inline void ldmatrix(uint32_t address, uint32_t* value) {
  move_matrices(-12, own_offset(address, kChunk), value,
                [](const char* place, uint32_t* pair) { memcpy(pair, place, 4); });
}

// ------------------------------------------------------------------------------------------- wgmma

// One warp's part of a wgmma: 16 rows.
struct Product {
  int columns;
  bool is_half, left_transposed, right_transposed, accumulate;
  uint32_t left, right;
  float* sum[32] = {};  // of each lane
  int lanes = 0;        // that have come

  bool same_as(const Product& other) const {
    return columns == other.columns && left == other.left && right == other.right &&
           accumulate == other.accumulate && left_transposed == other.left_transposed &&
           right_transposed == other.right_transposed;
  }
};
struct Products {
  std::deque<Product> running;  // in order, without the finished ones
  int done = 0;
  std::vector<int> group_ends;  // committed groups, each the number of products up to its end
  uint64_t last_due = 0;
};
inline Products products[kMostThreads / 32];

// All values of 16 bits, as numbers: [0] as bf16, [1] as fp16.
struct ValueTable {
  float value[2][65536];

  ValueTable() {
    for (int i = 0; i < 65536; ++i) {
      value[0][i] = __uint_as_float(uint32_t(i) << 16);
      value[1][i] = __half2float(__half(__half_raw{static_cast<unsigned short>(i)}));
    }
  }
};
inline const ValueTable table;

// Reads `count` rows (of the left operand) or columns (of the right one) from `first` on, with a
// depth of 16, through the lower half of a descriptor. The value at (depth, index) goes to
// out[depth * depth_step + index * index_step].
inline void fetch(int block, uint32_t descriptor, bool is_transposed, int first, int count,
                  bool is_half, float* out, int depth_step, int index_step) {
  if (descriptor & 0xc000c000) fail("descriptor %x: bits outside of the fields", descriptor);
  const uint32_t start = (descriptor & 0x3fff) << 4, next_box = (descriptor >> 16 & 0x3fff) << 4;
  if (start % (is_transposed ? 1024 : 32)) fail("operand at %u", start);
  const auto copy = [&](uint32_t address, float* to, int step) {  // 8 values
    // the swizzle XORs the chunk with the row within groups of 8, using the address alone
    address ^= (address >> 7 & 7) << 4;
    uint16_t bits[8];
    memcpy(bits, blocks[block].shared + address, sizeof bits);
    for (int i = 0; i < 8; ++i) to[i * step] = table.value[is_half][bits[i]];
  };
  if (!is_transposed) {  // a row of memory is a row of the operand
    for (int index = 0; index < count; ++index) {
      const uint32_t row = start + (first + index) / 8 * 1024 + (first + index) % 8 * kRowBytes;
      for (int half = 0; half < 2; ++half)
        copy(row + half * kChunk, out + half * 8 * depth_step + index * index_step, depth_step);
    }
    return;
  }
  for (int depth = 0; depth < 16; ++depth) {  // rows of memory run along the depth
    const uint32_t row = start + depth / 8 * 1024 + depth % 8 * kRowBytes;
    for (int index = 0; index < count; index += 8) {
      const int place = first + index;
      copy(row + place / 64 * next_box + place % 64 * 2,
           out + depth * depth_step + index * index_step, index_step);
    }
  }
}

inline void execute(int warp, const Product& product) {
  static float left[16][16], right[16][128], sum[16][128];
  const int block = warp / warps_of_block(), columns = product.columns;
  fetch(block, product.left, product.left_transposed, 16 * (warp % 4), 16, product.is_half,
        &left[0][0], 1, 16);
  fetch(block, product.right, product.right_transposed, 0, columns, product.is_half, &right[0][0],
        128, 1);
  // calls move(a lane's sum, its place in the 16 rows)
  const auto each_sum = [&](auto move) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < columns / 2; ++i) {
        move(product.sum[lane][i],
             sum[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2]);
      }
    }
  };
  each_sum([&](float own, float& place) { place = product.accumulate ? own : 0.0f; });
  for (int row = 0; row < 16; ++row) {
    for (int depth = 0; depth < 16; ++depth) {
      for (int column = 0; column < columns; ++column)
        sum[row][column] += left[row][depth] * right[depth][column];
    }
  }
  each_sum([](float& own, float place) { own = place; });
}

inline void wgmma_fence() { own().is_fenced = true; }

// Lanes arrive one by one; the product starts when the last has arrived. The products of a warp run
// in order.
inline void wgmma(float* sum, const Product& product) {
  if (!own().is_fenced) fail("wgmma without wgmma.fence");
  const int warp = own_warp();
  Products& all = products[warp];
  const size_t place = own().products++ - all.done;
  if (place == all.running.size()) all.running.push_back(product);
  Product& shared = all.running[place];
  if (!shared.same_as(product)) fail("lanes disagree on a wgmma");
  shared.sum[current->thread % 32] = sum;
  if (++shared.lanes < 32) return;
  all.last_due = std::max(all.last_due, delay(kProduct));
  at(all.last_due, [warp, &all] {
    execute(warp, all.running.front());
    all.running.pop_front();
    ++all.done;
  });
}

inline void wgmma_commit() {
  Products& all = products[own_warp()];
  meet_warp(-13, [&all] { all.group_ends.push_back(all.done + int(all.running.size())); });
}

inline void wgmma_wait(int pending) {
  const Products& all = products[own_warp()];
  meet_warp(-14);
  const int groups = int(all.group_ends.size()) - pending;
  const int end = groups > 0 ? all.group_ends[groups - 1] : 0;
  wait_until([&all, end] { return all.done >= end; });
  own().is_fenced = false;
}

// ------------------------------------------------------------------------- the cluster, the launch

inline uint32_t cluster_rank() { return current->block; }
inline void cluster_sync() {
  wait_for_remote_arrivals();
  meet_cluster(-15);
}
inline void warpgroup_sync(int warpgroup) {
  if (warpgroup < 0 || warpgroup > 7) fail("no barrier for warpgroup %d", warpgroup);
  meet(own_block().named[warpgroup], 128, -16, [] {});
}

// Nothing that a thread has started may outlive it, and no announced byte may be missing.
inline void check_thread() {
  for (const auto& group : own().store_groups) {
    if (*group > 0) fail("a thread ends before its stores have read their box");
  }
  if (own().remote_arrivals || *own().open_group) fail("a thread ends before what it has started");
  fence_async_proxy();
  own() = Started();
}
inline void check_cluster() {
  static const int scales[] = {0, 4, 40, 400, 4000};
  for (int& most : longest) most = scales[random_below(5)];
  for (Products& warp : products) warp = Products();
  for (int block = 0; block < fiber_count / block_threads; ++block) {
    for (uint32_t offset = 0; offset < kSharedBytes; offset += 8) {
      const bool is_barrier = *reinterpret_cast<uint64_t*>(blocks[block].shared + offset) == kMagic;
      if (is_barrier && barriers[block][offset / 8].bytes != 0) fail("announced bytes never came");
    }
  }
}
inline const bool has_checks = (end_thread = check_thread, end_cluster = check_cluster, true);

}  // namespace emulator

#define dlopen(name, flags) nullptr
#define dlsym(library, name) reinterpret_cast<void*>(&emulator::encode_tiled)
#define cudaFuncSetAttribute(kernel, attribute, bytes) \
  ((bytes) <= emulator::kMostSharedBytes ? cudaSuccess : cudaErrorInvalidValue)
