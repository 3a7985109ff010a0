// SPDX-License-Identifier: Apache-2.0
// The functions of primitives_*.cuh on the host model.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// What the kernel needs of CUDA's headers.
struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  _Float16 value;
};
inline float to_float(__nv_bfloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}
inline float to_float(__half v) { return static_cast<float>(v.value); }
inline float to_float(float v) { return v; }
inline void from_float(float f, __nv_bfloat16* v) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  v->bits = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float f, __half* v) { v->value = static_cast<_Float16>(f); }
inline void from_float(float f, float* v) { *v = f; }

struct CUtensorMap {
  const uint8_t* base;
  int64_t sizes[3];    // features, tokens, samples
  int64_t strides[3];  // bytes
  int box_features, box_tokens;
};

#include "machine.h"

#define GNSFAST_DEVICE inline
#define GNSFAST_HOST_DEVICE inline
#define GNSFAST_KERNEL(cluster, threads) void
#define GNSFAST_SIMT_KERNEL(threads, blocks) void
#define GNSFAST_GRID_CONSTANT
#define GNSFAST_SHARED(name) uint8_t* name = host_model::block().shared.data() + 16

namespace gnsfast {

inline uint32_t shared_address(const void* p) {
  const auto* byte = static_cast<const uint8_t*>(p);
  return host_model::kSharedBase + static_cast<uint32_t>(byte - host_model::block().shared.data());
}
inline uint32_t thread_index() { return host_model::self().index; }
inline uint32_t block_index() { return host_model::block().index; }
inline uint32_t block_count() { return host_model::machine()->block_count; }
inline uint32_t cluster_rank() { return host_model::block().rank; }
inline bool elect_one() {
  host_model::self().apart = true;
  return thread_index() % 32 == 0;
}
inline void warp_sync() {
  host_model::named_sync(host_model::block().warps[thread_index() / 32], 32);
  host_model::self().apart = false;
}
inline void must_be_together() {
  if (host_model::self().apart) host_model::fail("the lanes of a warp may come one by one");
}

// Every lane shows ``count`` words; then ``look`` gets those of all lanes.
template <class Look>
void with_warp(const uint32_t* words, int count, Look look) {
  auto& b = host_model::block();
  const uint32_t warp = thread_index() / 32;
  for (int k = 0; k < count; ++k) b.exchange[warp][thread_index() % 32][k] = words[k];
  host_model::named_sync(b.warps[warp], 32);
  look(b.exchange[warp]);
  host_model::named_sync(b.warps[warp], 32);
}
inline uint32_t from_lane(uint32_t value, uint32_t lane) {
  uint32_t result = 0;
  with_warp(&value, 1, [&](const uint32_t (*of)[6]) { result = of[lane][0]; });
  return result;
}
inline float shuffle_xor(float value, int mask) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits = from_lane(bits, (thread_index() % 32) ^ mask);
  memcpy(&value, &bits, sizeof bits);
  return value;
}
inline uint32_t uniform(uint32_t value) { return from_lane(value, 0); }

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  auto& b = host_model::block().barriers[barrier] = host_model::MBarrier();
  b.arrivals = b.missing = arrivals;
}
inline void mbarrier_init_fence() {
  for (auto& [address, barrier] : host_model::block().barriers) barrier.visible = true;
}
inline void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  auto& b = host_model::visible_barrier(host_model::block(), barrier);
  b.bytes += bytes;
  --b.missing;
  b.check();
  ++host_model::machine()->progress;
}
inline void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  auto& other = host_model::peer(rank);
  host_model::must_be_live(other);
  auto& b = host_model::visible_barrier(other, barrier);
  --b.missing;
  b.check();
  ++host_model::machine()->progress;
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  auto& b = host_model::visible_barrier(host_model::block(), barrier);
  host_model::wait_until([&] { return b.phase != parity; });
}

inline void tma_prefetch(const CUtensorMap*) {}
inline void tma_load_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int feature,
                               int token, int sample, uint16_t ranks) {
  const CUtensorMap m = *map;
  const uint32_t bytes = m.box_features * m.box_tokens * 2;
  if (to % 1024 && to % (m.box_tokens * 128)) host_model::fail("a box is not aligned");
  for (int rank = 0; rank < host_model::machine()->cluster; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    host_model::Block* b = &host_model::peer(rank);
    host_model::visible_barrier(*b, barrier);
    auto land = [=] {
      host_model::must_be_live(*b);
      for (int t = 0; t < m.box_tokens; ++t) {
        for (int f = 0; f < m.box_features; ++f) {
          const uint32_t address = to + (t * m.box_features + f) * 2;
          uint8_t* target = host_model::shared_at(*b, host_model::swizzle_128(address));
          const bool inside =
              feature + f < m.sizes[0] && token + t < m.sizes[1] && sample < m.sizes[2];
          if (inside) {
            memcpy(target,
                   m.base + (feature + f) * m.strides[0] + (token + t) * m.strides[1] +
                       sample * m.strides[2],
                   2);
          } else {
            memset(target, 0, 2);
          }
        }
      }
      auto& full = host_model::visible_barrier(*b, barrier);
      full.bytes -= bytes;
      full.check();
    };
    host_model::machine()->copies.push_back({land, b, to, to + bytes});
  }
  ++host_model::machine()->progress;
}
inline void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int feature, int token,
                     int sample) {
  tma_load_multicast(to, map, barrier, feature, token, sample, 1 << cluster_rank());
}

inline void wgmma_fence() {
  if (host_model::machine()->random() % 2) host_model::yield();  // a thread may fall behind here
  host_model::self().fenced = true;
}
inline void wgmma_commit() {
  auto& thread = host_model::self();
  thread.committed.push_back(thread.products.size());
  thread.fenced = false;
  const int group = thread.index / host_model::kThreadsOfWarpgroup;
  if (host_model::machine()->turns && thread.index % host_model::kThreadsOfWarpgroup == 0) {
    int& last = host_model::block().last_committed;
    if (last == group || (last < 0 && group != 0)) {
      host_model::fail("the warpgroups do not take turns");
    }
    last = group;
  }
}
template <int kPending>
void wgmma_wait() {
  auto& thread = host_model::self();
  const size_t groups = thread.committed.size();
  const uint64_t needed = groups > kPending ? thread.committed[groups - 1 - kPending] : 0;
  host_model::wait_until([&] { return thread.computed >= needed; });
}
template <class Element, int kRegisters>
__attribute__((noinline)) void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b,
                                     int accumulate) {
  auto& thread = host_model::self();
  if (!thread.fenced) host_model::fail("a product without wgmma.fence before its group");
  if (!thread.accumulators) {  // a read before the wait gets NaN
    thread.accumulators = d;
    thread.sums.assign(d, d + kRegisters);
    std::fill(d, d + kRegisters, NAN);
  }
  thread.products.push_back({a, b, accumulate, 2 * kRegisters});
  host_model::compute_product = host_model::compute_oldest_product<Element>;
  ++host_model::machine()->progress;
}
template <int kRegisters>
void register_fence(float (&)[kRegisters]) {}
template <int kRegisters>
void registers_grow() {
  must_be_together();
}
template <int kRegisters>
void registers_shrink() {
  must_be_together();
}

inline void named_barrier_sync(int id, int threads) {
  host_model::named_sync(host_model::block().named[id], threads);
}
inline void named_barrier_arrive(int id, int threads) {
  host_model::named_arrive(host_model::block().named[id], threads);
}
inline void block_sync() {
  must_be_together();
  auto& b = host_model::block();
  if (b.named[0].arrived + 1 == static_cast<int>(b.threads.size())) {
    for (auto& [address, store] : host_model::machine()->held) store.synced |= store.block == &b;
  }
  host_model::named_sync(b.named[0], b.threads.size());
}
inline void cluster_sync() {
  must_be_together();
  auto& m = *host_model::machine();
  host_model::named_sync(m.cluster_barrier, m.cluster * m.blocks[0]->threads.size());
}

inline void copy_16(uint32_t to, const void* from, bool inside) {
  host_model::Block* b = &host_model::block();
  if (to % 16 || (inside && reinterpret_cast<uintptr_t>(from) % 16)) {
    host_model::fail("a copy is not aligned");
  }
  auto group = host_model::self().open_group;
  ++*group;
  auto land = [=] {
    uint8_t* target = host_model::shared_at(*b, to);
    inside ? static_cast<void>(memcpy(target, from, 16)) : static_cast<void>(memset(target, 0, 16));
    --*group;
  };
  host_model::machine()->copies.push_back({land, b, to, to + 16});
  ++host_model::machine()->progress;
}
inline void copy_commit() {
  auto& thread = host_model::self();
  thread.copy_groups.push_back(thread.open_group);
  thread.open_group = std::make_shared<int>(0);
}
template <int kPending>
void copy_wait() {
  auto& groups = host_model::self().copy_groups;
  host_model::wait_until([&] {
    for (size_t i = 0; i + kPending < groups.size(); ++i) {
      if (*groups[i]) return false;
    }
    return true;
  });
}
inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  const uint32_t lane = thread_index() % 32;
  with_warp(&address, 1, [&](const uint32_t (*of)[6]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t element[2];
      for (int k = 0; k < 2; ++k) {
        const uint32_t row = of[matrix * 8 + lane % 4 * 2 + k][0];
        memcpy(&element[k], host_model::shared_at(host_model::block(), row + lane / 4 * 2), 2);
      }
      r[matrix] = element[0] | static_cast<uint32_t>(element[1]) << 16;
    }
  });
}
template <class Element>
float half_of(uint32_t word, int which) {
  const uint16_t bits = word >> (16 * which);
  Element element;
  memcpy(&element, &bits, sizeof element);
  return to_float(element);
}
template <class Element>
void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const uint32_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const uint32_t lane = thread_index() % 32;
  with_warp(words, 6, [&](const uint32_t (*of)[6]) {
    for (int r = 0; r < 4; ++r) {
      const uint32_t row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
      for (uint32_t k = 0; k < 16; ++k) {
        const uint32_t pair = k % 8 / 2, low = k % 2;
        const float left =
            half_of<Element>(of[row % 8 * 4 + pair][row / 8 + k / 8 * 2], low);
        const float right = half_of<Element>(of[column * 4 + pair][4 + k / 8], low);
        d[r] += left * right;
      }
    }
  });
}

template <class Element>
void load_8(float (&v)[8], const Element* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) host_model::fail("a load is not aligned");
  for (int k = 0; k < 8; ++k) v[k] = to_float(from[k]);
}
inline void load_pair(float (&v)[2], const float* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8) host_model::fail("a load is not aligned");
  v[0] = from[0];
  v[1] = from[1];
}
template <class Output>
void store_one(Output* to, float v, int add) {
  from_float(v + (add ? to_float(*to) : 0.f), to);
}

// A fence lets what its thread has stored for others land, and what others of its block have stored
// before a barrier that it has passed.
inline void fence() {
  auto& held = host_model::machine()->held;
  for (auto store = held.begin(); store != held.end();) {
    const bool before = store->second.synced && store->second.block == &host_model::block();
    if (!store->second.late && (before || store->second.thread == &host_model::self())) {
      store->second.land();
      store = held.erase(store);
    } else {
      ++store;
    }
  }
  host_model::block().unfenced = false;
}
inline int atomic_add(int* to, int value) {
  host_model::block().unfenced = true;
  for (auto& [address, store] : host_model::machine()->held) {  // too late for whoever comes now
    if (store.block == &host_model::block()) store.late = true;
  }
  const int before = *to;
  *to += value;
  return before;
}
template <class Number>
void store_for_others(Number* to, Number value) {
  host_model::machine()->held[to] = {[=] { *to = value; }, &host_model::block(),
                                     &host_model::self(), value, false, false};
}
template <class Number>
Number load_of_others(const Number* from) {
  if (host_model::block().unfenced) host_model::fail("no fence between an atomic and a load");
  const auto& held = host_model::machine()->held;
  const auto found = held.find(from);
  const bool own = found != held.end() && found->second.block == &host_model::block();
  return own ? static_cast<Number>(found->second.value) : *from;
}

template <class Output>
void store_pair(Output* to, float a, float b, int add) {
  from_float(a + (add ? to_float(to[0]) : 0.f), to);
  from_float(b + (add ? to_float(to[1]) : 0.f), to + 1);
}

}  // namespace gnsfast
