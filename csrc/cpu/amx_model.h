// SPDX-License-Identifier: Apache-2.0
// The functions of amx.h in plain C++, for processors without AMX: what Intel's manual says that an
// instruction does. Registers hold NaN until something is written to them.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace gnsfast::cpu::amx {

inline bool available() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

struct Register {
  uint8_t rows[16][64];
};

struct Registers {
  bool configured = false;
  Register tile[8];

  static Registers& of_thread() {
    thread_local Registers registers;
    return registers;
  }
  // An instruction on an unconfigured register is an error of the processor as well.
  static Register& at(int k) {
    if (!of_thread().configured) {
      std::puts("a tile register is used before it is configured");
      std::abort();
    }
    return of_thread().tile[k];
  }
};

class Tiles {
 public:
  Tiles() {
    Registers::of_thread().configured = true;
    std::memset(Registers::of_thread().tile, 0xff, sizeof Registers::of_thread().tile);
  }
  ~Tiles() { Registers::of_thread().configured = false; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int kTile>
void zero() {
  std::memset(&Registers::at(kTile), 0, sizeof(Register));
}

template <int kTile>
void load(const void* from, int64_t bytes) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(Registers::at(kTile).rows[row], static_cast<const char*>(from) + row * bytes, 64);
  }
}

template <int kTile>
void store(float* to, int64_t bytes) {
  for (int row = 0; row < 16; ++row) {
    std::memcpy(reinterpret_cast<char*>(to) + row * bytes, Registers::at(kTile).rows[row], 64);
  }
}

inline float flushed(float v) { return std::abs(v) < std::numeric_limits<float>::min() ? 0.f : v; }

// [2][16][16]: the even numbers of each row, then the odd ones.
struct Halves {
  float of[2][16][16];

  explicit Halves(const Register& from) {
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 32; ++k) {
        uint16_t half;
        std::memcpy(&half, from.rows[row] + 2 * k, sizeof half);
        const uint32_t bits = uint32_t{half} << 16;
        std::memcpy(&of[k % 2][row][k / 2], &bits, sizeof bits);
        of[k % 2][row][k / 2] = flushed(of[k % 2][row][k / 2]);
      }
    }
  }
};

// The even numbers of a row have a sum of their own, as the odd ones. Denormal numbers count as zero.
template <int kSums, int kLeft, int kRight>
__attribute__((target("fma"))) void multiply() {
  Register& sums = Registers::at(kSums);
  const Halves left(Registers::at(kLeft)), right(Registers::at(kRight));
  for (int m = 0; m < 16; ++m) {
    float found[2][16] = {};
    for (int k = 0; k < 16; ++k) {
      for (int odd = 0; odd < 2; ++odd) {
        for (int n = 0; n < 16; ++n) {
          found[odd][n] =
              flushed(std::fma(left.of[odd][m][k], right.of[odd][k][n], found[odd][n]));
        }
      }
    }
    for (int n = 0; n < 16; ++n) {
      float sum;
      std::memcpy(&sum, sums.rows[m] + 4 * n, sizeof sum);
      sum = flushed(flushed(sum) + flushed(found[0][n] + found[1][n]));
      std::memcpy(sums.rows[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

__attribute__((target("avx512f"))) inline __m512i narrowed(__m512 low, __m512 high) {
  uint16_t numbers[32];
  for (int k = 0; k < 32; ++k) {
    const float v = k < 16 ? low[k] : high[k - 16];
    uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    numbers[k] = static_cast<uint16_t>(v != v ? bits >> 16 | 0x40
                                              : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return _mm512_loadu_si512(numbers);
}

}  // namespace gnsfast::cpu::amx
