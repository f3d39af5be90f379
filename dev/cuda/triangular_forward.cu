// The ladder of the forward product: y = W x, with bias and residual if they are given. README.md
// says how to run it.
#include "triangular_product.cuh"

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  return run_ladder(kForward, options,
                    product_ladder<kForward>("one thread an element, j <= i only"));
}
