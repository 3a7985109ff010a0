// SPDX-License-Identifier: Apache-2.0
// Runs the kernel of token_sqnorms.cuh on the host model: main_token_sqnorms SEED prints a line a case
// and exits with 1 at the first that is wrong.
#define GNSFAST_HOST_MODEL
#include "../token_sqnorms.cuh"
#include "check.h"

template <class Element>
bool run(const char* name, int B, int I, int O, int x_stride, unsigned seed) {
  using namespace gnsfast;
  const Samples<Element> samples({B, 1, x_stride, O}, seed);  // x is the first I of each row
  std::vector<float> product(B, NAN), dy_sqnorm(B, NAN);
  const TokenRows x{samples.x.data(), x_stride, I}, dy{samples.dy.data(), O, O};
  host_model::launch((B + kRowWarps - 1) / kRowWarps, 1, 32 * kRowWarps, 1024, seed, [&] {
    token_sqnorms_kernel<Element>(x, dy, B, product.data(), dy_sqnorm.data());
  });
  double worst = 0;
  for (int b = 0; b < B; ++b) {
    double of_x = 0, of_dy = 0;
    for (int k = 0; k < I; ++k) of_x += pow(to_float(samples.x[b * x_stride + k]), 2);
    for (int k = 0; k < O; ++k) of_dy += pow(to_float(samples.dy[b * O + k]), 2);
    worst = larger(worst, std::abs(product[b] - of_x * of_dy) / (of_x * of_dy));
    worst = larger(worst, std::abs(dy_sqnorm[b] - of_dy) / of_dy);
  }
  const bool ok = worst <= 1e-6;
  printf("%-22s B %d I %d O %d  norms %.1e  %s\n", name, B, I, O, worst, ok ? "ok" : "WRONG");
  return ok;
}

int main(int count, char** arguments) {
  const unsigned seed = count > 1 ? atoi(arguments[1]) : 1;
  bool ok = true;
  ok = ok && run<__nv_bfloat16>("a block", 8, 256, 512, 256, seed);
  ok = ok && run<__nv_bfloat16>("ragged", 19, 1000, 264, 1000, seed);
  ok = ok && run<__nv_bfloat16>("a slice of wider rows", 3, 40, 8, 104, seed);
  ok = ok && run<__half>("float16", 9, 2056, 72, 2056, seed);
  return ok ? 0 : 1;
}
