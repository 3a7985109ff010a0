// SPDX-License-Identifier: Apache-2.0
// Random problems against loops in float64, on threads of its own: for the sanitizers, and for bugs
// that tests plant into the kernel. It prints "ok", or what was wrong and returns 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "linear_wgrad.h"

namespace {

using namespace gnsfast::cpu;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
std::mt19937 random_numbers;

int one_of(std::initializer_list<int> values) {
  return values.begin()[random_numbers() % values.size()];
}

float normal() {
  static std::normal_distribution<float> distribution;
  return distribution(random_numbers);
}

void on_threads(void (*work)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> team;
  for (unsigned k = 0; k < threads; ++k) team.emplace_back(work, data);
  for (std::thread& each : team) each.join();
}

// Numbers with gaps of NaN between them, which the kernel must not use.
struct Operand {
  std::vector<float> values;
  std::vector<uint16_t> halves;
  Side side{};

  Operand(int64_t B, int64_t T, int64_t N, bool bfloat16, bool flat) {
    const int64_t step = one_of({1, 1, 2}), row = N * step + one_of({0, 3});
    const int64_t sample = T * row + (flat ? 0 : one_of({0, 5}));
    values.assign(B * sample, kNan);
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t k = 0; k < T * N; ++k) {
        float& value = values[b * sample + k / N * row + k % N * step];
        value = normal();
        if (!bfloat16) continue;
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        bits &= 0xffff0000;
        std::memcpy(&value, &bits, sizeof bits);
      }
    }
    for (size_t k = 0; bfloat16 && k < values.size(); ++k) {
      uint32_t bits;
      std::memcpy(&bits, &values[k], sizeof bits);
      halves.push_back(static_cast<uint16_t>(bits >> 16));
    }
    side = {values.data(), sample, row, step, N};
    if (bfloat16) side.data = halves.data();
  }

  double at(int64_t b, int64_t t, int64_t n) const {
    return values[b * side.stride_b + t * side.stride_t + n * side.stride_n];
  }
};

// Adds v² to one number of each measure.
struct Expected {
  std::vector<double> squares, weighed;
  explicit Expected(int64_t B) : squares(B + 1), weighed(B + 1) {}
  void add(int64_t b, double v, double p) { squares[b] += v * v, weighed[b] += p * v * v; }
};

int wrong = 0;

void compare(const char* what, double found, double expected, double tolerance) {
  if (std::abs(found - expected) <= tolerance) return;
  if (!wrong) std::printf("%s: %.9g, not %.9g\n", what, found, expected);
  wrong = 1;
}

void compare(const char* what, const float* row, const std::vector<double>& expected) {
  for (size_t b = 0; b < expected.size(); ++b) {
    compare(what, row[b], expected[b], 2e-5 * expected[b] + 1e-6 * expected.back());
  }
  compare(what, row[expected.size()], 1, 0);
}

void run_one(const std::string& kernel) {
  int64_t B = one_of({1, 2, 3, 7, 40}), T = one_of({1, 2, 5, 33, 64, 1025, 2100});
  if (T > 1000) B = std::min<int64_t>(B, 2);
  const int64_t M = one_of({1, 3, 6, 13, 14, 15, 29, 90}), N = one_of({1, 7, 16, 31, 32, 33, 70});
  const bool bfloat16 = one_of({0, 0, 1}), segments = one_of({0, 0, 0, 1});
  const bool given = !segments && one_of({0, 0, 1});
  const bool metric = !given && (T > 1 || segments) && one_of({0, 1}), bias = one_of({0, 1});
  const int64_t samples = B, rows_of_side = segments ? B * T : T;
  const Operand left(segments ? 1 : B, rows_of_side, M, bfloat16, given);
  const Operand right(segments ? 1 : B, rows_of_side, N, bfloat16, given);
  std::vector<int64_t> starts;
  for (int64_t b = 0; segments && b <= samples; ++b) starts.push_back(random_numbers() % (B * T + 1));
  std::sort(starts.begin(), starts.end());

  LinearWgrad call{};
  call.left = left.side;
  call.right = right.side;
  call.bfloat16 = bfloat16;
  call.B = samples;
  call.T = rows_of_side;
  call.starts = segments ? starts.data() : nullptr;
  call.bias_of_right = one_of({0, 1});
  call.threads = one_of({1, 2, 3});
  call.parallel = on_threads;
  const int64_t of_bias = call.bias_of_right ? N : M;
  std::vector<double> sqnorms(samples, 3.0);
  if (given) call.sqnorms = sqnorms.data();
  std::vector<float> v(M * N), bias_v(of_bias);
  for (float& each : v) each = std::abs(normal());
  for (float& each : bias_v) each = std::abs(normal());
  if (metric) call.weight = {v.data(), 0.5f, 0.1f};
  if (metric && bias) call.bias = {bias_v.data(), 2.f, 0.3f};
  const int64_t row = samples + 2;
  std::vector<float> dw(M * N, kNan), db(of_bias, kNan), rows(4 * row, kNan);
  call.dw = dw.data();
  call.row_step = N;
  call.column_step = 1;
  call.db = bias ? db.data() : nullptr;
  call.rows = rows.data();
  call.row_stride = row;
  linear_wgrad(call, kernel);

  const auto tokens = [&](int64_t b) { return segments ? starts[b + 1] - starts[b] : T; };
  const auto value = [&](const Operand& side, int64_t b, int64_t t, int64_t n) {
    return segments ? side.at(0, starts[b] + t, n) : side.at(b, t, n);
  };
  Expected weight(samples), of_db(samples);
  for (int64_t k = 0; k < M * N; ++k) {
    double total = 0;
    const double p = metric ? 1 / (std::sqrt(v[k]) * call.weight.s + call.weight.eps) : 0;
    for (int64_t b = 0; b < samples; ++b) {
      double sum = 0;
      for (int64_t t = 0; t < tokens(b); ++t) {
        sum += value(left, b, t, k / N) * value(right, b, t, k % N);
      }
      weight.add(b, sum, p);
      total += sum;
    }
    weight.add(samples, total, p);
    compare("dw", dw[k], total, 1e-3);
  }
  for (int64_t n = 0; n < of_bias; ++n) {
    double total = 0;
    const double p = metric ? 1 / (std::sqrt(bias_v[n]) * call.bias.s + call.bias.eps) : 0;
    for (int64_t b = 0; b < samples; ++b) {
      double sum = 0;
      const Operand& side = call.bias_of_right ? right : left;
      for (int64_t t = 0; t < tokens(b); ++t) sum += value(side, b, t, n);
      of_db.add(b, sum, p);
      total += sum;
    }
    of_db.add(samples, total, p);
    if (bias) compare("db", db[n], total, 1e-3);
  }
  if (given) std::fill(weight.squares.begin(), weight.squares.end() - 1, 3.0);
  compare("norms of dw", rows.data(), weight.squares);
  if (bias) compare("norms of db", rows.data() + row, of_db.squares);
  if (metric) compare("norms of dw under the metric", rows.data() + (1 + bias) * row, weight.weighed);
  if (metric && bias) compare("norms of db under the metric", rows.data() + 3 * row, of_db.weighed);
  if (wrong) {
    std::printf("%s: B %ld, T %ld, M %ld, N %ld, %d threads, bfloat16 %d, segments %d, given %d, "
                "metric %d, bias %d\n", kernel.c_str(), long(B), long(T), long(M), long(N),
                call.threads, bfloat16, segments, given, metric, bias);
  }
}

}  // namespace

int main(int count, char** words) {
  random_numbers.seed(std::atoi(words[count > 1 ? 1 : 0]));
  for (const std::string& kernel : kernel_names()) {
    for (int k = 0; k < 300 && !wrong; ++k) run_one(kernel);
  }
  if (!wrong) std::puts("ok");
  return wrong;
}
