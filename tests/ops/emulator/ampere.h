// What Ampere's PTX does, by the PTX manual; a copy arrives at the latest time that the waits allow.
#pragma once

#include "threads.h"

namespace emulator {

struct Copy {
  uint32_t shared;
  const void* global;  // null: zeros
};
using Copies = std::vector<Copy>;
// committed groups of each thread's copies that have not arrived
std::deque<Copies> groups[kMostThreads];
Copies open_group[kMostThreads];

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - own_block().shared);
}

inline void copy_async(uint32_t to, const void* global, bool valid) {
  open_group[thread_index.x].push_back({to, valid ? global : nullptr});
}

inline void commit_copies() {
  groups[thread_index.x].push_back(std::move(open_group[thread_index.x]));
  open_group[thread_index.x].clear();
}

inline void wait_copies(size_t pending) {
  for (auto& mine = groups[thread_index.x]; mine.size() > pending; mine.pop_front()) {
    for (const Copy& copy : mine.front()) {
      char* const place = own_block().shared + copy.shared;
      copy.global ? memcpy(place, copy.global, 16) : memset(place, 0, 16);
    }
  }
}

struct Loads {
  uint32_t address, *part;
};
Loads loads[kMostThreads];

// ldmatrix.x4: lane l gives the address of row l % 8 of matrix l / 8.
inline void load_matrices(uint32_t address, uint32_t (&part)[4], bool is_transposed) {
  loads[thread_index.x] = {address, part};
  meet_warp(is_transposed ? -11 : -12, [&] {
    const Loads* warp = loads + thread_index.x / 32 * 32;
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t value[2];
        for (int i = 0; i < 2; ++i) {
          const int row = is_transposed ? lane % 4 * 2 + i : lane / 4,
                    column = is_transposed ? lane / 4 : lane % 4 * 2 + i;
          memcpy(&value[i], own_block().shared + warp[matrix * 8 + row].address + column * 2, 2);
        }
        memcpy(&warp[lane].part[matrix], value, 4);
      }
    }
  });
}

struct Operands {
  float* sum;
  uint32_t left[4], right[2];
};
Operands operands[kMostThreads];

inline float value_of(uint32_t word, int i, __half) {
  return __half2float(__half(__half_raw{static_cast<unsigned short>(word >> i * 16)}));
}
inline float value_of(uint32_t word, int i, __nv_bfloat16) {
  return __uint_as_float(word >> i * 16 << 16);
}

// mma.sync.aligned.m16n8k16.row.col.
template <typename Element>
void mma(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0, uint32_t right1) {
  operands[thread_index.x] = {sum, {left[0], left[1], left[2], left[3]}, {right0, right1}};
  meet_warp(-10, [&] {
    const Operands* warp = operands + thread_index.x / 32 * 32;
    float rows[16][16], columns[8][16];
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 2; ++i) {
        const int depth = lane % 4 * 2 + i;
        for (int part = 0; part < 4; ++part) {
          rows[lane / 4 + part % 2 * 8][depth + part / 2 * 8] =
              value_of(warp[lane].left[part], i, Element());
        }
        for (int part = 0; part < 2; ++part) {
          columns[lane / 4][depth + part * 8] = value_of(warp[lane].right[part], i, Element());
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const float *row = rows[lane / 4 + i / 2 * 8], *column = columns[lane % 4 * 2 + i % 2];
        for (int k = 0; k < 16; ++k) warp[lane].sum[i] += row[k] * column[k];
      }
    }
  });
}

}  // namespace emulator
