// SPDX-License-Identifier: Apache-2.0
// The Hopper instructions that the kernel needs, one function each.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "primitives_simt.cuh"
#include "wgmma_sm90.cuh"

#define GNSFAST_KERNEL(cluster, threads) \
  __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, 1)

namespace gnsfast {

GNSFAST_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// One thread of a warp, the same one every time.
GNSFAST_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// Brings the lanes of a warp together, as instructions with .aligned require.
GNSFAST_DEVICE void warp_sync() { __syncwarp(); }

// Barriers in shared memory: a phase ends when all arrivals and expected bytes have come.
GNSFAST_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the cluster and to the copy engine.
GNSFAST_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
GNSFAST_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of another CTA of the cluster, with the default semantics: an explicit
// .release.cluster costs a MEMBAR.ALL.GPU in the loop.
GNSFAST_DEVICE void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Waits until the phase of this parity has ended.
GNSFAST_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, "
      "0x989680;\n@done bra ended;\nbra again;\nended:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The copy engine loads a box of a tensor, with zeros where the box leaves it.
GNSFAST_DEVICE void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
GNSFAST_DEVICE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int feature,
                             int token, int sample) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(feature), "r"(token), "r"(sample)
      : "memory");
}
// Loads to the same place in every CTA of ``ranks``; each one's own barrier counts the bytes.
GNSFAST_DEVICE void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                       int feature, int token, int sample, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(feature), "r"(token), "r"(sample), "h"(ranks)
      : "memory");
}

// The asynchronous matrix product of a warpgroup.
GNSFAST_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GNSFAST_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
GNSFAST_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <class Element, int kRegisters>
GNSFAST_DEVICE void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  Wgmma<Element, 2 * kRegisters>::issue(d, a, b, accumulate);
}
// Keeps the compiler from moving accesses to the accumulators across it.
template <int kRegisters>
GNSFAST_DEVICE void register_fence(float (&d)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Hand registers from one warpgroup to another.
template <int kRegisters>
GNSFAST_DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
GNSFAST_DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

GNSFAST_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
GNSFAST_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The lanes of a warp must reach it together: call ``warp_sync`` after a branch that some of them take.
GNSFAST_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

}  // namespace gnsfast
