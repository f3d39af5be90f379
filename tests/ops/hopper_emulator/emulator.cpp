// The emulator; emulator.h says what it does and what it leaves out. In order: state, waiting,
// collectives, barriers, TMA, matrices, events, the scheduler.
//
// All delays and orders come from one random number generator, seeded for each case, so a failure
// can be reproduced from its seed.
#include "emulator.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <vector>

namespace emulator {

int current_thread, current_block, grid_blocks;
std::mt19937_64 random_bits(1);

namespace {

constexpr int kBlocks = 2;                   // of a cluster
constexpr int kMemoryBytes = 256 << 10;      // of a block: the space of its shared addresses
// address of the dynamic shared memory, and up to 1008 bytes more
constexpr int kFirstShared = 1024;
constexpr int kMostFibers = kBlocks * 640;
constexpr size_t kStackBytes = 48 << 10;
constexpr int kBoxRows = 64, kRowBytes = 128, kBoxBytes = kBoxRows * kRowBytes, kChunk = 16;
// found in memory where an mbarrier is, and at the start of a tensor map
constexpr uint64_t kMagic = 0xfeedfacecafebeefull;
// of a shared address; the bits above are the rank of its block
constexpr uint32_t kAddressMask = 0xffffff;

uint64_t random_below(uint64_t limit) { return limit ? random_bits() % limit : 0; }

// ------------------------------------------------------------------------------------------- state

struct Barrier {
  bool is_initialised = false;
  int expected = 0, pending = 0;  // arrivals of a phase, and those still to come in this one
  int64_t bytes = 0;              // announced less landed
  uint64_t phase = 0;
};

// A collective of many threads: `generation` counts how often it has completed.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Block {
  char* memory;
  std::vector<Barrier> barriers;        // by address / 8
  // by address / 16: 1 + the thread that wrote there without a fence since, or 0
  std::vector<short> unfenced;
  Meeting sync, named[16];
};

enum class Wait { kNothing, kBarrier, kMeeting, kStores, kProducts, kRemote };

// One CUDA thread.
struct Fiber {
  void* stack = nullptr;
  bool is_done = false;
  int block = 0, thread = 0;
  // What it waits for.
  Wait wait = Wait::kNothing;
  const Barrier* barrier = nullptr;
  uint32_t parity = 0;
  const uint64_t* generation = nullptr;
  uint64_t old_generation = 0;
  int allowed = 0;  // groups of stores, or of products, that may still be running
  // What it has started.
  std::deque<int> store_groups;  // for each committed group the stores that have not read their box
  int groups_gone = 0;           // groups that have left store_groups
  int uncommitted_stores = 0;
  int remote_arrivals = 0;       // on their way
  int products = 0;
  bool is_fenced = false;        // wgmma.fence since the last wait
  std::vector<int> written;      // places in Block::unfenced
};

// One warp's part of a wgmma: 16 rows.
struct Product {
  int columns;
  bool is_half, left_transposed, right_transposed, accumulate;
  uint32_t left, right;
  float* sum[32];  // of each lane
  int lanes;       // that have come

  bool same_as(const Product& other) const {
    return columns == other.columns && left == other.left && right == other.right &&
           accumulate == other.accumulate && left_transposed == other.left_transposed &&
           right_transposed == other.right_transposed;
  }
};

struct Warp {
  int live_lanes = 32;
  // The collective that its lanes have reached.
  Meeting meeting;
  int collective = 0;
  const void* argument[32] = {};
  // Its products, in order, without the finished ones.
  std::deque<Product> products;
  int products_done = 0;
  std::vector<int> group_ends;  // committed groups, each the number of products up to its end
  uint64_t last_product_due = 0;
  uint64_t starves_until = 0;  // used by the scheduler
};

struct Map {
  bool is_half;
  int rank;
  char* data;
  int64_t size[5], stride[5];  // stride in bytes
  uint32_t box[5];
};

enum class EventType { kLoad, kStore, kArrival, kProduct };

// Something that happens at turn `due`; a random `key` orders the events of one turn.
struct Event {
  uint64_t due, key;
  EventType type;
  int block;
  uint32_t box, barrier;    // load, store; load, arrival
  const Map* map;
  int coordinate[4];
  Fiber* fiber;             // store, arrival: who is told
  int group;                // store
  int warp;                 // product
};

bool is_later(const Event& a, const Event& b) {
  return a.due != b.due ? a.due > b.due : a.key > b.key;
}

Block blocks[kBlocks];
Fiber* fibers;
std::vector<Warp> warps;
int fiber_count, block_threads, shared_begin, shared_bytes;
Meeting cluster_meeting;
std::vector<Map> maps;

Fiber* current;           // or null, between the fibers
void* scheduler_stack;
const std::function<void()>* kernel_body;

std::vector<Event> events;  // a heap, the next in front
uint64_t turn;
int loads_in_flight;

// How long things take for this cluster, at most.
int load_delay, store_delay, product_delay, arrival_delay;

int warps_of_block() { return block_threads / 32; }
int warp_of(const Fiber& fiber) { return fiber.block * warps_of_block() + fiber.thread / 32; }
Block& own_block() { return blocks[current->block]; }
Warp& own_warp() { return warps[warp_of(*current)]; }

// ----------------------------------------------------------------------------------------- failing

}  // namespace

void fail(const char* format, ...) {
  printf("EMULATOR FAIL block %d thread %d: ", current ? current->block : -1,
         current ? current->thread : -1);
  va_list values;
  va_start(values, format);
  vprintf(format, values);
  printf("\n");
  fflush(stdout);
  _exit(1);
}

// ----------------------------------------------------------------------------------------- waiting

// Saves the callee-saved registers on this stack and continues on another one. (ucontext would make
// a system call each time.)
asm(R"(
.globl emulator_switch
emulator_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
extern "C" void emulator_switch(void** save, void* load);

namespace {

void to_scheduler() { emulator_switch(&current->stack, scheduler_stack); }

// Yields to other threads, once in `odds` times.
void maybe_yield(int odds) {
  if (random_below(odds) != 0) return;
  current->wait = Wait::kNothing;
  to_scheduler();
}

// A wait for a parity passes if the phase before the current one has that parity. A barrier does
// not remember earlier phases.
bool passes(const Barrier& barrier, uint32_t parity) { return ((barrier.phase - 1) & 1) == parity; }

bool stores_have_read(const Fiber& fiber, int allowed) {
  for (size_t group = 0; group + allowed < fiber.store_groups.size(); ++group) {
    if (fiber.store_groups[group] > 0) return false;
  }
  return true;
}

bool products_have_ended(const Fiber& fiber, int allowed) {
  const Warp& warp = warps[warp_of(fiber)];
  const int groups = int(warp.group_ends.size()) - allowed;
  return groups <= 0 || warp.products_done >= warp.group_ends[groups - 1];
}

bool is_ready(const Fiber& fiber) {
  if (fiber.is_done) return false;
  switch (fiber.wait) {
    case Wait::kNothing: return true;
    case Wait::kBarrier: return passes(*fiber.barrier, fiber.parity);
    case Wait::kMeeting: return *fiber.generation != fiber.old_generation;
    case Wait::kStores: return stores_have_read(fiber, fiber.allowed);
    case Wait::kProducts: return products_have_ended(fiber, fiber.allowed);
    case Wait::kRemote: return fiber.remote_arrivals == 0;
  }
  return false;
}

void wait_for(Wait what) {
  current->wait = what;
  if (!is_ready(*current)) {
    to_scheduler();
  } else {
    maybe_yield(8);
  }
  current->wait = Wait::kNothing;
}

void wait_for_generation(const Meeting& meeting) {
  current->generation = &meeting.generation;
  current->old_generation = meeting.generation;
  wait_for(Wait::kMeeting);
}

// ------------------------------------------------------------------------------------- collectives

enum Collective { kWarpSync = 1, kStoreMatrix, kLoadMatrix, kCommit, kWaitProducts };

// All lanes of a warp meet; the last to arrive runs `action` on the arguments of all.
template <typename Argument, typename Action>
void collective(Collective which, Argument& argument, Action action) {
  Warp& warp = own_warp();
  if (warp.meeting.arrived == 0) warp.collective = which;
  if (warp.collective != which)
    fail("the lanes of a warp diverge: collective %d against %d", warp.collective, which);
  warp.argument[current->thread % 32] = &argument;
  if (++warp.meeting.arrived < 32) return wait_for_generation(warp.meeting);
  const Argument* arguments[32];
  for (int lane = 0; lane < 32; ++lane)
    arguments[lane] = static_cast<const Argument*>(warp.argument[lane]);
  warp.meeting.arrived = 0;
  action(arguments);
  ++warp.meeting.generation;
}

template <typename Action>
void collective(Collective which, Action action) {
  const int nothing = 0;
  collective(which, nothing, [&](const int**) { action(); });
}

void meet(Meeting& meeting, int threads) {
  if (++meeting.arrived < threads) return wait_for_generation(meeting);
  meeting.arrived = 0;
  ++meeting.generation;
  maybe_yield(2);
}

}  // namespace

uint32_t cluster_rank() { return current->block; }
void warp_sync() {
  collective(kWarpSync, [] {});
}
void block_sync() { meet(own_block().sync, block_threads); }

void named_barrier(int id, int threads) {
  if (id < 1 || id > 15) fail("named barrier %d", id);
  meet(own_block().named[id], threads);
}

void cluster_sync() {
  wait_for(Wait::kRemote);  // it releases what came before
  meet(cluster_meeting, block_threads * kBlocks);
}

// ------------------------------------------------------------------------- shared memory, barriers

char* dynamic_shared() { return own_block().memory + shared_begin; }

uint32_t shared_address(const void* pointer) {
  const int64_t offset = static_cast<const char*>(pointer) - own_block().memory;
  if (offset < shared_begin || offset >= shared_begin + shared_bytes)
    fail("a pointer outside of this block's shared memory");
  return offset | current->block << 24;
}

namespace {

// The offset of an address, which must belong to this block.
uint32_t own_offset(uint32_t address, uint32_t bytes, uint32_t alignment) {
  if (address >> 24 != uint32_t(current->block)) fail("address %x is another block's", address);
  const uint32_t offset = address & kAddressMask;
  if (offset % alignment || int(offset) < shared_begin ||
      int(offset + bytes) > shared_begin + shared_bytes) {
    fail("shared address %u + %u misaligned or outside", offset, bytes);
  }
  return offset;
}
uint32_t own_barrier(uint32_t address) { return own_offset(address, 8, 8); }

uint64_t& word_at(int block, uint32_t offset) {
  return *reinterpret_cast<uint64_t*>(blocks[block].memory + offset);
}

Barrier& barrier_at(int block, uint32_t offset) {
  Barrier& barrier = blocks[block].barriers[offset / 8];
  if (!barrier.is_initialised) fail("barrier @%d not initialised", offset - shared_begin);
  if (word_at(block, offset) != kMagic) fail("barrier @%d overwritten", offset - shared_begin);
  return barrier;
}

void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
}

void arrive(int block, uint32_t offset, int arrivals) {
  Barrier& barrier = barrier_at(block, offset);
  if (arrivals < 1 || arrivals > barrier.pending) {
    fail("barrier @%d of block %d: %d arrivals, %d pending of %d (phase %ld bytes %ld)",
         offset - shared_begin, block, arrivals, barrier.pending, barrier.expected,
         long(barrier.phase), long(barrier.bytes));
  }
  barrier.pending -= arrivals;
  end_phase_if_complete(barrier);
}

void announce(int block, uint32_t offset, int64_t bytes) {
  Barrier& barrier = barrier_at(block, offset);
  barrier.bytes += bytes;
  if (std::abs(barrier.bytes) >= 1 << 20)
    fail("barrier @%d: more bytes than it can count", offset - shared_begin);
}

uint64_t random_delay(int scale) {
  if (scale == 0) return 0;
  const uint64_t turns = random_below(scale) + 1;
  return random_below(12) == 0 ? turns * 10 : turns;
}

void push(Event event) {
  event.key = random_bits();
  events.push_back(event);
  std::push_heap(events.begin(), events.end(), is_later);
}

// An arrival at the thread's own block releases what this thread did before, including its arrivals
// at the other block.
void wait_for_remote_arrivals() {
  if (current->remote_arrivals > 0) wait_for(Wait::kRemote);
}

}  // namespace

void barrier_init(uint32_t address, uint32_t arrivals) {
  const uint32_t offset = own_barrier(address);
  Barrier& barrier = own_block().barriers[offset / 8];
  if (barrier.is_initialised) fail("barrier initialised twice");
  barrier = Barrier();
  barrier.is_initialised = true;
  barrier.expected = barrier.pending = arrivals;
  word_at(current->block, offset) = kMagic;
}

void barrier_arrive(uint32_t barrier, uint32_t arrivals) {
  wait_for_remote_arrivals();
  maybe_yield(2);
  arrive(current->block, own_barrier(barrier), arrivals);
  maybe_yield(2);
}

void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  wait_for_remote_arrivals();
  maybe_yield(2);
  const uint32_t offset = own_barrier(barrier);
  announce(current->block, offset, bytes);
  arrive(current->block, offset, 1);
  maybe_yield(2);
}

void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  const uint32_t offset = own_barrier(barrier);
  if (rank >= kBlocks) fail("no block %u in the cluster", rank);
  if (int(rank) == current->block) return arrive(rank, offset, 1);
  Event event = {};
  event.type = EventType::kArrival;
  event.due = turn + random_delay(arrival_delay);
  event.block = rank;
  event.barrier = offset;
  event.fiber = current;
  ++current->remote_arrivals;
  push(event);
  maybe_yield(4);
}

void barrier_wait(uint32_t barrier, uint32_t parity) {
  if (parity > 1) fail("parity %u", parity);
  current->barrier = &barrier_at(current->block, own_barrier(barrier));
  current->parity = parity;
  wait_for(Wait::kBarrier);
}

// --------------------------------------------------------------------------------------------- TMA

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave interleave,
                      CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                      CUtensorMapFloatOOBfill fill) {
  bool is_valid =
      rank >= 3 && rank <= 5 && data != nullptr && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
      reinterpret_cast<uintptr_t>(map) % 64 == 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
      swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  Map made = {};
  made.is_half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  made.rank = rank;
  made.data = static_cast<char*>(data);
  made.stride[0] = 2;
  for (unsigned i = 0; is_valid && i < rank; ++i) {
    is_valid =
        sizes[i] >= 1 && sizes[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1;
    if (i > 0) is_valid = is_valid && strides[i - 1] % 16 == 0 && strides[i - 1] < 1ull << 40;
    made.size[i] = sizes[i];
    made.box[i] = box[i];
    if (i > 0) made.stride[i] = strides[i - 1];
  }
  if (!is_valid || box[0] * 2 != kRowBytes) return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0x5a, sizeof *map);
  auto* words = reinterpret_cast<uint64_t*>(map);
  words[0] = kMagic;
  words[1] = maps.size();
  maps.push_back(made);
  return CUDA_SUCCESS;
}

void check_map(const CUtensorMap* map) {
  if (reinterpret_cast<const uint64_t*>(map)[0] != kMagic) fail("not a tensor map");
}

namespace {

const Map* map_of(const CUtensorMap* map, int rank) {
  check_map(map);
  const Map* found = &maps[reinterpret_cast<const uint64_t*>(map)[1]];
  if (found->rank != rank) fail("a map of %d dimensions, used with %d", found->rank, rank);
  return found;
}

// For each row of an event's box: its number, its place in the tensor (null if outside), and how
// many of its 64 values are inside.
template <typename Action>
void each_row(const Event& event, Action action) {
  const Map& map = *event.map;
  if (event.coordinate[0] < 0) fail("negative innermost coordinate");
  int row_dimension = -1;
  for (int i = 1; i < map.rank; ++i) {
    if (map.box[i] == kBoxRows) row_dimension = i;
  }
  EMULATOR_CHECK(row_dimension > 0);
  for (int row = 0; row < kBoxRows; ++row) {
    bool is_inside = true;
    int64_t offset = int64_t(event.coordinate[0]) * 2;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t place = event.coordinate[i] + (i == row_dimension ? row : 0);
      is_inside = is_inside && place >= 0 && place < map.size[i];
      offset += place * map.stride[i];
    }
    const int64_t left =
        std::max<int64_t>(0, std::min<int64_t>(kBoxRows, map.size[0] - event.coordinate[0]));
    action(row, is_inside ? map.data + offset : nullptr, is_inside ? int(left) : 0);
  }
}

// The 16-byte chunk of a row in a swizzled box.
char* chunk_at(char* memory, uint32_t box, int row, int chunk) {
  return memory + box + row * kRowBytes + (chunk ^ (row % 8)) * kChunk;
}

void check_fenced(const Block& block, uint32_t box, const char* what) {
  for (int i = 0; i < kBoxBytes / kChunk; ++i) {
    if (block.unfenced[box / kChunk + i]) fail("%s ordinary writes without a proxy fence", what);
  }
}

Event box_event(EventType type, int block, uint32_t box, const Map* map, int c0, int c1, int c2,
                int c3) {
  Event event = {};
  event.type = type;
  event.block = block;
  event.box = box;
  event.map = map;
  const int coordinate[4] = {c0, c1, c2, c3};
  memcpy(event.coordinate, coordinate, sizeof coordinate);
  return event;
}

}  // namespace

void load_box(uint32_t box, const CUtensorMap* map, uint32_t barrier, bool for_all, int rank,
              int c0, int c1, int c2, int c3) {
  maybe_yield(2);
  const Map* source = map_of(map, rank);
  const uint32_t offset = own_offset(box, kBoxBytes, 1024), barrier_offset = own_barrier(barrier);
  for (int block = 0; block < kBlocks; ++block) {
    if (!for_all && block != current->block) continue;
    // from now on the hardware may write at any time
    memset(blocks[block].memory + offset, 0xff, kBoxBytes);
    check_fenced(blocks[block], offset, "TMA load over");
    Event event = box_event(EventType::kLoad, block, offset, source, c0, c1, c2, c3);
    event.due = turn + random_delay(load_delay);
    event.barrier = barrier_offset;
    ++loads_in_flight;
    push(event);
  }
  maybe_yield(2);
}

void store_box(const CUtensorMap* map, uint32_t box, int c0, int c1, int c2, int c3) {
  const Map* target = map_of(map, 4);
  const uint32_t offset = own_offset(box, kBoxBytes, 1024);
  check_fenced(own_block(), offset, "TMA store of");
  Event event = box_event(EventType::kStore, current->block, offset, target, c0, c1, c2, c3);
  event.due = turn + random_delay(store_delay);
  event.fiber = current;
  event.group = current->groups_gone + int(current->store_groups.size());
  ++current->uncommitted_stores;
  push(event);
  maybe_yield(2);
}

void commit_stores() {
  current->store_groups.push_back(current->uncommitted_stores);
  current->uncommitted_stores = 0;
}

void wait_stores_read(int pending) {
  current->allowed = pending;
  wait_for(Wait::kStores);
  while (!current->store_groups.empty() && current->store_groups.front() == 0) {
    current->store_groups.pop_front();
    ++current->groups_gone;
  }
  maybe_yield(2);
}

void fence_async_proxy() {
  for (int place : current->written) {
    short& writer = own_block().unfenced[place];
    if (writer == current->thread + 1) writer = 0;
  }
  current->written.clear();
}

// ---------------------------------------------------------------------------------------- matrices

namespace {

// Each lane addresses a row of 16 bytes and holds two values of each of the four 8 x 8 matrices.
struct LaneMatrix {
  uint32_t row;
  uint32_t* value;
};

// Calls action(in shared memory, in a lane's register) for all 128 pairs of values.
template <typename Action>
void each_pair(char* memory, const LaneMatrix** lanes, Action action) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    for (int row = 0; row < 8; ++row) {
      for (int pair = 0; pair < 4; ++pair) {
        action(memory + lanes[matrix * 8 + row]->row + pair * 4,
               &lanes[row * 4 + pair]->value[matrix]);
      }
    }
  }
}

// All 65536 values of 16 bits, as numbers: [0] as bf16, [1] as fp16.
struct ValueTable {
  float value[2][65536];

  ValueTable() {
    for (int i = 0; i < 65536; ++i) {
      const uint16_t bits = i;
      const uint32_t wide = uint32_t(i) << 16;
      __half half;
      memcpy(&half, &bits, sizeof half);
      memcpy(&value[0][i], &wide, sizeof wide);
      value[1][i] = __half2float(half);
    }
  }
};
const ValueTable table;

// The 8 values that a descriptor points to. The swizzle XORs the chunk with the row within groups
// of 8, using the address alone.
const uint16_t* swizzled(int block, uint32_t address) {
  address ^= (address >> 7 & 7) << 4;
  if (int(address) < shared_begin || int(address) + kChunk > shared_begin + shared_bytes) {
    fail("wgmma reads outside of shared memory: %u", address);
  }
  return reinterpret_cast<const uint16_t*>(blocks[block].memory + address);
}

// Reads `count` rows (of the left operand) or columns (of the right one) from `first` on, with a
// depth of 16, through the lower half of a descriptor. The value at (depth, index) goes to
// out[depth * depth_step + index * index_step].
void fetch(int block, uint32_t descriptor, bool is_transposed, int first, int count, bool is_half,
           float* out, int depth_step, int index_step) {
  if (descriptor & 0xc000c000) fail("descriptor %x: bits outside of the fields", descriptor);
  const uint32_t start = (descriptor & 0x3fff) << 4, next_box = (descriptor >> 16 & 0x3fff) << 4;
  if (start % (is_transposed ? 1024 : 32)) fail("operand at %u", start);
  const float* value = table.value[is_half];
  if (!is_transposed) {  // a row of memory is a row of the operand
    for (int index = 0; index < count; ++index) {
      const int row = first + index;
      for (int chunk = 0; chunk < 2; ++chunk) {
        const uint16_t* bits =
            swizzled(block, start + row / 8 * 1024 + row % 8 * kRowBytes + chunk * kChunk);
        for (int i = 0; i < 8; ++i)
          out[(chunk * 8 + i) * depth_step + index * index_step] = value[bits[i]];
      }
    }
    return;
  }
  for (int depth = 0; depth < 16; ++depth) {  // rows of memory run along the depth
    for (int index = 0; index < count; index += 8) {
      const int place = first + index;
      const uint16_t* bits = swizzled(block, start + place / 64 * next_box + depth / 8 * 1024 +
                                                 depth % 8 * kRowBytes + place % 64 * 2);
      for (int i = 0; i < 8; ++i)
        out[depth * depth_step + (index + i) * index_step] = value[bits[i]];
    }
  }
}

// The position of a lane's sum `i` in its warp's 16 rows.
int sum_row(int lane, int i) { return lane / 4 + i % 4 / 2 * 8; }
int sum_column(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

void multiply(const float (&left)[16][16], const float (&right)[16][128], float (&sum)[16][128],
              int columns) {
  for (int row = 0; row < 16; ++row) {
    for (int depth = 0; depth < 16; ++depth) {
      const float factor = left[row][depth];
      for (int column = 0; column < columns; ++column)
        sum[row][column] += factor * right[depth][column];
    }
  }
}

void execute(int warp, const Product& product) {
  static float left[16][16], right[16][128], sum[16][128];
  const int block = warp / warps_of_block();
  const int sums = product.columns / 2;  // of a lane
  fetch(block, product.left, product.left_transposed, 16 * (warp % 4), 16, product.is_half,
        &left[0][0], 1, 16);
  fetch(block, product.right, product.right_transposed, 0, product.columns, product.is_half,
        &right[0][0], 128, 1);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < sums; ++i) {
      sum[sum_row(lane, i)][sum_column(lane, i)] = product.accumulate ? product.sum[lane][i] : 0.0f;
    }
  }
  multiply(left, right, sum, product.columns);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < sums; ++i)
      product.sum[lane][i] = sum[sum_row(lane, i)][sum_column(lane, i)];
  }
}

}  // namespace

void stmatrix(uint32_t address, const uint32_t* value) {
  const LaneMatrix own{own_offset(address, kChunk, kChunk), const_cast<uint32_t*>(value)};
  char* memory = own_block().memory;
  collective(kStoreMatrix, own, [memory](const LaneMatrix** lanes) {
    each_pair(memory, lanes, [](char* place, const uint32_t* pair) { memcpy(place, pair, 4); });
  });
  // A fence covers the writes of its own thread. Here the row belongs to the lane that addresses
  // it, because all lanes fence alike.
  own_block().unfenced[own.row / kChunk] = current->thread + 1;
  current->written.push_back(own.row / kChunk);
}

void ldmatrix(uint32_t address, uint32_t* value) {
  const LaneMatrix own{own_offset(address, kChunk, kChunk), value};
  char* memory = own_block().memory;
  collective(kLoadMatrix, own, [memory](const LaneMatrix** lanes) {
    each_pair(memory, lanes, [](const char* place, uint32_t* pair) { memcpy(pair, place, 4); });
  });
}

void wgmma_fence() { current->is_fenced = true; }

// Lanes arrive one by one; the product starts when the last has arrived. The products of a warp run
// in order.
void wgmma(float* sum, int columns, bool is_half, bool left_transposed, bool right_transposed,
           uint32_t left, uint32_t right, bool accumulate) {
  if (!current->is_fenced) fail("wgmma without wgmma.fence");
  Warp& warp = own_warp();
  Product product = {};
  product.columns = columns;
  product.is_half = is_half;
  product.left_transposed = left_transposed;
  product.right_transposed = right_transposed;
  product.accumulate = accumulate;
  product.left = left;
  product.right = right;
  const int place = current->products++ - warp.products_done;
  if (place == int(warp.products.size())) warp.products.push_back(product);
  Product& shared = warp.products[place];
  if (!shared.same_as(product)) fail("lanes disagree on a wgmma");
  shared.sum[current->thread % 32] = sum;
  if (++shared.lanes < 32) return;
  Event event = {};
  event.type = EventType::kProduct;
  event.warp = warp_of(*current);
  event.due = warp.last_product_due =
      std::max(warp.last_product_due, turn + random_delay(product_delay));
  push(event);
}

void wgmma_commit() {
  collective(kCommit, [] {
    Warp& warp = own_warp();
    warp.group_ends.push_back(warp.products_done + int(warp.products.size()));
  });
}

void wgmma_wait(int pending) {
  collective(kWaitProducts, [] {});
  current->allowed = pending;
  wait_for(Wait::kProducts);
  current->is_fenced = false;
}

// ------------------------------------------------------------------------------------------ events

namespace {

// Part of a box lands.
void finish_load(const Event& event) {
  char* memory = blocks[event.block].memory;
  each_row(event, [&](int row, const char* source, int values) {
    char bytes[kRowBytes] = {};
    if (values > 0) memcpy(bytes, source, values * 2);
    for (int chunk = 0; chunk < 8; ++chunk)
      memcpy(chunk_at(memory, event.box, row, chunk), bytes + chunk * kChunk, kChunk);
  });
  --loads_in_flight;
  announce(event.block, event.barrier, -kBoxBytes);
  end_phase_if_complete(barrier_at(event.block, event.barrier));
}

// Reads a box and writes it out in one step.
void finish_store(const Event& event) {
  char* memory = blocks[event.block].memory;
  each_row(event, [&](int row, char* target, int values) {
    char bytes[kRowBytes];
    for (int chunk = 0; chunk < 8; ++chunk)
      memcpy(bytes + chunk * kChunk, chunk_at(memory, event.box, row, chunk), kChunk);
    if (values > 0) memcpy(target, bytes, values * 2);
  });
  Fiber& fiber = *event.fiber;
  const int group = event.group - fiber.groups_gone;
  --(group < int(fiber.store_groups.size()) ? fiber.store_groups[group] : fiber.uncommitted_stores);
}

void finish_product(const Event& event) {
  Warp& warp = warps[event.warp];
  execute(event.warp, warp.products.front());
  warp.products.pop_front();
  ++warp.products_done;
}

void fire(const Event& event) {
  switch (event.type) {
    case EventType::kLoad: return finish_load(event);
    case EventType::kStore: return finish_store(event);
    case EventType::kProduct: return finish_product(event);
    case EventType::kArrival:
      arrive(event.block, event.barrier, 1);
      --event.fiber->remote_arrivals;
      return;
  }
}

void fire_due_events() {
  while (!events.empty() && events.front().due <= turn) {
    std::pop_heap(events.begin(), events.end(), is_later);
    const Event event = events.back();
    events.pop_back();
    current = nullptr;
    fire(event);
  }
}

// ----------------------------------------------------------------------------------- the scheduler

void run_fiber() {
  (*kernel_body)();
  if (!stores_have_read(*current, 0) || current->uncommitted_stores)
    fail("a thread ends before its stores have read their box");
  if (current->remote_arrivals) fail("a thread ends before its arrivals at the other block");
  current->is_done = true;
  to_scheduler();
  abort();
}

void prepare_fiber(Fiber& fiber, int index, char* stack_end) {
  fiber = Fiber();
  fiber.block = index / block_threads;
  fiber.thread = index % block_threads;
  // at its start, a function's stack pointer is 8 bytes off a multiple of 16
  void** stack = reinterpret_cast<void**>(stack_end - 8);
  *--stack = reinterpret_cast<void*>(run_fiber);
  // the registers that emulator_switch takes from there
  for (int i = 0; i < 6; ++i) *--stack = nullptr;
  fiber.stack = stack;
}

void prepare_block(Block& block) {
  memset(block.memory, 0xff, kMemoryBytes);  // NaN
  block.barriers.assign(kMemoryBytes / 8, Barrier());
  block.unfenced.assign(kMemoryBytes / kChunk, 0);
  block.sync.arrived = 0;
  for (Meeting& meeting : block.named) meeting.arrived = 0;
}

void prepare_cluster() {
  static char* stacks = nullptr;
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kStackBytes * kMostFibers, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EMULATOR_CHECK(memory != MAP_FAILED);
    stacks = static_cast<char*>(memory);
    fibers = new Fiber[kMostFibers];
    for (Block& block : blocks)
      block.memory = static_cast<char*>(aligned_alloc(4096, kMemoryBytes));
  }
  fiber_count = block_threads * kBlocks;
  EMULATOR_CHECK(fiber_count <= kMostFibers);
  cluster_meeting.arrived = 0;
  events.clear();
  turn = 0;
  loads_in_flight = 0;
  for (Block& block : blocks) prepare_block(block);
  for (int i = 0; i < fiber_count; ++i) prepare_fiber(fibers[i], i, stacks + kStackBytes * (i + 1));
  warps.assign(fiber_count / 32, Warp());
}

// Decides which warp runs next. It is unfair on purpose.
struct Scheduler {
  const int warp_count = int(warps.size());
  int favourite = 0;         // the warp that ran last, and for how many turns more it goes first
  uint64_t favoured = 0;
  bool is_anybody_starving;  // found by choose()

  Scheduler() {
    const int scales[] = {0, 4, 40, 400, 4000};
    load_delay = scales[random_below(5)];
    store_delay = scales[random_below(5)];
    product_delay = scales[random_below(4)];
    arrival_delay = scales[random_below(4)];
  }

  // Now and then some warps get no turn for a while: one warp, its warpgroup, its block, the
  // block's loaders, or one loader.
  void starve_some() {
    if (random_below(150) != 0) return;
    const uint64_t turns = random_below(random_below(4) ? 300 : 5000);
    const int whom = random_below(5), chosen = random_below(warp_count);
    const int in_block = warps_of_block(), loaders = in_block - 4;
    for (int i = 0; i < warp_count; ++i) {
      const bool same_block = i / in_block == chosen / in_block,
                 is_loader = i % in_block >= loaders;
      const bool is_hit = whom == 0   ? i == chosen
                          : whom == 1 ? i / 4 == chosen / 4
                          : whom == 2 ? same_block
                          : whom == 3 ? same_block && is_loader
                                      : i == chosen / in_block * in_block + loaders + chosen % 2;
      if (is_hit) warps[i].starves_until = turn + turns;
    }
  }

  bool can_run(int warp) const {
    for (int lane = 0; lane < 32; ++lane) {
      if (is_ready(fibers[warp * 32 + lane])) return true;
    }
    return false;
  }

  bool is_starving(int warp) const {
    return warps[warp].starves_until > turn;
  }

  // The first warp from `first` on that can run, or -1. With `even_starving`, starved warps count
  // too.
  int choose(int first, bool even_starving) {
    if (favoured > 0 && !even_starving) {
      --favoured;
      if (warps[favourite].starves_until <= turn && can_run(favourite)) return favourite;
    }
    for (int i = 0; i < warp_count; ++i) {
      const int warp = (first + i) % warp_count;
      if (warps[warp].live_lanes == 0) continue;
      if (!even_starving && is_starving(warp)) {
        is_anybody_starving = true;
        continue;
      }
      if (can_run(warp)) return warp;
    }
    return -1;
  }

  // The warp of this turn, or -1: then time advances to the next event.
  int next(int first) {
    is_anybody_starving = false;
    int best = choose(first, false);
    if (best >= 0) return best;
    if (!events.empty() && !(is_anybody_starving && random_below(2))) return -1;
    if (is_anybody_starving) {
      for (Warp& warp : warps) warp.starves_until = 0;
      best = choose(first, true);
      if (best < 0 && !events.empty()) return -1;
    }
    if (best < 0) {
      current = nullptr;
      fail("DEADLOCK");
    }
    return best;
  }

  // Runs each lane that can run until it yields; now and then some are left out. Returns how many
  // ended.
  int run_warp(int warp, int cluster, bool leaves_out_lanes) {
    favourite = warp;
    if (favoured == 0 && random_below(16) == 0) favoured = random_below(20);
    const int first = random_below(32);
    bool has_run = false;
    int ended = 0;
    for (int i = 0; i < 32; ++i) {
      Fiber& fiber = fibers[warp * 32 + (i + first) % 32];
      if (!is_ready(fiber) || (has_run && leaves_out_lanes && random_below(2))) continue;
      has_run = true;
      current = &fiber;
      current_thread = fiber.thread;
      current_block = cluster * kBlocks + fiber.block;
      emulator_switch(&scheduler_stack, fiber.stack);
      ended += fiber.is_done;
    }
    warps[warp].live_lanes -= ended;
    return ended;
  }

  void run(int cluster) {
    for (int live = fiber_count; live > 0;) {
      ++turn;
      if (turn > 400000000) fail("too many turns");
      fire_due_events();
      starve_some();
      const int first = random_below(warp_count);
      const bool leaves_out_lanes = random_below(8) == 0;
      const int warp = next(first);
      if (warp >= 0) {
        live -= run_warp(warp, cluster, leaves_out_lanes);
      } else {
        turn = std::max(turn, events.front().due - 1);
      }
    }
  }
};

void run_cluster(int cluster) {
  prepare_cluster();
  Scheduler().run(cluster);
  current = nullptr;
  if (loads_in_flight > 0) fail("the blocks end with %d loads in flight", loads_in_flight);
  if (!events.empty()) fail("the blocks end with events in flight");
  for (const Block& block : blocks) {
    for (const Barrier& barrier : block.barriers) {
      if (barrier.is_initialised && barrier.bytes != 0)
        fail("%ld announced bytes never came", long(barrier.bytes));
    }
  }
}

void run_one_by_one(int threads) {
  for (current_block = 0; current_block < grid_blocks; ++current_block) {
    for (current_thread = 0; current_thread < threads; ++current_thread) (*kernel_body)();
  }
}

}  // namespace

void launch(int blocks_of_grid, int threads, int bytes, const std::function<void()>& kernel) {
  kernel_body = &kernel;
  grid_blocks = blocks_of_grid;
  if (bytes == 0) return run_one_by_one(threads);
  EMULATOR_CHECK(bytes <= kMostSharedBytes && grid_blocks > 0 && grid_blocks % kBlocks == 0);
  block_threads = threads;
  // kernels align it themselves
  shared_begin = kFirstShared + (random_below(2) ? 0 : 16 * random_below(64));
  shared_bytes = bytes;
  for (int cluster = 0; cluster < grid_blocks / kBlocks; ++cluster) run_cluster(cluster);
  maps.clear();
  fiber_count = 0;
}

}  // namespace emulator
