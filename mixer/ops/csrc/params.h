// The one argument of every entry point: plain C, mirrored field by field by `Params` in
// mixer/ops/cuda.py.
//
// Shapes:
//   x, y, residual, dy, dx   (batch, tokens, channels), channels contiguous
//   weight, dweight          (heads, context, context): row = output token, column = input token
//   bias, dbias              (heads, context), with context >= tokens
//   packed                   (heads, tokens, columns), in x's type: the lower triangle of the
//                            top-left corner of each weight matrix, exact zeros elsewhere; columns
//                            = tokens rounded up to a multiple of 8
//
// A weight by lag has W[h,i,j] = lags[h, i - j], zero for lags from `window` on. Then `weight` and
// `dweight` point to lags and their gradient (heads, window), and `packed` is a *strip* (heads, 128,
// columns) with strip[h, r, u] = lags[h, r + lag_zero - u], zero for lags below 0, from the window
// on and beyond the tokens. All tiles of W on one diagonal are equal: the tile that begins at (i, j)
// begins in the strip at (0, lag_zero + j - i). lag_zero is a multiple of 128, large enough for all
// tiles of up to 128 rows and columns that hold a lag; columns = lag_zero + 128.
//
// For short_conv, `weight` points to lags, nothing is packed, and a bias with context = 1 has one
// number for all tokens.
//
// For mix_row, `tokens` is the length of the memory, and x, residual and y hold one token; by lag,
// `weight` points to lags.
//
// A head's channels fill a multiple of 16 bytes, and every row begins at one. No size is 0. Pointers
// that an operation does not use are null.
#pragma once

#include <stdint.h>

#define MIXER_STRIP_ROWS 128
#define MIXER_SHORT_WINDOW 8  // lags that short_conv.cu takes

enum MixerDtype { MIXER_FLOAT32 = 0, MIXER_FLOAT16 = 1, MIXER_BFLOAT16 = 2 };

typedef struct TriangularConvParams {
  const void* x;         // dtype
  const void* weight;    // weight_dtype, as the bias; read by pack, short_conv and mix_row
  void* packed;          // dtype; written by pack, read by forward and grad_input
  const void* bias;      // or null
  const void* residual;  // dtype, or null
  void* y;               // dtype, contiguous
  const void* dy;        // dtype
  void* dx;              // dtype, contiguous
  float* dweight;        // contiguous
  float* dbias;          // contiguous, or null
  void* workspace;       // as many bytes as the function says, 16-byte aligned
  // memory of mix_row: dtype, (batch, heads, tokens, channels of a head), the last two dimensions
  // dense
  void* memory;
  const void* positions;  // int64, the position of each sample's new token in the memory
  void* stream;          // a cudaStream_t

  int64_t x_batch_stride, x_token_stride;  // in elements, like all strides
  int64_t residual_batch_stride, residual_token_stride;
  int64_t dy_batch_stride, dy_token_stride;
  int64_t memory_batch_stride, memory_head_stride;
  int64_t positions_stride;

  int32_t batch, tokens, channels, context, heads, columns;
  int32_t window;        // lags of a head; 0 for a full weight
  int32_t lag_zero;      // the strip's column of lag 0 in row 0; 0 for a full weight
  int32_t dtype, weight_dtype;
  int32_t device;        // index of the CUDA device
  int32_t capability;    // 10 * major + minor of that device
  int32_t processors;    // number of streaming multiprocessors
} TriangularConvParams;
