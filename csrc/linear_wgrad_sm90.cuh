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
// The tiles of a last, partly filled wave are split by whole samples. Their parts go to a scratch
// buffer, which merge_kernel adds up in a fixed order. No element is written by two blocks, so two
// runs give the same bits.
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

constexpr int kConsumerWarps = 8;
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
  for (int unit = block_index() / kCluster; unit < units_of(p); unit += clusters) {
    const Unit u = locate<kTileO, kTileI, kCluster>(p, unit, rank);
#pragma unroll 1  // unrolled it spills
    for (int b = u.begin; b < u.end; ++b) {
#pragma unroll 1
      for (int block = 0; block < blocks_of(p); ++block) {
        mbarrier_wait(ring.empty_barrier(), ring.phase ^ 1);
        const uint32_t full = ring.full_barrier();
        const uint32_t dy = shared + ring.stage * kStageBytes, x = dy + kDyBytes;
        mbarrier_arrive_expect(full, kStageBytes);
        const int token = block * kBlockT;
#pragma unroll
        for (int c = 0; c < kTileO / kColumns; ++c) {
          tma_load(dy + c * kBoxBytes, &map_dy, full, u.o + c * kColumns, token, b);
        }
#pragma unroll
        for (int c = 0; c < kTileI / kColumns; ++c) {
          const uint32_t to = x + c * kBoxBytes + rank * kShare * kColumns * 2;
          const int feature = u.i + c * kColumns, first = token + rank * kShare;
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
GNSFAST_DEVICE void store_tile(Output* dw, const Problem& p, const float (&v)[kCount], int o, int i,
                               uint32_t consumer) {
  const uint32_t warp = consumer / 32, lane = consumer % 32;
  const int row = o + warp * 16 + lane / 4, first = i + lane % 4 * 2;
#pragma unroll
  for (int k = 0; k < kCount; k += 2) {
    const int r = row + (k % 4 == 2 ? 8 : 0), column = first + k / 4 * 8;
    if (r < p.O && column < p.I) {
      Output* to = dw + static_cast<int64_t>(r) * p.I + column;
      store_pair(to, v[k], v[k + 1], p.add);
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
  for (int unit = block_index() / kCluster; unit < units_of(p); unit += clusters) {
    const Unit u = locate<kTileO, V::kTileI, kCluster>(p, unit, rank);
    const int64_t row = (static_cast<int64_t>(u.tile) * kCluster + rank) * kConsumerWarps + warp;
    float* partial = p.partial + row * (p.B + 1);
    float pending = 0.f;  // the sample before this one, not yet stored
    if constexpr (V::kTotal) clear(total);
#pragma unroll 1
    for (int b = u.begin; b < u.end; ++b) {
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
        } else if (b > u.begin) {
          store_sqnorm(partial + b - 1, pending, lane);  // under the products just issued
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
    if (u.end > u.begin) store_sqnorm(partial + u.end - 1, pending, lane);
    const uint32_t consumer = warp * 32 + lane;
    if (u.whole) {
      store_sqnorm(partial + p.B, sqnorm_of(total), lane);
      store_tile(dw, p, total, u.o, u.i, consumer);
    } else {
      store_part<kConsumers, kCluster>(p, u, rank, consumer, total);
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

// One CTA for each split tile of a CTA: adds the parts in order, then takes the norm of the sum.
template <class Output, class V>
GNSFAST_SIMT_KERNEL(kConsumers)
merge_kernel(Output* dw, const GNSFAST_GRID_CONSTANT Problem p) {
  constexpr int kCluster = V::kCluster;
  const int rank = block_index() % kCluster, split = block_index() / kCluster;
  const int tile = p.whole_tiles + split;
  const uint32_t consumer = thread_index();
  float total[V::kAccumulators];
  add_parts<kConsumers, kCluster>(p, tile, rank, consumer, total);
  const Unit u =
      locate<kTileO, V::kTileI, kCluster>(p, p.whole_tiles + split * p.parts, rank);
  const uint32_t warp = consumer / 32;
  const int64_t row = (static_cast<int64_t>(tile) * kCluster + rank) * kConsumerWarps + warp;
  store_sqnorm(p.partial + row * (p.B + 1) + p.B, sqnorm_of(total), consumer % 32);
  store_tile(dw, p, total, u.o, u.i, consumer);
}

}  // namespace gnsfast
