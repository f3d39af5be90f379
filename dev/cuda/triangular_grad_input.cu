// The ladder of the gradient with respect to the input: dx = W^T dy. README.md says how to run it.
#include "triangular_product.cuh"

int main(int count, char** arguments) {
  const Options options = parse(count, arguments);
  return run_ladder(kGradInput, options,
                    product_ladder<kGradInput>("one thread an element, i >= j only"));
}
