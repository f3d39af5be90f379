// Random cases of the Hopper kernels, run on the emulator and compared with plain loops.
//
//     cases SEED COUNT [OPERATION|any [PLAN|any]]
//
// Exits with status 0 after printing a line `OPERATION PLAN: cases` for each that was run, or with
// status 1 at the first failure. Inputs are small integers: every sum is exact in any order, so
// results must be equal bit for bit.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "emulator.h"
#include "kernels.h"

namespace {

enum Operation { kForward, kGradInput, kGradWeight, kOperations };
const char* const kOperationNames[] = {"forward", "grad_input", "grad_weight"};
// of the product, by the number of tokens
const char* const kPlanNames[] = {"resident", "resident_alone", "streamed"};
const char* const kTypeNames[] = {"fp32", "fp16", "bf16"};                    // MIXER_FLOAT32 ...
constexpr int kPlans = 3;

int plan_of(int tokens) { return tokens > 512 ? 2 : tokens > 256 ? 1 : 0; }

float rounded(int type, float value) {
  if (type == MIXER_FLOAT16) return __half2float(__float2half_rn(value));
  return type == MIXER_BFLOAT16 ? __bfloat162float(__float2bfloat16_rn(value)) : value;
}

// Values of one type on the "device", NaN until they are set, with guard values on both sides.
class Buffer {
 public:
  Buffer(size_t count, int type)
      : count_(count),
        type_(type),
        bytes_(count * (type == MIXER_FLOAT32 ? 4 : 2)),
        memory_(bytes_ + 2 * kGuard, kFill) {
    data_ = memory_.data() + kGuard / 2;
    data_ += (16 - reinterpret_cast<uintptr_t>(data_) % 16) % 16;
    memset(data_, 0xff, bytes_);
  }

  char* data() const { return data_; }

  void set(size_t index, float value) {
    EMULATOR_CHECK(index < count_);
    if (type_ == MIXER_FLOAT16) {
      reinterpret_cast<__half*>(data_)[index] = __float2half_rn(value);
    } else if (type_ == MIXER_BFLOAT16) {
      reinterpret_cast<__nv_bfloat16*>(data_)[index] = __float2bfloat16_rn(value);
    } else {
      reinterpret_cast<float*>(data_)[index] = value;
    }
  }

  float get(size_t index) const {
    EMULATOR_CHECK(index < count_);
    if (type_ == MIXER_FLOAT16) return __half2float(reinterpret_cast<const __half*>(data_)[index]);
    if (type_ == MIXER_BFLOAT16)
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data_)[index]);
    return reinterpret_cast<const float*>(data_)[index];
  }

  // Checks that nothing was written outside.
  void check_guards() const {
    for (const char* byte = memory_.data(); byte < data_; ++byte) EMULATOR_CHECK(*byte == kFill);
    const char* end = memory_.data() + memory_.size();
    for (const char* byte = data_ + bytes_; byte < end; ++byte) EMULATOR_CHECK(*byte == kFill);
  }

 private:
  static constexpr int kGuard = 1024;
  static constexpr char kFill = char(0xa5);
  size_t count_;
  int type_;
  size_t bytes_;
  std::vector<char> memory_;
  char* data_;
};

// the gaps between the rows
enum Layout { kContiguous, kTokensFirst, kPadded, kLayouts };

// A random (batch, tokens, channels) tensor.
class Activations {
 public:
  int64_t batch_stride, token_stride;

  Activations(int batch, int tokens, int channels, int type, int layout, std::mt19937& random)
      : tokens_(tokens), channels_(channels), values_(size_t(batch) * tokens * channels) {
    size_t count = 0;
    if (layout == kContiguous) {
      token_stride = channels;
      batch_stride = int64_t(tokens) * channels;
      count = batch * batch_stride;
    } else if (layout == kTokensFirst) {
      batch_stride = channels + 16;
      token_stride = batch * batch_stride;
      first_ = 8;
      count = tokens * token_stride;
    } else {
      token_stride = channels + 24;
      batch_stride = (tokens + 2) * token_stride;
      first_ = token_stride + 8;
      count = batch * batch_stride;
    }
    buffer_.reset(new Buffer(count, type));
    fill(batch, random);
  }

  void* data() const { return buffer_->data() + first_ * 2; }
  const float* row(int sample, int token) const {
    return &values_[(size_t(sample) * tokens_ + token) * channels_];
  }

 private:
  void fill(int batch, std::mt19937& random) {
    float* value = values_.data();
    for (int sample = 0; sample < batch; ++sample) {
      for (int token = 0; token < tokens_; ++token) {
        for (int channel = 0; channel < channels_; ++channel) {
          *value = int(random() % 5) - 2;
          buffer_->set(first_ + sample * batch_stride + token * token_stride + channel, *value++);
        }
      }
    }
  }

  int tokens_, channels_;
  int64_t first_ = 0;
  std::vector<float> values_;
  std::unique_ptr<Buffer> buffer_;
};

// ------------------------------------------------------------------------------------------- cases

struct Case {
  int operation, tokens, width, heads, batch, dtype, processors;
  int extra;  // context less tokens
  bool with_bias, with_residual, by_lag;
  int layout, weight_dtype, bias_dtype;

  int channels() const { return width * heads; }
  int context() const { return tokens + extra; }
  int other_layout() const { return (layout + with_residual) % kLayouts; }

  std::string describe(uint64_t seed) const {
    char text[300];
    snprintf(
        text, sizeof text,
        "%s %s tokens %d width %d heads %d batch %d %s processors %d context %d "
        "bias %d (%s) residual %d layout %d gradient %s seed %lu",
        kOperationNames[operation], by_lag ? "by lag" : "", tokens, width, heads, batch, kTypeNames[dtype],
        processors, context(), with_bias, kTypeNames[bias_dtype], with_residual, layout,
        kTypeNames[weight_dtype], static_cast<unsigned long>(seed));
    return text;
  }

  TriangularConvParams params() const {
    TriangularConvParams params = {};
    params.batch = batch;
    params.tokens = tokens;
    params.channels = channels();
    params.context = context();
    params.heads = heads;
    params.lag_zero = by_lag ? (tokens + 127) / 128 * 128 : 0;
    params.columns = by_lag ? params.lag_zero + MIXER_STRIP_ROWS : (tokens + 7) / 8 * 8;
    params.dtype = dtype;
    params.weight_dtype = params.gradient_dtype = weight_dtype;
    params.bias_dtype = bias_dtype;
    params.capability = 90;
    params.processors = processors;
    return params;
  }
};

void compare(const char* what, int a, int b, int c, float got, float want) {
  if (got != want)
    emulator::fail("%s MISMATCH at (%d, %d, %d): got %g want %g", what, a, b, c, got, want);
}

// A random lower triangle per head, packed as in pack.cu: rows padded to a multiple of 8, zeros above
// the diagonal; by lag, a strip.
class Weight {
 public:
  Weight(const TriangularConvParams& params, std::mt19937& random)
      : tokens_(params.tokens),
        rows_(params.lag_zero > 0 ? MIXER_STRIP_ROWS : tokens_),
        packed_(size_t(params.heads) * rows_ * params.columns, params.dtype),
        values_(size_t(params.heads) * tokens_ * tokens_) {
    for (int head = 0; head < params.heads; ++head) {
      std::vector<float> lags(tokens_);
      for (float& value : lags) value = draw(random);
      for (int row = 0; row < tokens_; ++row) {
        for (int column = 0; column <= row; ++column) {
          values_[(size_t(head) * tokens_ + row) * tokens_ + column] =
              params.lag_zero > 0 ? lags[row - column] : draw(random);
        }
      }
      for (int row = 0; row < rows_; ++row) {
        for (int column = 0; column < params.columns; ++column) {
          const int lag = row + params.lag_zero - column;
          float value = 0;
          if (params.lag_zero == 0) {
            value = column < tokens_ ? at(head, row, column) : 0;
          } else if (lag >= 0 && lag < tokens_) {
            value = lags[lag];
          }
          packed_.set((size_t(head) * rows_ + row) * params.columns + column, value);
        }
      }
    }
  }
  void* data() const { return packed_.data(); }
  float at(int head, int row, int column) const {
    return values_[(size_t(head) * tokens_ + row) * tokens_ + column];
  }

 private:
  static float draw(std::mt19937& random) { return int(random() % 5) - 2; }
  int tokens_, rows_;
  Buffer packed_;
  std::vector<float> values_;
};

// Forward and grad-input.
void run_product(const Case& c, std::mt19937& random) {
  TriangularConvParams params = c.params();
  const bool is_forward = c.operation == kForward;
  const int tokens = c.tokens, channels = c.channels(), width = c.width;
  const Activations input(c.batch, tokens, channels, c.dtype, c.layout, random);
  const Weight weight(params, random);
  Buffer bias(size_t(c.heads) * c.context(), c.bias_dtype),
      output(size_t(c.batch) * tokens * channels, c.dtype);
  for (int head = 0; head < c.heads; ++head) {
    for (int row = 0; row < tokens; ++row)
      bias.set(size_t(head) * c.context() + row, int(random() % 9) - 4);
  }
  std::unique_ptr<Activations> residual;
  params.packed = weight.data();
  if (is_forward) {
    params.x = input.data();
    params.x_batch_stride = input.batch_stride;
    params.x_token_stride = input.token_stride;
    params.y = output.data();
    if (c.with_bias) params.bias = bias.data();
    if (c.with_residual) {
      residual.reset(new Activations(c.batch, tokens, channels, c.dtype, c.other_layout(), random));
      params.residual = residual->data();
      params.residual_batch_stride = residual->batch_stride;
      params.residual_token_stride = residual->token_stride;
    }
  } else {
    params.dy = input.data();
    params.dy_batch_stride = input.batch_stride;
    params.dy_token_stride = input.token_stride;
    params.dx = output.data();
  }
  EMULATOR_CHECK((is_forward ? hopper::forward(params) : hopper::grad_input(params)) ==
                 cudaSuccess);

  std::vector<float> sum(width);
  for (int sample = 0; sample < c.batch; ++sample) {
    for (int head = 0; head < c.heads; ++head) {
      for (int row = 0; row < tokens; ++row) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int depth = is_forward ? 0 : row; depth < (is_forward ? row + 1 : tokens); ++depth) {
          const float factor =
              is_forward ? weight.at(head, row, depth) : weight.at(head, depth, row);
          const float* values = input.row(sample, depth) + head * width;
          for (int k = 0; k < width; ++k) sum[k] += factor * values[k];
        }
        for (int k = 0; k < width; ++k) {
          const int channel = head * width + k;
          float want = sum[k];
          if (params.bias) want += bias.get(size_t(head) * c.context() + row);
          if (residual) want += residual->row(sample, row)[channel];
          const float got = output.get((size_t(sample) * tokens + row) * channels + channel);
          compare(kOperationNames[c.operation], sample, row, channel, got, rounded(c.dtype, want));
        }
      }
    }
  }
  output.check_guards();
}

void run_grad_weight(const Case& c, std::mt19937& random) {
  TriangularConvParams params = c.params();
  const int tokens = c.tokens, channels = c.channels(), width = c.width, context = c.context();
  const Activations x(c.batch, tokens, channels, c.dtype, c.layout, random);
  const Activations dy(c.batch, tokens, channels, c.dtype, c.other_layout(), random);
  Buffer dweight(size_t(c.heads) * context * (c.by_lag ? 1 : context), c.weight_dtype),
      dbias(size_t(c.heads) * context, c.weight_dtype);
  params.x = x.data();
  params.x_batch_stride = x.batch_stride;
  params.x_token_stride = x.token_stride;
  params.dy = dy.data();
  params.dy_batch_stride = dy.batch_stride;
  params.dy_token_stride = dy.token_stride;
  params.dweight = dweight.data();
  if (c.with_bias) params.dbias = dbias.data();
  Buffer workspace(hopper::grad_weight_workspace(params) / sizeof(float), MIXER_FLOAT32);
  params.workspace = workspace.data();
  EMULATOR_CHECK(hopper::grad_weight(params) == cudaSuccess);

  // x of a head, tokens innermost
  std::vector<float> columns(size_t(tokens) * c.batch * width), sum(tokens);
  for (int head = 0; head < c.heads; ++head) {
    for (int sample = 0; sample < c.batch; ++sample) {
      for (int token = 0; token < tokens; ++token) {
        const float* values = x.row(sample, token) + head * width;
        for (int k = 0; k < width; ++k)
          columns[(size_t(sample) * width + k) * tokens + token] = values[k];
      }
    }
    std::vector<float> lags(context);
    for (int row = 0; row < context; ++row) {
      std::fill(sum.begin(), sum.end(), 0.0f);
      float bias = 0;
      for (int depth = 0; row < tokens && depth < c.batch * width; ++depth) {
        const float factor = dy.row(depth / width, row)[head * width + depth % width];
        const float* values = &columns[size_t(depth) * tokens];
        bias += factor;
        for (int column = 0; column <= row; ++column) sum[column] += factor * values[column];
      }
      for (int column = 0; column <= row && row < tokens; ++column) lags[row - column] += sum[column];
      for (int column = 0; column < context && !c.by_lag; ++column) {
        const float want =
            column <= row && row < tokens ? rounded(c.weight_dtype, sum[column]) : 0.0f;
        compare("dweight", head, row, column,
                dweight.get((size_t(head) * context + row) * context + column), want);
      }
      if (c.with_bias && !c.by_lag)
        compare("dbias", head, row, 0, dbias.get(size_t(head) * context + row),
                rounded(c.weight_dtype, bias));
    }
    for (int lag = 0; lag < context && c.by_lag; ++lag) {
      compare("dlags", head, lag, 0, dweight.get(size_t(head) * context + lag),
              rounded(c.weight_dtype, lags[lag]));
    }
  }
  dweight.check_guards();
  dbias.check_guards();
  workspace.check_guards();
}

void run(const Case& c, uint64_t seed) {
  emulator::context = c.describe(seed);
  emulator::random_bits.seed(seed * 1000003 + c.tokens * 7919 + c.width * 31 + c.operation * 5 +
                             c.batch * 3 + c.heads);
  std::mt19937 random(seed * 17 + c.tokens);
  if (c.operation == kGradWeight) {
    run_grad_weight(c, random);
  } else {
    run_product(c, random);
  }
}

// ---------------------------------------------------------------------------------- choosing cases

template <size_t kCount>
int one_of(const int (&values)[kCount], std::mt19937_64& random) {
  return values[random() % kCount];
}

// Chooses sizes at random, near those where plans, tiles, blocks and boxes change. With few
// processors, clusters have many tiles.
Case choose(std::mt19937_64& random, int operation) {
  const int tokens[] = {1,   63,  64,  65,  128, 130, 192, 200, 256,  257,
                        300, 320, 384, 450, 512, 513, 577, 640, 1000, 1100};
  const int widths[] = {8, 40, 64, 72, 128, 136, 256}, batches[] = {1, 2, 3, 5},
            processors[] = {2, 2, 3, 4, 4, 6};
  Case c = {};
  c.tokens = one_of(tokens, random);
  c.operation = operation >= 0 ? operation : int(random() % kOperations);
  c.width = one_of(widths, random);
  c.heads = 1 + random() % 3;
  c.batch = one_of(batches, random);
  if (random() % 3 == 0) {
    const int times[kPlans] = {c.tokens <= 65 ? 8 : 4, 3, 1};
    c.batch *= times[plan_of(c.tokens)];
  }
  c.dtype = random() % 2 ? MIXER_BFLOAT16 : MIXER_FLOAT16;
  c.processors = one_of(processors, random);
  c.extra = random() % 3 ? 0 : random() % 300;
  c.with_bias = random() % 2;
  c.with_residual = random() % 2;
  c.by_lag = random() % 2;
  c.layout = random() % kLayouts;
  const int types[] = {MIXER_FLOAT32, MIXER_FLOAT16, MIXER_BFLOAT16};
  c.weight_dtype = one_of(types, random);
  c.bias_dtype = one_of(types, random);
  return c;
}

// Skips cases that would take seconds.
bool is_cheap(const Case& c) {
  return double(c.tokens) * c.tokens * c.batch * c.heads * ((c.width + 63) / 64) <= 1.6e7;
}

// The index of a name in a list; -1 for "any" or no name.
template <size_t kCount>
int index_of(const char* const (&names)[kCount], const char* name) {
  if (name == nullptr || strcmp(name, "any") == 0) return -1;
  for (size_t i = 0; i < kCount; ++i) {
    if (strcmp(names[i], name) == 0) return i;
  }
  emulator::fail("no %s", name);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) emulator::fail("usage: cases SEED COUNT [OPERATION [PLAN]]");
  const uint64_t seed = atoll(arguments[1]);
  const int cases = atoi(arguments[2]);
  const int operation = index_of(kOperationNames, count > 3 ? arguments[3] : nullptr);
  const int plan = index_of(kPlanNames, count > 4 ? arguments[4] : nullptr);
  std::mt19937_64 random(seed * 77777 + 5);
  int done[kOperations][kPlans] = {};
  for (int i = 0; i < cases;) {
    const Case c = choose(random, operation);
    if ((plan >= 0 && plan_of(c.tokens) != plan) || !is_cheap(c)) continue;
    run(c, seed * 100000 + i++);
    ++done[c.operation][plan_of(c.tokens)];
  }
  for (int i = 0; i < kOperations * kPlans; ++i) {
    printf("%s %s: %d\n", kOperationNames[i / kPlans], kPlanNames[i % kPlans],
           done[i / kPlans][i % kPlans]);
  }
  printf("turns %ld events %ld products %ld phases %ld\n", long(emulator::counters.turns),
         long(emulator::counters.events), long(emulator::counters.products),
         long(emulator::counters.phases));
}
