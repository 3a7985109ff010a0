// SPDX-License-Identifier: Apache-2.0
// Tiles of kTile x kTile numbers: a row of one is a cache line, so each line is read and written once.
#include "transpose.h"

namespace gnsfast::cpu {
namespace {

constexpr int kTile = 16;
constexpr int64_t kAcross = 256, kEnough = 1 << 15;  // numbers of an item, and those worth a thread

template <class T>
void tile(const T* from, int64_t from_c, T* to, int64_t to_w, int rows, int columns) {
  T block[kTile][kTile];
  if (rows == kTile && columns == kTile) {  // of a known size, it takes vectors
    for (int c = 0; c < kTile; ++c) std::memcpy(block[c], from + c * from_c, sizeof block[c]);
    for (int w = 0; w < kTile; ++w) {
      T line[kTile];
      for (int c = 0; c < kTile; ++c) line[c] = block[c][w];
      std::memcpy(to + w * to_w, line, sizeof line);
    }
    return;
  }
  for (int w = 0; w < columns; ++w) {
    for (int c = 0; c < rows; ++c) to[w * to_w + c] = from[c * from_c + w];
  }
}

template <class T>
void run(const Transpose& a) {
  const int64_t across = (a.W + kAcross - 1) / kAcross;
  const int items = static_cast<int>(a.n * a.H * across);
  const int threads = std::min(items, a.team.for_work(a.n * a.C * a.H * a.W / kEnough));
  for_each(a.team, threads, items, 0, [&](int item, char*) {
    const int64_t n = item / across / a.H, h = item / across % a.H;
    const int64_t begin = item % across * kAcross, end = std::min(a.W, begin + kAcross);
    const T* const from = static_cast<const T*>(a.from) + n * a.from_n + h * a.from_h;
    T* const to = static_cast<T*>(a.to) + n * a.to_n + h * a.to_h;
    for (int64_t w = begin; w < end; w += kTile) {
      const int columns = static_cast<int>(std::min<int64_t>(kTile, end - w));
      for (int64_t c = 0; c < a.C; c += kTile) {
        const int rows = static_cast<int>(std::min<int64_t>(kTile, a.C - c));
        tile(from + c * a.from_c + w, a.from_c, to + w * a.to_w + c, a.to_w, rows, columns);
      }
    }
  });
}

}  // namespace

void transpose(const Transpose& call) {
  call.bytes == 2 ? run<uint16_t>(call) : run<uint32_t>(call);
}

}  // namespace gnsfast::cpu
