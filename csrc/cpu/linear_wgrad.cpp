// SPDX-License-Identifier: Apache-2.0
// dW is cut into tiles that fit into a processor's vector registers. A tile takes all tokens of a
// sample, is squared, is added to dW, and takes the next sample. A side that few tiles read is not
// packed, but read where it lies:
//
//                 right: [tokens, kColumns], packed
//                 ┌──────────────┐
//   left:         │ tile         │  in registers      Σ tile² -> the sample's squared norm
//   [tokens,      │ kRows x      │                    + tile -> dW
//   kRows],       │ kColumns     │
//   packed        └──────────────┘
//
// Threads take blocks of tiles and meet at the end.
#include "linear_wgrad.h"

#include <algorithm>
#include <type_traits>

#include "plan.h"

namespace gnsfast::cpu {
namespace {

#define GNSFAST_LOOPS "tile.h"
#include "instruction_sets.h"

const Kernel kKernels[] = {
    {"avx512", avx512::kRows, avx512::kColumns, 0, kWidest / avx512::kColumns, 4, avx512::bytes_of,
     avx512::run},
    {"avx2", avx2::kRows, avx2::kColumns, 0, kWidest / avx2::kColumns, 4, avx2::bytes_of,
     avx2::run},
};

void run_blocks(Work& work) {
  const auto take = [&](int block, char* memory) { work.kernel.run(work, block, memory); };
  const size_t bytes = work.kernel.bytes(work);
  for_each(work.call.team, work.threads, work.grid.blocks(), bytes, take);
}

// Adds what the blocks found, in their order, and writes the probe rows.
void write_rows(Work& work) {
  const LinearWgrad& call = work.call;
  const auto row = [&](int k) { return call.rows + k * call.row_stride; };
  for (int64_t b = 0; b <= call.B; ++b) {
    double found[kFound] = {};
    for (int block = 0; block < work.grid.blocks(); ++block) {
      for (int k = 0; k < work.kinds; ++k) found[k] += work.found(block, Found(k))[b];
    }
    if (b < call.B && work.closed) found[kWeight] = found[kLeft] * found[kRight];
    if (b < call.B && call.sqnorms) found[kWeight] = call.sqnorms[b];
    row(0)[b] = float(found[kWeight]);
    if (call.db) row(1)[b] = float(found[call.bias_of_right ? kRight : kLeft]);
  }
  for (int k = 0; k < (call.db ? 2 : 1); ++k) row(k)[call.B + 1] = 1.f;
}

const Kernel* kernel_of(const std::string& name, bool bfloat16) {
  for (const Kernel* kernel : {amx_kernel(), bfloat16_kernel()}) {
    if (kernel && bfloat16 && name == kernel->name) return kernel;
  }
  return &kKernels[index_of(name)];
}

}  // namespace

std::vector<std::string> bfloat16_kernels() {
  std::vector<std::string> names;
  for (const Kernel* kernel : {amx_kernel(), bfloat16_kernel()}) {
    if (kernel) names.push_back(kernel->name);
  }
  return names;
}

void linear_wgrad(LinearWgrad call, const std::string& name) {
  const Kernel* const kernel = kernel_of(name, call.bfloat16);
  if (call.dw_bfloat16 && kernel != amx_kernel()) {
    throw std::invalid_argument("amx alone writes bfloat16");
  }
  if (call.T == 1 && !call.starts) {  // the samples are the tokens of one
    call.left.stride_t = call.left.stride_b;
    call.right.stride_t = call.right.stride_b;
  }
  if (call.right.N <= kernel->columns / 2 && call.left.N > call.right.N) {
    std::swap(call.left, call.right);  // a thin right side would leave most of a vector empty
    std::swap(call.row_step, call.column_step);
    call.bias_of_right = !call.bias_of_right;
  }
  Work work = plan(call, *kernel);
  run_blocks(work);
  write_rows(work);
}

}  // namespace gnsfast::cpu
