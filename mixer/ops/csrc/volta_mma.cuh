// The tensor core instruction of sm_70: mma.m8n8k4. A warp has four *quad pairs* (pair q: lanes 4 q
// ... 4 q + 3, and these + 16). Each multiplies its own 8 x 4 by 4 x 8 values.
#pragma once

#include "tensor_tile.cuh"

namespace volta {

using namespace tensor;

// A fragment of one warp: 16 rows of a factor (for the right one, columns of the result) and a
// depth of 8, in two parts of depth 4 for two mma. Each quad pair has half of the rows, chosen by q
// % 2 for the left factor and by q / 2 for the right one, so that together the four multiply 16 x
// 16. Of its pair's 8 rows a lane holds, in each part,
//   if depth is contiguous: one row, a depth of four; if rows are contiguous: four rows at one
//   depth (lane % 4).
struct Fragment {
  uint2 part[2];
};

// Which rows of the 16 a quad pair has: four from 4 half on (lanes below 16), four from 8 + 4 half
// on (the other lanes).
__device__ __forceinline__ int half(Side side, int lane) {
  return side == kLeft ? lane / 4 % 2 : lane / 8 % 2;
}
__device__ __forceinline__ int first_row(Side side, int lane) {
  return lane / 16 * 8 + half(side, lane) * 4;
}

// sum += left right for one part: 16 x 16 values per warp, 8 per lane.
template <typename LeftLayout, typename RightLayout>
__device__ __forceinline__ void mma(float (&sum)[8], uint2 left, uint2 right);

#define MIXER_MMA(LeftLayout, RightLayout, layouts)                                                \
  template <>                                                                                      \
  __device__ __forceinline__ void mma<LeftLayout<__half>, RightLayout<__half>>(                    \
      float (&sum)[8], uint2 left, uint2 right) {                                                  \
    asm("mma.sync.aligned.m8n8k4." layouts ".f32.f16.f16.f32 "                                     \
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "                                 \
        "{%0, %1, %2, %3, %4, %5, %6, %7};"                                                        \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]),      \
          "+f"(sum[6]), "+f"(sum[7])                                                               \
        : "r"(left.x), "r"(left.y), "r"(right.x), "r"(right.y));                                   \
  }

MIXER_MMA(KMajor, MnMajor, "row.row")
MIXER_MMA(MnMajor, MnMajor, "col.row")
MIXER_MMA(KMajor, KMajor, "row.col")
#undef MIXER_MMA

}  // namespace volta
