// SPDX-License-Identifier: Apache-2.0
// The weight gradient of a linear layer with every sample's squared norm, for Hopper.
//
//   dW [O, I] = Σ_b dy_bᵀ x_b        sqnorm[b] = ‖dy_bᵀ x_b‖²        sqnorm[B] = ‖dW‖²
//
// A cluster of two CTAs owns two tiles of dW, one below the other; both need the same x:
//
//                     x [64 tokens, 192]               loaded half by each CTA, multicast to both
//                    ┌────────────┐
//        dyᵀ ┌────┐  │            │
//   CTA 0    │ 64 │→ │ warpgroup 0│  128 x 192: acc (this sample) and total, in registers
//            │ 64 │→ │ warpgroup 1│
//            ├────┤  ├────────────┤
//   CTA 1    │ 64 │→ │ warpgroup 0│
//            │ 64 │→ │ warpgroup 1│
//            └────┘  └────────────┘
//
// In each CTA one thread of warpgroup 2 feeds a ring of five stages through the copy engine; the two
// consumer warpgroups multiply. They issue their products in turn, so that while one squares a
// sample's end (96 multiply-adds and 96 adds a thread) the other keeps the tensor cores busy:
//
//   copies      ▌b,0▐▌b,1▐▌b+1,0▐ ...
//   warpgroup 0  ═══════╗end b╔═══════╗
//   warpgroup 1     ═══════╗end b╔═══════╗
//
// Whole waves of tiles come first; the tiles that are left are shared by whole samples (plan.h).
// Parts of a cut tile go to a scratch buffer; finish_kernel adds them in a fixed order.
// No element is written by two blocks, so two runs give the same bits.
#pragma once
#ifdef GNSFAST_HOST_MODEL
#include "host_model/primitives.h"
#else
#include "primitives_sm90.cuh"
#endif
#include "work.cuh"

namespace gnsfast {

constexpr int kTileO = 128;
constexpr int kBlockT = 64;    // tokens of a stage
constexpr int kColumns = 64;   // a copied box is as wide as the 128-byte swizzle: 64 elements of 2
constexpr int kTokenStep = 16;  // tokens of one wgmma

constexpr int kBoxBytes = kBlockT * kColumns * 2;
constexpr int kDyBytes = kTileO / kColumns * kBoxBytes;

constexpr int kConsumerWarps = kWarpsOfTile;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 128;
// 384 threads start with 168 registers each; 128 · 40 + 256 · 232 redistributes them.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

// What variants_sm90.cu changes: the tile's width, the number of CTAs that share x, whether warpgroups
// issue in turn, and whether a total has room beside a sample's sum; without it there is one sample.
template <int kWidth, int kCTAs, bool kInTurn, bool kTwoSums>
struct Variant {
  static constexpr int kTileI = kWidth;
  static constexpr int kCluster = kCTAs;
  static constexpr Tile kTile{kTileO, kTileI, kCluster};
  static constexpr bool kOrdered = kInTurn;
  static constexpr bool kTotal = kTwoSums;
  static constexpr int kStageBytes = kDyBytes + kTileI / kColumns * kBoxBytes;
  static constexpr int kStages = 200 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 2 * 8) + 1024;  // 1024: alignment
  static constexpr int kAccumulators = kTileI / 2;  // of 64 x kTileI over 128 threads
};
using Standard = Variant<192, 2, true, true>;

GNSFAST_DEVICE int blocks_of(const Problem& p) { return (p.T + kBlockT - 1) / kBlockT; }

// The ring: consumers and producer each keep their own place in it.
template <int kStages>
struct Ring {
  uint32_t full, empty;  // barriers of stage 0
  uint32_t stage = 0, phase = 0;

  GNSFAST_DEVICE uint32_t full_barrier() const { return full + 8 * stage; }
  GNSFAST_DEVICE uint32_t empty_barrier() const { return empty + 8 * stage; }
  GNSFAST_DEVICE uint32_t previous_empty_barrier() const {
    return empty + 8 * (stage == 0 ? kStages - 1 : stage - 1);
  }
  GNSFAST_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A shared-memory operand of wgmma whose rows are tokens: 128-byte swizzle, 8 KiB to the next 64
// columns (leading offset), 1 KiB to the next 8 tokens (stride offset).
GNSFAST_DEVICE uint64_t operand(uint32_t address) {
  constexpr uint64_t kLeading = kBoxBytes >> 4, kStride = 1024 >> 4, kSwizzle128 = 1;
  return ((address & 0x3FFFF) >> 4) | kLeading << 16 | kStride << 32 | kSwizzle128 << 62;
}
constexpr uint64_t kNextTokens = kTokenStep * kColumns * 2 >> 4;  // 2 KiB further

template <class V>
GNSFAST_DEVICE void produce(const CUtensorMap& map_dy, const CUtensorMap& map_x, const Problem& p,
                            uint32_t shared, Ring<V::kStages> ring, int rank) {
  constexpr int kTileI = V::kTileI, kCluster = V::kCluster, kStageBytes = V::kStageBytes;
  constexpr int kShare = kBlockT / kCluster;  // tokens of x that this CTA loads
  const int clusters = block_count() / kCluster;
#pragma unroll 1
  for (Walk walk{static_cast<int>(block_index()) / kCluster}; walk.next(p, clusters);) {
    const Piece& piece = walk.piece;
    const Corner corner = corner_of(p.plan, V::kTile, piece.tile, rank);
#pragma unroll 1  // unrolled it spills
    for (int b = piece.begin; b < piece.end; ++b) {
#pragma unroll 1
      for (int block = 0; block < blocks_of(p); ++block) {
        mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
        const uint32_t full = ring.full_barrier();
        const uint32_t dy = shared + ring.stage * kStageBytes, x = dy + kDyBytes;
        mbarrier_arrive_expect(full, kStageBytes);
        const int token = block * kBlockT;
#pragma unroll
        for (int c = 0; c < kTileO / kColumns; ++c) {
          tma_load(dy + c * kBoxBytes, &map_dy, full, corner.o + c * kColumns, token, b);
        }
#pragma unroll
        for (int c = 0; c < kTileI / kColumns; ++c) {
          const uint32_t to = x + c * kBoxBytes + rank * kShare * kColumns * 2;
          const int feature = corner.i + c * kColumns, first = token + rank * kShare;
          if constexpr (kCluster == 1) {
            tma_load(to, &map_x, full, feature, first, b);
          } else {
            tma_load_multicast(to, &map_x, full, feature, first, b, (1 << kCluster) - 1);
          }
        }
        ring.advance();
      }
    }
  }
}

// Stores a consumer's values of the tile at (o, i), two neighbours at a time. Of each eight columns a
// thread holds two in its own row and two in the row eight below.
template <class Output, int kCount>
GNSFAST_DEVICE void store_tile(const Matrix<Output>& to, const float (&v)[kCount], int o, int i,
                               uint32_t consumer) {
  const uint32_t warp = consumer / 32, lane = consumer % 32;
  const int row = o + warp * 16 + lane / 4, first = i + lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    const int r = row + (k % 4 == 2 ? 8 : 0), column = first + k / 4 * 8;
    if (r < to.rows && column < to.columns) {
      store_pair(to.data + static_cast<int64_t>(r) * to.columns + column, v[k], v[k + 1], to.add);
    }
  }
}

template <class Element, class Output, class V>
GNSFAST_DEVICE void consume(Output* dw, const Problem& p, uint32_t shared, Ring<V::kStages> ring,
                            int rank, uint32_t warp, uint32_t lane) {
  constexpr int kCluster = V::kCluster;
  constexpr bool kOrdered = V::kOrdered;
  const uint32_t group = warp / 4;
  const int clusters = block_count() / kCluster;
  float acc[V::kAccumulators], sum[V::kTotal ? V::kAccumulators : 1];
  auto& total = one_of<V::kTotal>(sum, acc);
  auto release = [&](uint32_t barrier) {
    if (lane < kCluster) mbarrier_arrive_at(barrier, lane);
  };
  if constexpr (kOrdered) {
    if (group == 1) named_barrier_arrive(1, kConsumers);  // warpgroup 0 goes first
  }
#pragma unroll 1
  for (Walk walk{static_cast<int>(block_index()) / kCluster}; walk.next(p, clusters);) {
    const Piece& piece = walk.piece;
    const int64_t block = static_cast<int64_t>(piece.tile) * kCluster + rank;
    float* norms = p.work.norms + (block * kConsumerWarps + warp) * (p.B + 1);
    float pending = 0.f;  // the sample before this one, not yet stored
    if constexpr (V::kTotal) clear(total);
#pragma unroll 1
    for (int b = piece.begin; b < piece.end; ++b) {
#pragma unroll 1
      for (int block = 0; block < blocks_of(p); ++block) {
        mbarrier_wait(ring.full_barrier(), ring.phase);
        if constexpr (kOrdered) named_barrier_sync(1 + group, kConsumers);
        const uint32_t dy = shared + ring.stage * V::kStageBytes;
        const uint64_t left = operand(dy + group * kBoxBytes), right = operand(dy + kDyBytes);
        register_fence(acc);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockT / kTokenStep; ++k) {
          wgmma<Element>(acc, left + k * kNextTokens, right + k * kNextTokens, block + k > 0);
        }
        wgmma_commit();
        register_fence(acc);
        if constexpr (kOrdered) named_barrier_arrive(2 - group, kConsumers);
        if (block > 0) {
          wgmma_wait<1>();  // the block before this one has been read
          release(ring.previous_empty_barrier());
        } else if (b > piece.begin) {
          store_sqnorm(norms + b - 1, pending, lane);  // under the products just issued
        }
        ring.advance();
      }
      wgmma_wait<0>();
      register_fence(acc);
      release(ring.previous_empty_barrier());
      pending = sqnorm_of(acc);
      if constexpr (V::kTotal) {
#pragma unroll
        for (int k = 0; k < V::kAccumulators; ++k) total[k] += acc[k];
      }
    }
    store_sqnorm(norms + piece.end - 1, pending, lane);
    const uint32_t consumer = warp * 32 + lane;
    if (piece.slot < 0) {
      [[maybe_unused]] const Corner corner = corner_of(p.plan, V::kTile, piece.tile, rank);
      store_sqnorm(norms + p.B, sqnorm_of(total), lane);
      if constexpr (kStored<Output>) {
        store_tile(Matrix<Output>{dw, p.O, p.I, p.add}, total, corner.o, corner.i, consumer);
      }
    } else {
      float* part = part_at(p, V::kTile, piece.slot, rank);
      if (piece.begin == 0 && lane == 0) norms[p.B] = 0.f;  // finish_kernel has that of the sum
      store_tile(Matrix<float>{part, kTileO, V::kTileI, 0}, total, 0, 0, consumer);
    }
  }
  if constexpr (kOrdered) {
    if (group == 0) named_barrier_sync(1, kConsumers);  // the last turn handed over
  }
}

template <class Element, class Output, class V>
GNSFAST_KERNEL(V::kCluster, kThreads)
linear_wgrad_kernel(const GNSFAST_GRID_CONSTANT CUtensorMap map_dy,
                    const GNSFAST_GRID_CONSTANT CUtensorMap map_x, Output* dw,
                    const GNSFAST_GRID_CONSTANT Problem p) {
  constexpr int kCluster = V::kCluster, kStages = V::kStages;
  GNSFAST_SHARED(memory);
  const uint32_t shared = (shared_address(memory) + 1023u) & ~1023u;
  Ring<kStages> ring;
  ring.full = shared + kStages * V::kStageBytes;
  ring.empty = ring.full + 8 * kStages;
  const uint32_t warp = uniform(thread_index() / 32), lane = thread_index() % 32;
  const int rank = kCluster > 1 ? cluster_rank() : 0;

  if (warp == kConsumerWarps && elect_one()) {
    tma_prefetch(&map_dy);
    tma_prefetch(&map_x);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(ring.full + 8 * s, 1);
      mbarrier_init(ring.empty + 8 * s, kCluster * kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  clear_tickets(p, kThreads);
  // PTX requires all lanes of a warp to reach the barriers and the register hand-over below together.
  // After a branch that one lane takes, nothing else ensures that.
  warp_sync();
  if constexpr (kCluster > 1) {
    cluster_sync();
  } else {
    block_sync();
  }

  if (warp >= kConsumerWarps) {
    registers_shrink<kProducerRegisters>();
    if (warp == kConsumerWarps && elect_one()) {
      produce<V>(map_dy, map_x, p, shared, ring, rank);
    }
  } else {
    registers_grow<kConsumerRegisters>();
    consume<Element, Output, V>(dw, p, shared, ring, rank, warp, lane);
  }
  if constexpr (kCluster > 1) {
    warp_sync();     // one lane produced, and lanes outside of the tile stored nothing
    cluster_sync();  // a CTA's memory outlives what others send to it
  }
}

}  // namespace gnsfast
