#include "hopper_shift.cuh"

#include "numeric.cuh"

namespace hopper {
namespace {

constexpr int kShiftThreads = 256;
constexpr int kGroup = 8;  // channels per thread: 16 bytes

struct ShiftArguments {
  const uint4* from;
  uint4* to;
  int64_t batch_stride, token_stride;  // in groups
  int64_t groups;                      // of one copy
  int32_t tokens, head_groups, row_groups, taps, direction;
};

// Values kOffset .. kOffset + 7 of the 16 values in two groups.
template <int kOffset>
__device__ __forceinline__ uint4 cut(const uint4& left, const uint4& right) {
  const uint32_t words[9] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w, 0};
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = words[kOffset / 2 + i], high = words[kOffset / 2 + i + 1];
    out[i] = kOffset % 2 == 0 ? low : low >> 16 | high << 16;
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Threads: groups of all copies.
__global__ void __launch_bounds__(kShiftThreads) shift_kernel(const ShiftArguments arguments) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kShiftThreads + threadIdx.x;
  if (index >= arguments.groups * (arguments.taps - 1)) return;
  const int copy = static_cast<int>(index / arguments.groups);
  const int group = static_cast<int>(index % arguments.row_groups);
  const int64_t row = index % arguments.groups / arguments.row_groups;  // sample * tokens + token
  const uint4* from = arguments.from + row / arguments.tokens * arguments.batch_stride +
                      row % arguments.tokens * arguments.token_stride +
                      group / arguments.head_groups * arguments.head_groups;
  const int tap = copy < middle_tap(arguments.taps) ? copy : copy + 1;
  const int shift = arguments.direction * (tap - middle_tap(arguments.taps));  // in channels
  const int offset = (shift % kGroup + kGroup) % kGroup;
  // the group of the head that holds the first value
  const int left = group % arguments.head_groups + (shift - offset) / kGroup;
  const auto load = [&](int place) {
    return place >= 0 && place < arguments.head_groups ? __ldg(from + place)
                                                       : make_uint4(0, 0, 0, 0);
  };
  const uint4 first = load(left), second = offset > 0 ? load(left + 1) : make_uint4(0, 0, 0, 0);
  uint4 value = first;
  switch (offset) {
    case 1: value = cut<1>(first, second); break;
    case 2: value = cut<2>(first, second); break;
    case 3: value = cut<3>(first, second); break;
    case 4: value = cut<4>(first, second); break;
    case 5: value = cut<5>(first, second); break;
    case 6: value = cut<6>(first, second); break;
    case 7: value = cut<7>(first, second); break;
  }
  arguments.to[index] = value;
}

}  // namespace

cudaError_t shift_taps(const TriangularConvParams& params, const void* from, int64_t batch_stride,
                       int64_t token_stride, int direction, void* to) {
  if (shifted_copies(params) == 0) return cudaSuccess;
  ShiftArguments arguments = {};
  arguments.from = static_cast<const uint4*>(from);
  arguments.to = static_cast<uint4*>(to);
  arguments.batch_stride = params.batch > 1 ? batch_stride / kGroup : 0;
  arguments.token_stride = params.tokens > 1 ? token_stride / kGroup : 0;
  arguments.tokens = params.tokens;
  arguments.row_groups = params.channels / kGroup;
  arguments.head_groups = arguments.row_groups / params.heads;
  arguments.groups = int64_t(params.batch) * params.tokens * arguments.row_groups;
  arguments.taps = params.taps;
  arguments.direction = direction;
  const int64_t blocks = ceil_div(arguments.groups * shifted_copies(params), kShiftThreads);
  if (blocks > kMaxBlocks) return cudaErrorInvalidConfiguration;
  shift_kernel<<<
      static_cast<unsigned>(blocks), kShiftThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(
      arguments);
  return cudaGetLastError();
}

}  // namespace hopper
