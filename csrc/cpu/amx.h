// SPDX-License-Identifier: Apache-2.0
// The tile registers of Intel's AMX: 8 of 16 rows of 64 bytes. No machine has run this file yet:
// the tests compile its users against amx_model.h, which has the same functions in plain C++.
#pragma once
#include <cstdint>

#include "kernel.h"

#ifdef GNSFAST_AMX_MODEL
#include "amx_model.h"
#else
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gnsfast::cpu::amx {

// Whether the processor has it and the kernel lets this process use it.
inline bool available() {
  static const bool found = [] {
    unsigned a, b, c, d;
    const bool has_tiles =
        __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);  // BF16, TILE
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_tiles && __builtin_cpu_supports("avx512bf16") &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return found;
}

// A thread has whole registers as long as this lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Assembly, as GCC 12's intrinsics lack the clobbers: stores to memory could move past a load.
template <int kTile>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// Rows that are ``bytes`` apart.
template <int kTile>
void load(const void* from, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kTile) : "memory");
}

template <int kTile>
void store(float* to, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(bytes), "i"(kTile) : "memory");
}

// sums [16, 16] += left [16, 32] right, whose rows of pairs are [16, 16, 2].
template <int kSums, int kLeft, int kRight>
void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

// The 16 numbers of ``low``, then those of ``high``.
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
inline __m512i narrowed(__m512 low, __m512 high) {
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

}  // namespace gnsfast::cpu::amx
#endif
