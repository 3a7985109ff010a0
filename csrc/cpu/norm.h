// SPDX-License-Identifier: Apache-2.0
// The loops of norm_backward.cpp, for one instruction set.

inline Bfloat16 narrowed(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  if (v != v) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline void write(float* to, const float* from, int64_t count) {
  std::memcpy(to, from, count * sizeof(float));
}
inline void write(Bfloat16* to, const float* from, int64_t count) {
  for (int64_t k = 0; k < count; ++k) to[k] = narrowed(from[k]);
}

// A row in float32 with zeros up to a whole vector: where it lies, or a copy in ``memory``.
template <class Element>
const float* row_of(const Element* from, int64_t step, int64_t F, float* memory) {
  const bool whole = std::is_same_v<Element, float> && step == 1 && F == padded(F);
  if (whole) return reinterpret_cast<const float*>(from);
  for (int64_t k = 0; k < F; ++k) memory[k] = value(from[k * step]);
  std::fill(memory + F, memory + padded(F), 0.f);
  return memory;
}

// A row, and what dx needs of it: the means of dx's own sums along x, and of these sums.
struct Row {
  const float *x, *dy;
  float *dx, mean, rstd, slope, constant;
};

// What ``add(k, sums)`` adds to all sums at every vector ``k`` of a row: a few vectors in float32,
// then in float64.
template <int kCount, class Add>
void sum_rows(int64_t end, float (&found)[kCount], const Add& add) {
  constexpr int64_t kFew = kFewVectors * kLanes;
  double total[kCount] = {};
  for (int64_t k = 0; k < end;) {
    Vector few[kCount] = {};
    for (const int64_t stop = std::min(end, k + kFew); k < stop; k += kLanes) add(k, few);
#pragma GCC unroll 8
    for (int s = 0; s < kCount; ++s) total[s] += sum_of(few[s]);
  }
#pragma GCC unroll 8
  for (int s = 0; s < kCount; ++s) found[s] = float(total[s]);
}

// The first pass over ``kR`` rows, at once: what dx needs of them.
template <int kR, bool kCentered>
void find_means(Row* rows, const float* gain, int64_t F, float eps) {
  const int64_t end = padded(F);
  const float share = 1 / float(F);
  const float *x[kR], *dy[kR];
  for (int r = 0; r < kR; ++r) x[r] = rows[r].x, dy[r] = rows[r].dy;
  if constexpr (!kCentered) {
    float square[kR];
    sum_rows(end, square, [&](int64_t k, auto& sum) {
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) sum[r] += load(x[r] + k) * load(x[r] + k);
    });
    for (int r = 0; r < kR; ++r) rows[r].rstd = 1 / std::sqrt(square[r] * share + eps);
  }
  Vector mean[kR] = {};
  for (int r = 0; kCentered && r < kR; ++r) mean[r] = broadcast(rows[r].mean);
  float sums[kCentered ? 2 * kR : kR];  // along x, then of dx
  sum_rows(end, sums, [&](int64_t k, auto& sum) {
    const Vector w = load(gain + k);
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      const Vector weighed = load(dy[r] + k) * w;
      sum[r] += weighed * (load(x[r] + k) - mean[r]);
      if constexpr (kCentered) sum[kR + r] += weighed;
    }
  });
  for (int r = 0; r < kR; ++r) {
    rows[r].slope = sums[r] * rows[r].rstd * share;
    if constexpr (kCentered) rows[r].constant = sums[kR + r] * share;
  }
}

// The second pass: dx of ``kR`` rows; adds their dy x̂ to ``dw``, and where ``kCentered`` their dy to
// ``db``. Each of these sums is loaded and stored once for all of them.
template <int kR, bool kCentered>
void take_rows(const Row* rows, const float* gain, int64_t F, float* dw, float* db) {
  const float *x[kR], *dy[kR];  // copies, which the compiler would else read again after each store
  float* dx[kR];
  Vector mean[kR] = {}, rstd[kR], slope[kR], constant[kR] = {};
  for (int r = 0; r < kR; ++r) {
    x[r] = rows[r].x, dy[r] = rows[r].dy, dx[r] = rows[r].dx;
    rstd[r] = broadcast(rows[r].rstd), slope[r] = broadcast(rows[r].slope);
    if constexpr (kCentered) mean[r] = broadcast(rows[r].mean);
    if constexpr (kCentered) constant[r] = broadcast(rows[r].constant);
  }
  for (int64_t k = 0; k < padded(F); k += kLanes) {
    const Vector w = load(gain + k);
    Vector of_w = load(dw + k), of_b = kCentered ? load(db + k) : Vector{};
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      // Exactly zero where x is the mean, as a product plus a constant is not.
      const Vector of_dy = load(dy[r] + k), normed = (load(x[r] + k) - mean[r]) * rstd[r];
      of_w += of_dy * normed;
      if constexpr (kCentered) of_b += of_dy;
      store(dx[r] + k, (of_dy * w - constant[r] - normed * slope[r]) * rstd[r]);
    }
    store(dw + k, of_w);
    if constexpr (kCentered) store(db + k, of_b);
  }
}

// Adds a sample's gradient to ``sums`` and returns its square. Both are whole vectors.
inline double add_sample(const double* own, double* sums, int64_t count) {
  typedef double Doubles
      __attribute__((vector_size(kLanes / 2 * sizeof(double)), aligned(8), may_alias));
  Doubles squares[2] = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    for (int half = 0; half < 2; ++half) {
      const int64_t at = k + half * kLanes / 2;
      const Doubles v = *reinterpret_cast<const Doubles*>(own + at);
      *reinterpret_cast<Doubles*>(sums + at) += v;
      squares[half] += v * v;
    }
  }
  squares[0] += squares[1];
  double sum = 0;
  for (int k = 0; k < kLanes / 2; ++k) sum += squares[0][k];
  return sum;
}

// The rows of a part: dx, the sums of its samples, and the squares of those that it holds whole.
template <class Element, bool kCentered>
void take_part(const Work& work, int index, char* memory) {
  const NormBackward& call = work.call;
  const Part part = part_of(work, index);
  const int64_t F = call.x.N, wide = padded(F);
  auto* own = reinterpret_cast<double*>(memory);           // [2, wide]
  auto* few = reinterpret_cast<float*>(own + 2 * wide);    // [2, wide]
  float *gain = few + 2 * wide, *copies = gain + wide;     // [wide], [work.rows, 3, wide]
  double* const sums = work.sums + int64_t{index} * 2 * wide;
  std::fill(sums, sums + 2 * wide, 0.0);
  std::fill(few, gain, 0.f);
  for (int64_t k = 0; k < wide; ++k) {
    gain[k] = k < F ? (call.w ? call.w[k] + call.offset : 1.f) : 0.f;
  }
  for (int64_t b = part.sample; b < part.last_sample; ++b) {
    bool begun = false;
    int64_t next = 0;
    for (int64_t t = part.token; t < part.last_token; t = next) {
      next = std::min(part.last_token, t + work.rows);
      const int count = int(next - t);
      Row rows[kFewTokens];
      const auto of_token = [&](const void* all, int64_t r) {
        return static_cast<Element*>(const_cast<void*>(all)) + (b * call.T + t + r) * F;
      };
      for (int r = 0; r < count; ++r) {
        const auto start = [&](const Side& side) {
          return static_cast<const Element*>(side.data) + b * side.stride_b + (t + r) * side.stride_t;
        };
        float* const copy = copies + 3 * r * wide;
        const int64_t row = b * call.T + t + r;
        rows[r].x = row_of(start(call.x), call.x.stride_n, F, copy);
        rows[r].dy = row_of(start(call.dy), call.dy.stride_n, F, copy + wide);
        const bool whole = std::is_same_v<Element, float> && F == wide;
        rows[r].dx = whole ? reinterpret_cast<float*>(of_token(call.dx, r)) : copy + 2 * wide;
        rows[r].mean = kCentered ? call.mean[row] : 0.f;
        rows[r].rstd = kCentered ? call.rstd[row] : 0.f;
      }
      int r = 0;
      for (; r + kTogether <= count; r += kTogether) {
        find_means<kTogether, kCentered>(rows + r, gain, F, call.eps);
      }
      for (; r < count; ++r) find_means<1, kCentered>(rows + r, gain, F, call.eps);
      float* const of_b = few + wide;
      for (r = 0; r + kTogether <= count; r += kTogether) {
        take_rows<kTogether, kCentered>(rows + r, gain, F, few, of_b);
      }
      for (; r < count; ++r) take_rows<1, kCentered>(rows + r, gain, F, few, of_b);
      for (r = 0; r < count; ++r) {
        if (rows[r].dx == copies + (3 * r + 2) * wide) write(of_token(call.dx, r), rows[r].dx, F);
      }
      if ((next - part.token) % kFewTokens && next < part.last_token) continue;
      for (int64_t k = 0; k < 2 * wide; ++k) own[k] = (begun ? own[k] : 0.0) + few[k];
      begun = true;
      std::fill(few, gain, 0.f);
    }
    for (int which = 0; which < 2; ++which) {
      const double square = add_sample(own + which * wide, sums + which * wide, wide);
      if (work.parts == 1) work.squares[2 * b + which] = square;
    }
  }
}

inline void run(const Work& work, int index, char* memory) {
  const bool centered = work.call.mean;
  if (work.call.bfloat16) {
    (centered ? take_part<Bfloat16, true> : take_part<Bfloat16, false>)(work, index, memory);
  } else {
    (centered ? take_part<float, true> : take_part<float, false>)(work, index, memory);
  }
}
