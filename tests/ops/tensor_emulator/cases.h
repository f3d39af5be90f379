// Random cases of forward and both gradients, compared with plain loops:
//
//     emulator SEED COUNT
//
// Exits with status 0, or with 1 at the first case that differs. There is NaN around tensors and
// wherever nothing was written. Inputs are small integers: every sum is exact in any order. The
// including file defines `kernels` and Element.
#pragma once

namespace {

int below(int limit) { return emulator::random_bits() % limit; }

// Values on the "device", NaN until they are set, with NaN on both sides.
template <typename Value>
struct Buffer {
  static constexpr size_t kGuard = 8192;
  size_t count;
  std::vector<uint4> memory;

  explicit Buffer(size_t count)
      : count(count), memory(2 * kGuard + count * sizeof(Value) / sizeof(uint4) + 1) {
    memset(memory.data(), 0xff, memory.size() * sizeof(uint4));
  }
  Value* data() { return reinterpret_cast<Value*>(memory.data() + kGuard); }
  float get(size_t i) { return static_cast<float>(data()[i]); }
  void fill() {
    for (size_t i = 0; i < count; ++i)
      data()[i] = static_cast<Value>(static_cast<float>(below(5) - 2));
  }
  bool is_guarded() {
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory.data());
    const size_t begin = kGuard * sizeof(uint4), end = begin + count * sizeof(Value),
                 size = memory.size() * sizeof(uint4);
    const auto is_fill = [](unsigned char byte) { return byte == 0xff; };
    return std::all_of(bytes, bytes + begin, is_fill) &&
           std::all_of(bytes + end, bytes + size, is_fill);
  }
};

// A tensor (batch, tokens, channels) whose rows may be further apart than their length.
struct Activation : Buffer<Element> {
  int64_t batch_stride, token_stride;
  Activation(const TriangularConvParams& p, int gap)
      : Buffer(static_cast<size_t>(p.batch) * (p.tokens * (p.channels + gap) + gap)),
        batch_stride(p.tokens * (p.channels + gap) + gap), token_stride(p.channels + gap) {}
  float at(int sample, int token, int channel) {
    return get(sample * batch_stride + token * token_stride + channel);
  }
};

bool check(const char* name, int64_t place, float got, float wanted) {
  if (got == wanted) return true;
  printf("%s[%ld] is %g, should be %g\n", name, static_cast<long>(place), got, wanted);
  return false;
}

bool run_case() {
  TriangularConvParams p = {};
  const int kinds[] = {1, 7, 63, 64, 65, 127, 128, 129, 200, 257};
  p.tokens = below(2) ? kinds[below(10)] : 1 + below(160);
  const bool is_long = below(8) == 0;
  if (is_long) p.tokens = 500 + below(200);
  p.context = p.tokens + (below(2) ? below(20) : 0);
  p.heads = is_long ? 1 : 1 + below(3);
  p.batch = 1 + below(3);
  const int width = 8 * (1 + below(below(2) ? 20 : 6));
  p.channels = p.heads * width;
  const bool by_lag = below(2);
  p.lag_zero = by_lag ? (p.tokens + 127) / 128 * 128 : 0;
  p.columns = by_lag ? p.lag_zero + MIXER_STRIP_ROWS : (p.tokens + 7) / 8 * 8;
  p.dtype = kDtype;
  p.capability = kCapability;
  p.processors = 1 + below(below(2) ? 4 : 20);
  const bool has_bias = below(2), has_residual = below(2), wide_bias = below(2),
             wide_gradient = below(2);
  p.bias_dtype = wide_bias ? MIXER_FLOAT32 : kDtype;
  p.gradient_dtype = wide_gradient ? MIXER_FLOAT32 : kDtype;
  printf(
      "%s tokens %d context %d heads %d batch %d width %d bias %d residual %d processors %d\n",
      by_lag ? "lags" : "weight", p.tokens, p.context, p.heads, p.batch, width, has_bias, has_residual, p.processors);

  Activation x(p, 8 * below(3)), dy(p, 8 * below(3)), residual(p, 8 * below(3)), y(p, 0), dx(p, 0);
  const int rows = by_lag ? MIXER_STRIP_ROWS : p.tokens;  // of packed
  Buffer<Element> packed(static_cast<size_t>(p.heads) * rows * p.columns),
      narrow(p.heads * p.context);
  Buffer<float> wide(p.heads * p.context);
  x.fill(), dy.fill(), residual.fill(), packed.fill(), wide.fill();
  for (size_t i = 0; i < narrow.count; ++i) narrow.data()[i] = Element(wide.get(i));
  for (int head = 0; head < p.heads; ++head) {
    Element* const of_head = packed.data() + static_cast<int64_t>(head) * rows * p.columns;
    std::vector<float> lags(p.tokens);
    for (float& lag : lags) lag = below(5) - 2;
    for (int i = 0; i < rows * p.columns; ++i) {
      const int lag = i / p.columns + p.lag_zero - i % p.columns;
      if (lag < 0 || lag >= p.tokens) {
        of_head[i] = Element(0.0f);
      } else if (by_lag) {
        of_head[i] = Element(lags[lag]);
      }
    }
  }
  const auto weight = [&](int head, int row, int column) {
    const int64_t first = static_cast<int64_t>(head) * rows * p.columns;
    return packed.get(by_lag ? first + p.lag_zero + column - row
                             : first + row * p.columns + column);
  };
  p.x = x.data(), p.x_batch_stride = x.batch_stride, p.x_token_stride = x.token_stride;
  p.dy = dy.data(), p.dy_batch_stride = dy.batch_stride, p.dy_token_stride = dy.token_stride;
  p.packed = packed.data(), p.y = y.data(), p.dx = dx.data();
  if (has_bias) p.bias = wide_bias ? static_cast<void*>(wide.data()) : narrow.data();
  if (has_residual) {
    p.residual = residual.data();
    p.residual_batch_stride = residual.batch_stride,
    p.residual_token_stride = residual.token_stride;
  }
  const int64_t size = static_cast<int64_t>(p.heads) * p.context * (by_lag ? 1 : p.context);
  Buffer<float> workspace(kernels::grad_weight_workspace(p) / sizeof(float)), wide_gradients(size);
  Buffer<Element> narrow_gradients(size);
  p.workspace = workspace.data();
  p.dweight = wide_gradient ? static_cast<void*>(wide_gradients.data()) : narrow_gradients.data();
  kernels::forward(p);
  kernels::grad_input(p);
  kernels::grad_weight(p);

  bool good = y.is_guarded() && dx.is_guarded() && workspace.is_guarded() &&
              wide_gradients.is_guarded() && narrow_gradients.is_guarded();
  if (!good) puts("written outside of a tensor");
  std::vector<float> dweight(size);
  for (int b = 0; b < p.batch; ++b) {
    for (int c = 0; c < p.channels; ++c) {
      const int head = c / width;
      for (int row = 0; row < p.tokens; ++row) {
        float sum = has_bias ? wide.get(head * p.context + row) : 0.0f, back = 0.0f;
        if (has_residual) sum += residual.at(b, row, c);
        for (int k = 0; k <= row; ++k) {
          const float value = x.at(b, k, c);
          sum += weight(head, row, k) * value;
          const int64_t place = by_lag ? row - k : static_cast<int64_t>(row) * p.context + k;
          dweight[size / p.heads * head + place] += dy.at(b, row, c) * value;
        }
        for (int i = row; i < p.tokens; ++i) back += weight(head, i, row) * dy.at(b, i, c);
        const int64_t place = (static_cast<int64_t>(b) * p.tokens + row) * p.channels + c;
        good = good && check("y", place, y.get(place), static_cast<float>(Element(sum))) &&
               check("dx", place, dx.get(place), static_cast<float>(Element(back)));
      }
    }
  }
  for (int64_t i = 0; i < size && good; ++i) {
    good = wide_gradient ? check("dweight", i, wide_gradients.get(i), dweight[i])
                         : check("dweight", i, narrow_gradients.get(i),
                                 static_cast<float>(Element(dweight[i])));
  }
  return good;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  emulator::random_bits.seed(atoi(arguments[1]));
  for (int left = atoi(arguments[2]); left > 0; --left) {
    if (!run_case()) return 1;
  }
  return 0;
}
