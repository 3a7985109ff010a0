// SPDX-License-Identifier: Apache-2.0
// The weight gradient of a linear layer with every sample's squared norm, for sm_80 and later.
//
//   dW [O, I] = Σ_b dy_bᵀ x_b        sqnorm[b] = ‖dy_bᵀ x_b‖²        sqnorm[B] = ‖dW‖²
//
// A block owns a tile of 128 x 128, and each of its eight warps 64 x 32 of that: acc (this sample) and
// total take 64 registers each of a thread. A ring of four stages of 32 tokens is filled in the
// background, also across samples' ends; all warps multiply a stage, then it is filled anew:
//
//            x  [32 tokens, 128]
//           ┌────┬────┬────┬────┐
//  dyᵀ ┌──┐ │ w0 │ w2 │ w4 │ w6 │  64 rows
//      │  │ ├────┼────┼────┼────┤
//      └──┘ │ w1 │ w3 │ w5 │ w7 │
//           └────┴────┴────┴────┘
//
// Whole waves of tiles come first; the tiles that are left are shared by whole samples (plan.h).
// finish_kernel adds the parts of cut tiles in a fixed order.
#pragma once
#ifdef GNSFAST_HOST_MODEL
#include "host_model/primitives.h"
#else
#include "primitives_sm80.cuh"
#endif
#include "work.cuh"

namespace gnsfast {

constexpr int kTileO = 128;
constexpr int kTileI = 128;
constexpr Tile kTile{kTileO, kTileI, 1};
constexpr int kBlockT = 32;  // tokens of a stage
constexpr int kStages = 4;
constexpr int kTokenStep = 16;  // tokens of one product

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
static_assert(kWarps == kWarpsOfTile);
constexpr int kWarpO = 64, kWarpI = 32;
constexpr int kBlocksO = kWarpO / 16, kBlocksI = kWarpI / 8;  // products of 16 x 8
constexpr int kAccumulators = kBlocksO * kBlocksI * 4;

constexpr int kRowBytes = 128 * 2;  // a token's row of a tile, in shared memory
constexpr int kOperandBytes = kBlockT * kRowBytes;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSharedBytes = kStages * kStageBytes;

struct Operand {  // x or dy: [B, T, features] with the features side by side
  const void* data;
  int64_t stride_b, stride_t;  // in elements
  int features;
};

// Where 8 elements of a token lie. The token permutes the chunks of 16 bytes, so that the eight rows
// of a matrix are in different banks.
GNSFAST_DEVICE uint32_t chunk_offset(int token, int chunk) {
  return token * kRowBytes + ((chunk ^ (token & 7)) * 16);
}

template <class Element>
GNSFAST_DEVICE void fill_operand(uint32_t shared, const Operand& from, int first, int b, int token,
                                 int T) {
  constexpr int kChunks = kRowBytes / 16;
  const auto* data = static_cast<const Element*>(from.data);
#pragma unroll
  for (int k = 0; k < kBlockT * kChunks / kThreads; ++k) {
    const int which = thread_index() + k * kThreads;
    const int t = which / kChunks, chunk = which % kChunks, feature = first + chunk * 8;
    const bool inside = token + t < T && feature < from.features;
    const int64_t at = b * from.stride_b + (token + t) * from.stride_t + feature;
    copy_16(shared + chunk_offset(t, chunk), data + (inside ? at : 0), inside);
  }
}

// acc += dyᵀ x over one stage, for the warp's 64 x 32.
template <class Element>
GNSFAST_DEVICE void multiply_stage(float (&acc)[kBlocksO][kBlocksI][4], uint32_t stage, int warp_o,
                                   int warp_i, uint32_t lane) {
#pragma unroll
  for (int k = 0; k < kBlockT; k += kTokenStep) {
    uint32_t left[kBlocksO][4], right[kBlocksI / 2][4];
#pragma unroll
    for (int m = 0; m < kBlocksO; ++m) {  // matrices: (tokens, rows), rows + 8, tokens + 8, both
      const int token = k + lane % 8 + lane / 16 * 8;
      const int chunk = (warp_o + m * 16) / 8 + lane / 8 % 2;
      load_matrices_transposed(left[m], stage + chunk_offset(token, chunk));
    }
#pragma unroll
    for (int n = 0; n < kBlocksI / 2; ++n) {  // two products' columns: tokens, tokens + 8; + 8
      const int token = k + lane % 16;
      const int chunk = (warp_i + n * 16) / 8 + lane / 16;
      load_matrices_transposed(right[n], stage + kOperandBytes + chunk_offset(token, chunk));
    }
#pragma unroll
    for (int m = 0; m < kBlocksO; ++m) {
#pragma unroll
      for (int n = 0; n < kBlocksI; ++n) {
        const uint32_t(&b)[4] = right[n / 2];
        multiply_add<Element>(acc[m][n], left[m], b[n % 2 * 2], b[n % 2 * 2 + 1]);
      }
    }
  }
}

// Stores a thread's 64 values of the warp's 64 x 32 at (o, i).
template <class Output>
GNSFAST_DEVICE void store_tile(const Matrix<Output>& to, const float (&v)[kAccumulators], int o,
                               int i, uint32_t lane) {
#pragma unroll
  for (int k = 0; k < kAccumulators; k += 2) {
    const int m = k / (kBlocksI * 4), n = k / 4 % kBlocksI;
    const int row = o + m * 16 + lane / 4 + (k % 4 == 2 ? 8 : 0);
    const int column = i + n * 8 + lane % 4 * 2;
    if (row < to.rows && column < to.columns) {
      store_pair(to.data + static_cast<int64_t>(row) * to.columns + column, v[k], v[k + 1], to.add);
    }
  }
}

template <class Element, class Output>
GNSFAST_SIMT_KERNEL(kThreads, 1)
linear_wgrad_kernel(const GNSFAST_GRID_CONSTANT Operand dy, const GNSFAST_GRID_CONSTANT Operand x,
                    Output* dw, const GNSFAST_GRID_CONSTANT Problem p) {
  GNSFAST_SHARED(memory);
  const uint32_t shared = shared_address(memory);
  const uint32_t warp = uniform(thread_index() / 32), lane = thread_index() % 32;
  const int warp_o = warp % 2 * kWarpO, warp_i = warp / 2 * kWarpI;
  const int blocks = (p.T + kBlockT - 1) / kBlockT;

  clear_tickets(p, kThreads);
#pragma unroll 1
  for (Walk walk{static_cast<int>(block_index())}; walk.next(p, block_count());) {
    const Piece& piece = walk.piece;
    const Corner corner = corner_of(p.plan, kTile, piece.tile, 0);
    const int steps = (piece.end - piece.begin) * blocks;
    auto fill = [&](int step) {
      if (step < steps) {
        const uint32_t stage = shared + step % kStages * kStageBytes;
        const int b = piece.begin + step / blocks, token = step % blocks * kBlockT;
        fill_operand<Element>(stage, dy, corner.o, b, token, p.T);
        fill_operand<Element>(stage + kOperandBytes, x, corner.i, b, token, p.T);
      }
      copy_commit();  // a group for every step, so that waiting counts steps
    };
    float acc[kBlocksO][kBlocksI][4], total[kAccumulators];
    auto& flat = reinterpret_cast<float(&)[kAccumulators]>(acc);
    clear(flat);
    clear(total);
    float* norms = p.work.norms + (static_cast<int64_t>(piece.tile) * kWarps + warp) * (p.B + 1);
    for (int step = 0; step < kStages - 1; ++step) fill(step);
    int block = 0, b = piece.begin;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      copy_wait<kStages - 2>();
      block_sync();  // everybody's copies of this step are there, everybody has read the last one
      fill(step + kStages - 1);
      multiply_stage<Element>(acc, shared + step % kStages * kStageBytes, warp_o, warp_i, lane);
      if (++block == blocks) {
        store_sqnorm(norms + b, sqnorm_of(flat), lane);
#pragma unroll
        for (int k = 0; k < kAccumulators; ++k) total[k] += flat[k];
        clear(flat);
        block = 0;
        ++b;
      }
    }
    copy_wait<0>();
    block_sync();  // before the next piece fills what is still being read
    if (piece.slot < 0) {
      store_sqnorm(norms + p.B, sqnorm_of(total), lane);
      if constexpr (kStored<Output>) {
        const Matrix<Output> to{dw, p.O, p.I, p.add};
        store_tile(to, total, corner.o + warp_o, corner.i + warp_i, lane);
      }
    } else {
      float* part = part_at(p, kTile, piece.slot, 0);
      if (piece.begin == 0 && lane == 0) norms[p.B] = 0.f;  // finish_kernel has that of the sum
      store_tile(Matrix<float>{part, kTileO, kTileI, 0}, total, warp_o, warp_i, lane);
    }
  }
}

}  // namespace gnsfast
