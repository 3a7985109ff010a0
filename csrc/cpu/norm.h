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

// Some rows at once: each of their numbers' sums is loaded and stored once for all of them.
struct Rows {
  const float *x[kTogether], *dy[kTogether];
  float *dx[kTogether], mean[kTogether], rstd[kTogether];
};

// What ``add(k, sums)`` adds to all sums at every vector ``k`` of a row: a few vectors in float32,
// then in float64.
template <int kCount, class Add>
void sum_rows(int64_t end, float (&found)[kCount], const Add& add) {
  constexpr int64_t kFew = kFewVectors * kLanes;
  Vector few[kCount] = {};
  int64_t k = 0;
  for (; k < std::min(end, kFew); k += kLanes) add(k, few);
  if (k < end) {
    Wide total[kCount];
    for (int s = 0; s < kCount; ++s) total[s] = __builtin_convertvector(few[s], Wide);
    while (k < end) {
      for (Vector& sum : few) sum = Vector{};
      for (const int64_t stop = std::min(end, k + kFew); k < stop; k += kLanes) add(k, few);
      for (int s = 0; s < kCount; ++s) total[s] += __builtin_convertvector(few[s], Wide);
    }
    for (int s = 0; s < kCount; ++s) few[s] = __builtin_convertvector(total[s], Vector);
  }
  for (int s = 0; s < kCount; ++s) found[s] = sum_of(few[s]);
}

// dx of ``kR`` rows; adds their dy x̂ to ``dw``, and where ``kCentered`` their dy to ``db``.
template <int kR, bool kCentered>
void take_rows(const Rows& rows, const float* gain, int64_t F, float eps, float* dw, float* db) {
  const int64_t end = padded(F);
  Vector mean[kR] = {}, rstd[kR];
  if constexpr (!kCentered) {
    float square[kR];
    sum_rows(end, square, [&](int64_t k, auto& sum) {
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) sum[r] += load(rows.x[r] + k) * load(rows.x[r] + k);
    });
    for (int r = 0; r < kR; ++r) rstd[r] = broadcast(1 / std::sqrt(square[r] / float(F) + eps));
  } else {
    for (int r = 0; r < kR; ++r) {
      mean[r] = broadcast(rows.mean[r]);
      rstd[r] = broadcast(rows.rstd[r]);
    }
  }
  // Exactly zero where x is the mean, as a product plus a constant is not.
  const auto normed = [&](int r, int64_t k) { return (load(rows.x[r] + k) - mean[r]) * rstd[r]; };
  float sums[kCentered ? 2 * kR : kR];  // along x, then of dx
  sum_rows(end, sums, [&](int64_t k, auto& sum) {
    const Vector w = load(gain + k);
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      const Vector weighed = load(rows.dy[r] + k) * w;
      sum[r] += weighed * normed(r, k);
      if constexpr (kCentered) sum[kR + r] += weighed;
    }
  });
  Vector constant[kR] = {}, slope[kR];
  for (int r = 0; r < kR; ++r) {
    slope[r] = broadcast(sums[r] / float(F));
    if constexpr (kCentered) constant[r] = broadcast(sums[kR + r] / float(F));
  }
  for (int64_t k = 0; k < end; k += kLanes) {
    const Vector w = load(gain + k);
    Vector of_w = load(dw + k), of_b = kCentered ? load(db + k) : Vector{};
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r) {
      const Vector dy = load(rows.dy[r] + k), x = normed(r, k);
      of_w += dy * x;
      if constexpr (kCentered) of_b += dy;
      store(rows.dx[r] + k, (dy * w - constant[r] - x * slope[r]) * rstd[r]);
    }
    store(dw + k, of_w);
    if constexpr (kCentered) store(db + k, of_b);
  }
}

// The rows of a part: dx, the sums of its samples, and the squares of those that it holds whole.
template <class Element, bool kCentered>
void take_part(const Work& work, int index, char* memory) {
  const NormBackward& call = work.call;
  const Part part = part_of(work, index);
  const int64_t F = call.x.N, wide = padded(F);
  auto* own = reinterpret_cast<double*>(memory);           // [2, wide]
  auto* few = reinterpret_cast<float*>(own + 2 * wide);    // [2, wide]
  float *gain = few + 2 * wide, *copies = gain + wide;     // [wide], [kTogether, 3, wide]
  double* const sums = work.sums + int64_t{index} * 2 * wide;
  std::fill(sums, sums + 2 * wide, 0.0);
  std::fill(few, gain, 0.f);
  for (int64_t k = 0; k < wide; ++k) {
    gain[k] = k < F ? (call.w ? call.w[k] + call.offset : 1.f) : 0.f;
  }
  for (int64_t b = part.sample; b < part.last_sample; ++b) {
    std::fill(own, own + 2 * wide, 0.0);
    int64_t next = 0;
    for (int64_t t = part.token; t < part.last_token; t = next) {
      next = std::min(part.last_token, t + kTogether);
      Rows rows;
      Element* to[kTogether];
      for (int r = 0; r < next - t; ++r) {
        const auto start = [&](const Side& side) {
          return static_cast<const Element*>(side.data) + b * side.stride_b + (t + r) * side.stride_t;
        };
        float* const copy = copies + 3 * r * wide;
        const int64_t row = b * call.T + t + r;
        rows.x[r] = row_of(start(call.x), call.x.stride_n, F, copy);
        rows.dy[r] = row_of(start(call.dy), call.dy.stride_n, F, copy + wide);
        to[r] = static_cast<Element*>(call.dx) + row * F;
        const bool whole = std::is_same_v<Element, float> && F == wide;
        rows.dx[r] = whole ? reinterpret_cast<float*>(to[r]) : copy + 2 * wide;
        rows.mean[r] = kCentered ? call.mean[row] : 0.f;
        rows.rstd[r] = kCentered ? call.rstd[row] : 0.f;
      }
      float* const of_b = few + wide;
      if (next - t == kTogether) {
        take_rows<kTogether, kCentered>(rows, gain, F, call.eps, few, of_b);
      } else {
        for (int r = 0; r < next - t; ++r) {
          const Rows one{{rows.x[r]}, {rows.dy[r]}, {rows.dx[r]}, {rows.mean[r]}, {rows.rstd[r]}};
          take_rows<1, kCentered>(one, gain, F, call.eps, few, of_b);
        }
      }
      for (int r = 0; r < next - t; ++r) {
        if (rows.dx[r] == copies + (3 * r + 2) * wide) write(to[r], rows.dx[r], F);
      }
      if ((next - part.token) % kFewTokens && next < part.last_token) continue;
      for (int64_t k = 0; k < 2 * wide; ++k) own[k] += few[k];
      std::fill(few, gain, 0.f);
    }
    double* const squares = work.squares + 2 * b;
    for (int which = 0; which < 2 && work.parts == 1; ++which) {
      squares[which] = sum_of_squares(own + which * wide, F);
    }
    for (int64_t k = 0; k < 2 * wide; ++k) sums[k] += own[k];
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
