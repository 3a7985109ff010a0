// SPDX-License-Identifier: Apache-2.0
// The loops of amx_gram.cpp.
#include "amx_pack.h"

constexpr int kHalf = kTile / 2;

// 32 rows of a group of samples with zeros up to whole squares: where they lie, or a copy.
struct Rows {
  const Bfloat16* at;
  int64_t stride;
};

inline int64_t padded(int64_t N) { return (N + kTile - 1) / kTile * kTile; }

// ``first`` and ``count`` are of the group's rows, which begins with sample ``b``. ``most`` rows are
// read. Samples of a group lie T rows apart in it.
inline Rows rows_of(const Side& side, int64_t T, int64_t b, int64_t first, int count, int most,
                    Bfloat16* copy) {
  const auto* from = static_cast<const Bfloat16*>(side.data) + b * side.stride_b;
  const bool adjacent = first + count <= T || side.stride_b == T * side.stride_t;
  if (count == most && adjacent && side.stride_n == 1 && side.N % kTile == 0) {
    return {from + first * side.stride_t, side.stride_t};
  }
  const int64_t wide = padded(side.N);
  for (int row = 0; row < most; ++row) {
    Bfloat16* const to = copy + row * wide;
    std::fill(to, to + wide, Bfloat16{0});
    if (row >= count) continue;
    const int64_t t = first + row;
    const Bfloat16* const number = from + t / T * side.stride_b + t % T * side.stride_t;
    for (int64_t k = 0; k < side.N; ++k) to[k] = number[k * side.stride_n];
  }
  return {copy, wide};
}

// 16 rows as the right side of a product with their transpose: [32 columns / 2][16 rows][2].
inline void pack_pairs(const Bfloat16* from, int64_t stride, Bfloat16* to) {
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i z[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Bfloat16* const at = from + j * stride + c * 8;
      z[j] = four_rows(at, at + 4 * stride, at + 8 * stride, at + 12 * stride);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i d = _mm512_unpacklo_epi32(z[2], z[3]), e = _mm512_unpackhi_epi32(z[2], z[3]);
    Bfloat16* const pairs = to + c * 4 * kTile;
    _mm512_store_si512(pairs, _mm512_unpacklo_epi64(a, d));
    _mm512_store_si512(pairs + kTile, _mm512_unpackhi_epi64(a, d));
    _mm512_store_si512(pairs + 2 * kTile, _mm512_unpacklo_epi64(b, e));
    _mm512_store_si512(pairs + 3 * kTile, _mm512_unpackhi_epi64(b, e));
  }
}

// The products of 32 rows, or of 16 where ``few``, with those that are packed.
inline void multiply(const Rows& rows, const Bfloat16* packed, int64_t steps, bool few, float* to) {
  constexpr int kBytes = 64, kRegister = kHalf * kHalf;
  const int64_t bytes = rows.stride * sizeof(Bfloat16);
  const Bfloat16* at = rows.at;
  amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  for (int64_t step = 0; step < steps; ++step, at += kTile, packed += kSquare) {
    if (few) {  // one register of sums would wait for itself: four take turns
      amx::load<4>(at, bytes);
      amx::load<6>(packed, kBytes);
      switch (step % 4) {
        case 0: amx::multiply<0, 4, 6>(); break;
        case 1: amx::multiply<1, 4, 6>(); break;
        case 2: amx::multiply<2, 4, 6>(); break;
        default: amx::multiply<3, 4, 6>();
      }
      continue;
    }
    amx::load<6>(packed, kBytes);
    amx::load<4>(at, bytes);
    amx::multiply<0, 4, 6>();
    amx::load<7>(packed + kSquare / 2, kBytes);
    amx::multiply<1, 4, 7>();
    amx::load<5>(at + kHalf * rows.stride, bytes);
    amx::multiply<2, 5, 6>();
    amx::multiply<3, 5, 7>();
  }
  amx::store<0>(to, kBytes), amx::store<1>(to + kRegister, kBytes);
  amx::store<2>(to + 2 * kRegister, kBytes), amx::store<3>(to + 3 * kRegister, kBytes);
  for (int k = 0; few && k < kRegister; k += kLanes) {
    const Vector sum = (load(to + k) + load(to + kRegister + k)) +
                       (load(to + 2 * kRegister + k) + load(to + 3 * kRegister + k));
    store(to + k, sum);
  }
}

// A thread's memory, cut up.
struct Memory {
  float *of_left, *of_right;                 // products of rows with rows
  Bfloat16 *left, *right, *copy;             // packed rows; a copy of some
  size_t bytes;
};

inline Memory memory_of(const Gram& call, char* memory) {
  Cut cut{memory};
  Memory m{};
  cut.take(m.of_left, kSquare);
  cut.take(m.of_right, kSquare);
  cut.take(m.left, padded(call.left.N) * kTile);
  cut.take(m.right, padded(call.right.N) * kTile);
  cut.take(m.copy, padded(std::max(call.left.N, call.right.N)) * kTile);
  m.bytes = cut.bytes;
  return m;
}

// How many short samples share the 16 rows of a register.
inline int64_t in_group(int64_t T) { return T <= kHalf / 2 ? kHalf / T : 1; }

// The samples from ``b`` on that share registers.
inline void run(const Gram& call, int64_t b, char* memory) {
  const Memory at = memory_of(call, memory);
  const int64_t T = call.T, samples = std::min(in_group(T), call.B - b), rows = samples * T;
  const bool few = rows <= kHalf;
  const int most = few ? kHalf : kTile;
  const amx::Tiles tiles;
  const auto part = [&](const Side& side, int64_t first) {
    return rows_of(side, T, b, first, count(rows, first, kTile), most, at.copy);
  };
  const auto pack = [&](const Side& side, int64_t first, Bfloat16* to) {
    const Rows from = part(side, first);
    for (int64_t k = 0; k < padded(side.N); k += kTile, to += kSquare) {
      for (int half = 0; half < most / kHalf; ++half) {
        pack_pairs(from.at + half * kHalf * from.stride + k, from.stride, to + half * kSquare / 2);
      }
    }
  };
  Wide sum = {}, absolute = {};
  for (int64_t s = 0; s < rows; s += kTile) {
    pack(call.left, s, at.left);
    pack(call.right, s, at.right);
    for (int64_t t = 0; t <= s; t += kTile) {
      multiply(part(call.left, t), at.left, padded(call.left.N) / kTile, few, at.of_left);
      multiply(part(call.right, t), at.right, padded(call.right.N) / kTile, few, at.of_right);
      if (samples > 1) break;
      const double times = t < s ? 2 : 1;  // what is beside the diagonal is there twice
      for (int k = 0; k < (few ? kSquare / 4 : kSquare); k += kLanes) {
        const Wide term = __builtin_convertvector(load(at.of_left + k), Wide) *
                          __builtin_convertvector(load(at.of_right + k), Wide) * times;
        sum += term;
        absolute += term < 0 ? -term : term;
      }
    }
  }
  call.sqnorms[b] = sum_of(sum);
  call.terms[b] = sum_of(absolute);
  for (int64_t k = 0; samples > 1 && k < samples; ++k) {
    double own = 0, own_absolute = 0;
    for (int64_t s = k * T; s < (k + 1) * T; ++s) {
      for (int64_t t = k * T; t < (k + 1) * T; ++t) {
        const double term = double(at.of_left[s * kHalf + t]) * at.of_right[s * kHalf + t];
        own += term;
        own_absolute += std::abs(term);
      }
    }
    call.sqnorms[b + k] = own;
    call.terms[b + k] = own_absolute;
  }
}
