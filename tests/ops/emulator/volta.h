// What mma.m8n8k4 does, by the PTX manual.
#pragma once

#include "threads.h"

namespace emulator {

struct Operands {
  float* sum;
  uint32_t left[2], right[2];
};
Operands operands[kMostThreads];

float half_of(const uint32_t (&registers)[2], int i) {
  const __half_raw raw = {static_cast<unsigned short>(registers[i / 2] >> i % 2 * 16)};
  return __half2float(__half(raw));
}

// mma.sync.aligned.m8n8k4.LEFT.RIGHT.f32.f16.f16.f32: each quad pair multiplies 8 x 4 by 4 x 8.
void multiply_quad_pair(int first, bool left_row, bool right_row) {
  float left[8][4], right[4][8];
  for (int t = 0; t < 8; ++t) {
    const Operands& lane = operands[first + t % 4 + t / 4 * 16];
    for (int i = 0; i < 4; ++i) {
      (left_row ? left[t][i] : left[i + t / 4 * 4][t % 4]) = half_of(lane.left, i);
      (right_row ? right[t % 4][i + t / 4 * 4] : right[i][t]) = half_of(lane.right, i);
    }
  }
  for (int t = 0; t < 8; ++t) {
    for (int i = 0; i < 8; ++i) {
      const int row = t % 2 + (i & 2) + t / 4 * 4, column = (i & 4) + (t & 2) + (i & 1);
      float& sum = operands[first + t % 4 + t / 4 * 16].sum[i];
      for (int k = 0; k < 4; ++k) sum += left[row][k] * right[k][column];
    }
  }
}

void mma(float (&sum)[8], uint2 left, uint2 right, const char* layouts) {
  operands[thread_index.x] = {sum, {left.x, left.y}, {right.x, right.y}};
  meet_warp(-10, [&] {
    const int warp = thread_index.x / 32 * 32;
    for (int pair = 0; pair < 4; ++pair)
      multiply_quad_pair(warp + pair * 4, layouts[0] == 'r', layouts[4] == 'r');
  });
}

}  // namespace emulator
