// SPDX-License-Identifier: Apache-2.0
// dW is cut into tiles that fit into a processor's vector registers. A tile takes all tokens of a
// sample, is squared, is added to dW, and takes the next sample:
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
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <type_traits>

#include "plan.h"

namespace gnsfast::cpu {
namespace {

struct Bfloat16 {
  uint16_t bits;
};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,fma")
#endif
namespace avx512 {
constexpr int kLanes = 16, kVectors = 2, kRows = 14;  // 28 sums, 2 of right, 1 of left: 31 of 32
#include "tile.h"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
constexpr int kLanes = 8, kVectors = 2, kRows = 6;  // 12 sums, 2 of right, 1 of left: 15 of 16
#include "tile.h"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// Those that this processor runs, the fastest first.
const std::vector<Kernel>& kernels() {
  static const std::vector<Kernel> found = [] {
    std::vector<Kernel> kernels;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
      kernels.push_back({"avx512", avx512::kRows, avx512::kColumns, avx512::run});
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      kernels.push_back({"avx2", avx2::kRows, avx2::kColumns, avx2::run});
    }
#endif
    return kernels;
  }();
  return found;
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// Every thread takes the next block until none is left, so it does not matter how many there are.
void run_blocks(Work& work) {
  const size_t bytes = memory_of(work, nullptr).bytes;
  const std::unique_ptr<char, Free> memory(
      static_cast<char*>(std::aligned_alloc(64, bytes * work.threads)));
  if (!memory) throw std::bad_alloc();
  struct Shared {
    Work& work;
    char* memory;
    size_t bytes;
    std::atomic<int> next_thread, next_block;
  } shared{work, memory.get(), bytes, {0}, {0}};
  const auto take_blocks = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    const int thread = shared.next_thread++;
    if (thread >= shared.work.threads) return;
    char* own = shared.memory + thread * shared.bytes;
    for (int k; (k = shared.next_block++) < shared.work.grid.blocks();) {
      shared.work.kernel.run(shared.work, k, own);
    }
  };
  if (work.threads > 1) {
    // All of torch's threads, as OpenMP ends those that a smaller team leaves out.
    work.call.parallel(take_blocks, &shared, work.call.threads, 0);
  } else {
    take_blocks(&shared);
  }
}

// Adds what the blocks found, in their order, and writes the probe rows.
void write_rows(Work& work) {
  const LinearWgrad& call = work.call;
  const int parameters = call.db ? 2 : 1;
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
    if (call.weight.v) row(parameters)[b] = float(found[kWeighed]);
    if (call.bias.v) row(parameters + 1)[b] = float(found[kBiasWeighed]);
  }
  for (int k = 0; k < parameters * (call.weight.v ? 2 : 1); ++k) row(k)[call.B + 1] = 1.f;
}

}  // namespace

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const Kernel& kernel : kernels()) names.push_back(kernel.name);
  return names;
}

void linear_wgrad(LinearWgrad call, const std::string& name) {
  const auto named = [&](const Kernel& kernel) { return name == kernel.name; };
  const auto kernel = std::find_if(kernels().begin(), kernels().end(), named);
  if (kernel == kernels().end()) throw std::invalid_argument("this processor has no kernel " + name);

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
