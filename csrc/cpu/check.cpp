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

#include "embedding_wgrad.h"
#include "gram.h"
#include "linear_wgrad.h"
#include "norm_backward.h"
#include "transpose.h"

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

float widened(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
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
    const int64_t step = one_of({1, 1, 2});
    const int64_t row = std::max<int64_t>(N * step + one_of({0, 3}), one_of({0, 0, 1024}));
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

int wrong = 0;

void compare(const char* what, double found, double expected, double tolerance) {
  if (std::abs(found - expected) <= tolerance) return;
  if (!wrong) std::printf("%s: %.9g, not %.9g\n", what, found, expected);
  wrong = 1;
}

// Of sums over so many tokens, which may almost vanish.
void compare(const char* what, const float* row, const std::vector<double>& expected,
             int64_t tokens) {
  for (size_t b = 0; b < expected.size(); ++b) {
    compare(what, row[b], expected[b], 2e-5 * expected[b] + 1e-6 * (expected.back() + tokens));
  }
  compare(what, row[expected.size()], 1, 0);
}

void check_linear(const std::string& kernel) {
  int64_t B = one_of({1, 2, 3, 7, 40}), T = one_of({1, 2, 5, 33, 64, 1025, 2100});
  if (T > 1000) B = std::min<int64_t>(B, 2);
  const int64_t M = one_of({1, 3, 6, 13, 14, 15, 29, 90});
  const int64_t N = one_of({1, 7, 16, 31, 32, 33, 70, 150});
  const std::vector<std::string> halves = bfloat16_kernels();
  const bool bfloat16 = std::find(halves.begin(), halves.end(), kernel) != halves.end() ||
                        one_of({0, 0, 1});
  const bool segments = one_of({0, 0, 0, 1});
  const bool given = !segments && one_of({0, 0, 1});
  const bool bias = one_of({0, 1});
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
  call.team = {one_of({1, 2, 3}), on_threads};
  const int64_t of_bias = call.bias_of_right ? N : M;
  std::vector<double> sqnorms(samples, 3.0);
  if (given) call.sqnorms = sqnorms.data();
  const int64_t row = samples + 2;
  std::vector<float> dw(M * N, kNan), db(of_bias, kNan), rows(2 * row, kNan);
  call.dw = dw.data();
  call.dw_bfloat16 = kernel == "amx" && one_of({0, 1});
  call.row_step = N;
  call.column_step = 1;
  call.db = bias ? db.data() : nullptr;
  call.rows = rows.data();
  call.row_stride = row;
  linear_wgrad(call, kernel);

  const auto dw_at = [&](int64_t k) {
    return call.dw_bfloat16 ? widened(reinterpret_cast<const uint16_t*>(dw.data())[k]) : dw[k];
  };
  const auto tokens = [&](int64_t b) { return segments ? starts[b + 1] - starts[b] : T; };
  const auto value = [&](const Operand& side, int64_t b, int64_t t, int64_t n) {
    return segments ? side.at(0, starts[b] + t, n) : side.at(b, t, n);
  };
  std::vector<double> weight(samples + 1), of_db(samples + 1);  // squared norms
  for (int64_t k = 0; k < M * N; ++k) {
    double total = 0;
    for (int64_t b = 0; b < samples; ++b) {
      double sum = 0;
      for (int64_t t = 0; t < tokens(b); ++t) {
        sum += value(left, b, t, k / N) * value(right, b, t, k % N);
      }
      weight[b] += sum * sum;
      total += sum;
    }
    weight[samples] += total * total;
    compare("dw", dw_at(k), total, 1e-3 + (call.dw_bfloat16 ? std::abs(total) / 255 : 0));
  }
  for (int64_t n = 0; n < of_bias; ++n) {
    double total = 0;
    for (int64_t b = 0; b < samples; ++b) {
      double sum = 0;
      const Operand& side = call.bias_of_right ? right : left;
      for (int64_t t = 0; t < tokens(b); ++t) sum += value(side, b, t, n);
      of_db[b] += sum * sum;
      total += sum;
    }
    of_db[samples] += total * total;
    if (bias) compare("db", db[n], total, 1e-3);
  }
  if (given) std::fill(weight.begin(), weight.end() - 1, 3.0);
  compare("norms of dw", rows.data(), weight, T);
  if (bias) compare("norms of db", rows.data() + row, of_db, T);
  if (wrong) {
    std::printf("%s: B %ld, T %ld, M %ld, N %ld, %d threads, bfloat16 %d, segments %d, given %d, "
                "bias %d\n", kernel.c_str(), long(B), long(T), long(M), long(N),
                call.team.threads, bfloat16, segments, given, bias);
  }
}

void check_gram(const std::string& kernel) {
  const std::vector<std::string> halves = bfloat16_kernels();
  const bool bfloat16 = std::find(halves.begin(), halves.end(), kernel) != halves.end() ||
                        one_of({0, 1});
  const int64_t B = one_of({1, 2, 3, 7, 20}), T = one_of({2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 100});
  const int64_t M = one_of({1, 7, 32, 64, 65, 160}), N = one_of({1, 15, 31, 32, 128, 200});
  const bool flat = one_of({0, 1});
  const Operand left(B, T, M, bfloat16, flat), right(B, T, N, bfloat16, flat);
  if (kernel != "amx" && (left.side.stride_n != 1 || right.side.stride_n != 1)) return;
  std::vector<double> sqnorms(B, kNan), terms(B, kNan);
  const Team team{one_of({1, 2, 3}), on_threads};
  gram_sqnorms({left.side, right.side, bfloat16, B, T, sqnorms.data(), terms.data(), team}, kernel);
  for (int64_t b = 0; b < B; ++b) {
    double sum = 0, absolute = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t s = 0; s < T; ++s) {
        double of_left = 0, of_right = 0;
        for (int64_t k = 0; k < M; ++k) of_left += left.at(b, t, k) * left.at(b, s, k);
        for (int64_t k = 0; k < N; ++k) of_right += right.at(b, t, k) * right.at(b, s, k);
        sum += of_left * of_right;
        absolute += std::abs(of_left * of_right);
      }
    }
    compare("norms by products of rows", sqnorms[b], sum, 1e-6 * absolute + 1e-3);
    compare("absolute terms", terms[b], absolute, 1e-6 * absolute + 1e-3);
  }
  if (wrong) {
    std::printf("%s: rows, B %ld, T %ld, M %ld, N %ld, bfloat16 %d\n", kernel.c_str(), long(B),
                long(T), long(M), long(N), bfloat16);
  }
}

void check_norm(const std::string& kernel) {
  int64_t B = one_of({1, 2, 3, 40}), T = one_of({1, 2, 5, 31, 33, 130, 600});
  if (T > 100) B = std::min<int64_t>(B, 3);
  const int64_t F = one_of({1, 3, 15, 16, 17, 32, 63, 64, 129, 2500});
  if (F > 1000) T = std::min<int64_t>(T, 5);
  const bool bfloat16 = one_of({0, 0, 1}), centered = one_of({0, 1}), gain = one_of({0, 1, 1});
  const bool weight = gain && one_of({0, 1, 1}), bias = centered && gain && one_of({0, 1});
  const Operand dy(B, T, F, bfloat16, false), x(B, T, F, bfloat16, false);
  std::vector<float> mean(B * T), rstd(B * T), w(F);
  for (float& each : w) each = normal();
  const float eps = 1e-3f, offset = centered ? 0.f : one_of({0, 1});
  for (int64_t row = 0; row < B * T; ++row) {
    double sum = 0, squares = 0;
    for (int64_t k = 0; k < F; ++k) {
      const double each = x.at(row / T, row % T, k);
      sum += each, squares += each * each;
    }
    const double middle = centered ? sum / F : 0;
    mean[row] = float(middle);
    rstd[row] = float(1 / std::sqrt(squares / F - middle * middle + eps));
  }
  std::vector<float> dx(B * T * F + 1, kNan), dw(F, kNan), db(F, kNan), rows(2 * (B + 3), kNan);
  NormBackward call{dy.side, x.side, bfloat16, B, T,
                    centered ? mean.data() : nullptr, centered ? rstd.data() : nullptr,
                    gain ? w.data() : nullptr, eps, offset,
                    dx.data(), weight ? dw.data() : nullptr, bias ? db.data() : nullptr,
                    rows.data(), B + 3, {one_of({1, 2, 3}), on_threads}};
  norm_backward(call, kernel);

  std::vector<double> of_w(B + 1), of_b(B + 1);  // squared norms
  std::vector<double> total_w(F), total_b(F);
  const auto dx_at = [&](int64_t k) {
    return bfloat16 ? widened(reinterpret_cast<const uint16_t*>(dx.data())[k]) : dx[k];
  };
  for (int64_t b = 0; b < B; ++b) {
    std::vector<double> own_w(F), own_b(F);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t row = b * T + t;
      double of_dx = 0, along_x = 0;
      const auto normed = [&](int64_t k) { return (x.at(b, t, k) - mean[row]) * rstd[row]; };
      const auto weighed = [&](int64_t k) {
        return dy.at(b, t, k) * (gain ? w[k] + offset : 1.f);
      };
      for (int64_t k = 0; k < F; ++k) {
        if (centered) of_dx += weighed(k) / F;
        along_x += weighed(k) * normed(k) / F;
        own_w[k] += dy.at(b, t, k) * normed(k);
        own_b[k] += dy.at(b, t, k);
      }
      for (int64_t k = 0; k < F; ++k) {
        const double expected = (weighed(k) - of_dx - normed(k) * along_x) * rstd[row];
        const double rounding = bfloat16 ? std::abs(expected) / 255 : 0;  // half of 2^-7
        const double scale = rstd[row] + std::abs(expected);
        compare("dx", dx_at(row * F + k), expected, 4e-5 * scale + rounding);
      }
    }
    for (int64_t k = 0; k < F; ++k) {
      of_w[b] += own_w[k] * own_w[k], of_b[b] += own_b[k] * own_b[k];
      total_w[k] += own_w[k], total_b[k] += own_b[k];
    }
  }
  for (int64_t k = 0; k < F; ++k) {
    of_w[B] += total_w[k] * total_w[k], of_b[B] += total_b[k] * total_b[k];
    if (weight) compare("dw of a norm", dw[k], total_w[k], 1e-3);
    if (bias) compare("db of a norm", db[k], total_b[k], 1e-3);
  }
  if (weight) compare("norms of a norm's dw", rows.data(), of_w, T);
  const float* const row_of_b = rows.data() + (weight ? B + 3 : 0);
  if (bias) compare("norms of a norm's db", row_of_b, of_b, T);
  if (wrong) {
    std::printf("%s: norm, B %ld, T %ld, F %ld, %d threads, bfloat16 %d, centered %d\n",
                kernel.c_str(), long(B), long(T), long(F), call.team.threads, bfloat16, centered);
  }
}

void check_embedding(const std::string& kernel) {
  const int64_t B = one_of({1, 2, 9, 17}), T = one_of({1, 4, 35, 300});
  const int64_t D = one_of({1, 31, 64, 65, 200}), V = one_of({2, 5, 400});
  const bool bfloat16 = one_of({0, 0, 1});
  const Operand dy(B, T, D, bfloat16, false);
  std::vector<int64_t> ids(2 * B * T, -7);
  for (int64_t k = 0; k < B * T; ++k) ids[2 * k] = random_numbers() % V;
  std::vector<float> dw(V * D), rows(B + 2, kNan);
  const EmbeddingWgrad call{dy.side, bfloat16, B, T, ids.data(), 2 * T, 2, V, one_of({-1, 0, 1}),
                            dw.data(), rows.data(), {one_of({1, 2, 3}), on_threads}};
  embedding_wgrad(call, kernel);

  std::vector<double> of_w(B + 1);
  std::vector<double> total(V * D), own(V * D);
  for (int64_t b = 0; b < B; ++b) {
    std::fill(own.begin(), own.end(), 0.0);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t id = ids[2 * (b * T + t)];
      for (int64_t k = 0; k < D && id != call.padding_idx; ++k) own[id * D + k] += dy.at(b, t, k);
    }
    for (int64_t k = 0; k < V * D; ++k) of_w[b] += own[k] * own[k], total[k] += own[k];
  }
  for (int64_t k = 0; k < V * D; ++k) {
    of_w[B] += total[k] * total[k];
    compare("dw of an embedding", dw[k], total[k], 1e-3);
  }
  compare("norms of an embedding's dw", rows.data(), of_w, T);
  if (wrong) {
    std::printf("%s: embedding, B %ld, T %ld, D %ld, V %ld, %d threads, bfloat16 %d\n",
                kernel.c_str(), long(B), long(T), long(D), long(V), call.team.threads, bfloat16);
  }
}

template <class T>
void check_transpose() {
  const int64_t n = one_of({1, 3}), C = one_of({1, 7, 16, 40}), H = one_of({1, 4});
  const int64_t W = one_of({1, 16, 31, 257, 600}), gap = one_of({0, 3});
  std::vector<T> from(n * C * H * W), to(n * H * (W + gap) * (C + gap), T(77));
  for (size_t k = 0; k < from.size(); ++k) from[k] = T(k % 5003 + 100);
  const int64_t to_w = C + gap, to_h = (W + gap) * to_w;
  transpose({from.data(), to.data(), sizeof(T), n, C, H, W, C * H * W, H * W, W, H * to_h, to_h,
             to_w, {one_of({1, 2, 3}), on_threads}});
  for (int64_t k = 0; k < int64_t(to.size()); ++k) {
    const int64_t c = k % to_w, w = k / to_w % (W + gap), h = k / to_h % H, of = k / to_h / H;
    const bool inside = c < C && w < W;
    compare("transpose", to[k], inside ? from[((of * C + c) * H + h) * W + w] : 77, 0);
  }
}

}  // namespace

int main(int count, char** words) {
  random_numbers.seed(std::atoi(words[count > 1 ? 1 : 0]));
  for (const std::string& kernel : instruction_sets()) {
    for (int k = 0; k < 300 && !wrong; ++k) check_linear(kernel);
    for (int k = 0; k < 300 && !wrong; ++k) check_norm(kernel);
    for (int k = 0; k < 100 && !wrong; ++k) check_embedding(kernel);
    for (int k = 0; k < 100 && !wrong; ++k) check_gram(kernel);
  }
  for (int k = 0; k < 100 && !wrong; ++k) check_transpose<float>(), check_transpose<uint16_t>();
  for (const std::string& kernel : bfloat16_kernels()) {
    for (int k = 0; k < 150 && !wrong; ++k) check_linear(kernel);
    for (int k = 0; k < 300 && !wrong; ++k) check_gram(kernel);
  }
  if (!wrong) std::puts("ok");
  return wrong;
}
