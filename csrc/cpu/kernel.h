// SPDX-License-Identifier: Apache-2.0
// What all CPU kernels share: their operands, their instruction sets and their threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace gnsfast::cpu {

constexpr int kFewTokens = 32;  // are added in float32, then in float64

struct Bfloat16 {
  uint16_t bits;
};

// [B, T, N].
struct Side {
  const void* data;
  int64_t stride_b, stride_t, stride_n, N;
};

// The names of what ``instruction_sets.h`` compiles for.
constexpr const char* kInstructionSets[] = {"avx512", "avx2"};

// Those that this processor runs, the fastest first.
inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  if (__builtin_cpu_supports("avx512f")) names.push_back(kInstructionSets[0]);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    names.push_back(kInstructionSets[1]);
  }
  return names;
}

// The place of a name in ``kInstructionSets``.
inline int index_of(const std::string& name) {
  static const std::vector<std::string> here = instruction_sets();
  if (std::find(here.begin(), here.end(), name) == here.end()) {
    throw std::invalid_argument("this processor has no kernel " + name);
  }
  const auto found = std::find(std::begin(kInstructionSets), std::end(kInstructionSets), name);
  return static_cast<int>(found - std::begin(kInstructionSets));
}

// Runs ``work(data)`` on up to ``threads`` threads and waits for them: GOMP_parallel of OpenMP.
using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

struct Team {
  int threads;
  Parallel parallel;  // or null: then there is one thread

  // The threads that so many pieces of work are worth.
  int for_work(int64_t pieces) const {
    return parallel ? static_cast<int>(std::clamp<int64_t>(pieces, 1, threads)) : 1;
  }
};

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// ``take(item, memory)`` for all items. Each thread has ``bytes`` of memory and takes the next item
// until none is left, so it does not matter how many there are.
template <class Take>
void for_each(const Team& team, int threads, int items, size_t bytes, const Take& take) {
  const size_t each = (bytes + 63) / 64 * 64;
  const std::unique_ptr<char, Free> memory(
      static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(64, each * threads))));
  if (!memory) throw std::bad_alloc();
  struct Shared {
    const Take& take;
    char* memory;
    size_t each;
    int threads, items;
    std::atomic<int> next_thread, next_item;
  } shared{take, memory.get(), each, threads, items, {0}, {0}};
  const auto take_items = [](void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    const int thread = shared.next_thread++;
    if (thread >= shared.threads) return;
    char* own = shared.memory + thread * shared.each;
    for (int k; (k = shared.next_item++) < shared.items;) shared.take(k, own);
  };
  if (threads > 1) {
    // All of torch's threads, as OpenMP ends those that a smaller team leaves out.
    team.parallel(take_items, &shared, team.threads, 0);
  } else {
    take_items(&shared);
  }
}

}  // namespace gnsfast::cpu
