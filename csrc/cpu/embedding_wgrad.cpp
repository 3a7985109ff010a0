// SPDX-License-Identifier: Apache-2.0
// Each sample's tokens are sorted by their id. Then each thread takes some columns: it adds the rows
// of an id within a sample, squares the sum and adds it to dW. No two threads write to the same
// number, and the order of all sums is the same for any number of threads.
#include "embedding_wgrad.h"

#include <algorithm>
#include <utility>

namespace gnsfast::cpu {
namespace {

constexpr int64_t kColumns = 64;      // of a block, which a thread takes whole
constexpr int64_t kSamples = 8;       // that are sorted at a time
constexpr int64_t kEnough = 1 << 15;  // numbers that are worth a thread

struct Place {
  int64_t id, token;
};

// The tokens of one id in a sample. ``last``: no later sample has this id.
struct Run {
  const Place *begin, *end;
  bool last;
};

struct Work {
  const EmbeddingWgrad& call;
  std::vector<std::vector<Run>> runs;  // of each sample
  double* found;                       // [blocks, B + 1]
};

#define GNSFAST_LOOPS "gather.h"
#include "instruction_sets.h"

constexpr void (*kKernels[])(const Work&, int, int, double*) = {avx512::run, avx2::run};

// The runs of a sample, whose tokens go to ``places``; without the padding.
std::vector<Run> runs_of(const EmbeddingWgrad& call, int64_t b, Place* places) {
  Place* end = places;
  for (int64_t t = 0; t < call.T; ++t) {
    const int64_t id = call.ids[b * call.ids_stride_b + t * call.ids_stride_t];
    if (id < 0 || id != call.padding_idx) *end++ = {id, t};
  }
  std::sort(places, end, [](const Place& one, const Place& other) {
    return one.id != other.id ? one.id < other.id : one.token < other.token;
  });
  std::vector<Run> runs;
  for (const Place *at = places, *next; at < end; at = next) {
    next = std::find_if(at, static_cast<const Place*>(end),
                        [&](const Place& place) { return place.id != at->id; });
    runs.push_back({at, next, false});
  }
  return runs;
}

void find_last(Work& work) {
  std::vector<bool> seen(work.call.V);
  for (int64_t b = work.call.B; b-- > 0;) {
    for (Run& run : work.runs[b]) {
      const int64_t id = run.begin->id;
      if (id < 0 || id >= work.call.V) throw std::out_of_range("an id is not in the table");
      run.last = !seen[id];
      seen[id] = true;
    }
  }
}

}  // namespace

void embedding_wgrad(const EmbeddingWgrad& call, const std::string& name) {
  const auto run = kKernels[index_of(name)];
  const int64_t B = call.B, D = call.dy.N, blocks = (D + kColumns - 1) / kColumns;
  const int groups = int((B + kSamples - 1) / kSamples);
  std::vector<Place> places(B * call.T);
  std::vector<double> found(blocks * (B + 1));
  Work work{call, std::vector<std::vector<Run>>(B), found.data()};
  const int threads = call.team.for_work(B * call.T * D / kEnough);
  for_each(call.team, std::min(threads, groups), groups, 0, [&](int group, char*) {
    for (int64_t b = group * kSamples; b < std::min(B, (group + 1) * kSamples); ++b) {
      work.runs[b] = runs_of(call, b, places.data() + b * call.T);
    }
  });
  find_last(work);
  const int parts = int(std::min<int64_t>(threads, blocks));
  const size_t bytes = 2 * (blocks / parts + 1) * kColumns * sizeof(double);
  for_each(call.team, parts, parts, bytes, [&](int part, char* memory) {
    const auto cut = [&](int at) { return int(blocks * at / parts); };
    run(work, cut(part), cut(part + 1), reinterpret_cast<double*>(memory));
  });
  for (int64_t b = 0; b <= B; ++b) {
    double sum = 0;
    for (int64_t k = 0; k < blocks; ++k) sum += found[k * (B + 1) + b];
    call.rows[b] = float(sum);
  }
  call.rows[B + 1] = 1.f;
}

}  // namespace gnsfast::cpu
