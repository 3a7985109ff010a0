// SPDX-License-Identifier: Apache-2.0
// Each part of the rows gives dx, and in registers' width the sums of dy x̂ and of dy over its tokens,
// which are a sample's gradients. A part is some whole samples, or where there are few, some tokens
// of one. The parts do not depend on the threads, so neither do the bits.
#include "norm_backward.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

namespace gnsfast::cpu {
namespace {

constexpr int kTogether = 4;          // rows
constexpr int64_t kNear = 1 << 11;    // numbers of rows that a second pass reads
constexpr int64_t kFewVectors = 64;   // of a row are added in float32, then in float64
constexpr int kParts = 32;            // at least, where there are tokens enough
constexpr int64_t kTokens = 64;       // of a part of a sample, at least
constexpr int64_t kPart = 1 << 13;    // numbers of a part of whole samples, at least
constexpr int64_t kEnough = 1 << 15;  // numbers that are worth a thread

struct Work {
  const NormBackward& call;
  int rows;          // between the two passes: they stay in the first-level cache
  int64_t parts;     // of a sample
  int64_t count;     // of all
  double* sums;      // [count, 2, padded(F)]
  double* squares;   // [B, 2]
};

struct Part {
  int64_t sample, last_sample, token, last_token;
};

// Whole vectors of any instruction set.
inline int64_t padded(int64_t F) { return (F + 15) / 16 * 16; }

inline Part part_of(const Work& work, int64_t index) {
  const int64_t B = work.call.B, T = work.call.T;
  if (work.parts == 1) return {B * index / work.count, B * (index + 1) / work.count, 0, T};
  const int64_t b = index / work.parts, k = index % work.parts;
  return {b, b + 1, T * k / work.parts, T * (k + 1) / work.parts};
}

inline double sum_of_squares(const double* values, int64_t count) {
  double lanes[8] = {}, sum = 0;
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += values[k + lane] * values[k + lane];
  }
  for (; k < count; ++k) sum += values[k] * values[k];
  for (double lane : lanes) sum += lane;
  return sum;
}

#define GNSFAST_LOOPS "norm.h"
#include "instruction_sets.h"

constexpr void (*kKernels[])(const Work&, int, char*) = {avx512::run, avx2::run};

// The sums of all parts in their order: dW or db, and the probe row.
void finish(const Work& work, int which, float* grad, float* row) {
  const int64_t B = work.call.B, F = work.call.x.N, wide = padded(F);
  std::vector<double> total(F), sample(F);
  for (int64_t index = 0; index < work.count; ++index) {
    const double* own = work.sums + (2 * index + which) * wide;
    if (work.parts == 1) {
      for (int64_t k = 0; k < F; ++k) total[k] += own[k];
      continue;
    }
    for (int64_t k = 0; k < F; ++k) sample[k] += own[k];
    if ((index + 1) % work.parts) continue;
    row[index / work.parts] = float(sum_of_squares(sample.data(), F));
    for (int64_t k = 0; k < F; ++k) total[k] += std::exchange(sample[k], 0.0);
  }
  for (int64_t b = 0; b < B && work.parts == 1; ++b) row[b] = float(work.squares[2 * b + which]);
  row[B] = float(sum_of_squares(total.data(), F));
  row[B + 1] = 1.f;
  for (int64_t k = 0; k < F; ++k) grad[k] = float(total[k]);
}

}  // namespace

void norm_backward(const NormBackward& call, const std::string& name) {
  const auto run = kKernels[index_of(name)];
  const int64_t F = call.x.N, wide = padded(F), B = call.B;
  const int64_t parts = std::min((kParts + B - 1) / B, std::max<int64_t>(1, call.T / kTokens));
  const int64_t most = std::min<int64_t>(B, kParts), numbers = B * call.T * F;
  const int64_t count = parts > 1 ? B * parts : std::clamp<int64_t>(numbers / kPart, 1, most);
  std::vector<double> sums(count * 2 * wide), squares(2 * B);
  int rows = kFewTokens;
  while (rows > kTogether && rows * wide > kNear) rows /= 2;
  const Work work{call, rows, parts, count, sums.data(), squares.data()};
  const size_t floats = (2 + 1 + 3 * rows) * wide, doubles = 2 * wide;
  const size_t bytes = floats * sizeof(float) + doubles * sizeof(double);
  const int threads = call.team.for_work(std::min(count, numbers / kEnough));
  const auto take = [&](int index, char* memory) { run(work, index, memory); };
  for_each(call.team, threads, int(count), bytes, take);
  float* row = call.rows;
  if (call.dw) finish(work, 0, call.dw, std::exchange(row, row + call.row_stride));
  if (call.db) finish(work, 1, call.db, row);
}

}  // namespace gnsfast::cpu
