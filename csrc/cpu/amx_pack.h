// SPDX-License-Identifier: Apache-2.0
// Brings numbers of bfloat16 into the order of the tile registers, 32 x 32 at a time.

constexpr int kTile = 32;                  // rows and columns: two tile registers both ways
constexpr int kSquare = kTile * kTile;     // numbers of a packed square

alignas(64) constexpr Bfloat16 kZeros[kTile] = {};

// 32 rows of 32 numbers: where they lie, or copies with zeros beyond ``rows`` and ``columns``.
struct Source {
  const Bfloat16* row[kTile];
  alignas(64) Bfloat16 copy[kTile][kTile];

  Source(const Bfloat16* from, const Side& side, int rows, int columns) {
    const bool whole = side.stride_n == 1 && columns == kTile;
    for (int t = 0; t < kTile; ++t, from += side.stride_t) {
      if (t >= rows) {
        row[t] = kZeros;
      } else if (whole) {
        row[t] = from;
        _mm_prefetch(reinterpret_cast<const char*>(from + 2 * kTile), _MM_HINT_T0);
      } else {
        for (int k = 0; k < kTile; ++k) {
          copy[t][k] = k < columns ? from[k * side.stride_n] : Bfloat16{0};
        }
        row[t] = copy[t];
      }
    }
  }
};

inline __m128i eight(const Bfloat16* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

// Eight numbers each of four rows.
inline __m512i four_rows(const Bfloat16* a, const Bfloat16* b, const Bfloat16* c,
                         const Bfloat16* d) {
  __m512i rows = _mm512_castsi128_si512(eight(a));
  rows = _mm512_inserti32x4(rows, eight(b), 1);
  rows = _mm512_inserti32x4(rows, eight(c), 2);
  return _mm512_inserti32x4(rows, eight(d), 3);
}

// Transposed, the order of a product's left side: [column][row].
inline void pack_left(const Source& from, Bfloat16* to) {
#pragma GCC unroll 4
  for (int at = 0; at < kTile; at += 8) {  // columns
    __m512i z[8], a[8], b[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      z[j] = four_rows(from.row[j] + at, from.row[8 + j] + at, from.row[16 + j] + at,
                       from.row[24 + j] + at);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {  // columns 0 to 3, and 4 to 7, of rows 2j and 2j + 1
      a[2 * j] = _mm512_unpacklo_epi16(z[2 * j], z[2 * j + 1]);
      a[2 * j + 1] = _mm512_unpackhi_epi16(z[2 * j], z[2 * j + 1]);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {  // columns 4i to 4i + 3 of rows 4h to 4h + 3
        b[4 * h + 2 * i] = _mm512_unpacklo_epi32(a[4 * h + i], a[4 * h + 2 + i]);
        b[4 * h + 2 * i + 1] = _mm512_unpackhi_epi32(a[4 * h + i], a[4 * h + 2 + i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      Bfloat16* const column = to + (at + 2 * i) * kTile;
      _mm512_store_si512(column, _mm512_unpacklo_epi64(b[i], b[4 + i]));
      _mm512_store_si512(column + kTile, _mm512_unpackhi_epi64(b[i], b[4 + i]));
    }
  }
}

// In pairs of rows, the order of a product's right side: [half][row / 2][16 columns][2]. One unpack
// takes columns 0 to 3 of each 8 to the first half, columns 4 to 7 to the second.
inline void pack_right(const Source& from, Bfloat16* to) {
#pragma GCC unroll 4
  for (int i = 0; i < kTile / 2; ++i) {
    const __m512i a = _mm512_loadu_si512(from.row[2 * i]);
    const __m512i b = _mm512_loadu_si512(from.row[2 * i + 1]);
    _mm512_store_si512(to + i * kTile, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + kSquare / 2 + i * kTile, _mm512_unpackhi_epi16(a, b));
  }
}
