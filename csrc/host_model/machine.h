// SPDX-License-Identifier: Apache-2.0
// A model of the parts of a Hopper GPU that the kernel uses, on one CPU thread: a fiber for every
// CUDA thread of a cluster, run in random order. Copies and matrix products run late, at random
// points, the copies in random order too; what they write is NaN until then. So a missing wait shows
// as NaN, an early release as a race, a wrong count as a deadlock. Blocks come in random order, and
// those without clusters several at a time; what one stores for others stays hidden until its fence.
//
// It cannot show whether the hardware does what its documents say, whether the text of the
// instructions is right, and how fast they are.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace host_model {

constexpr uint32_t kSharedBase = 0x400;  // where shared memory begins in its window
constexpr int kThreadsOfWarpgroup = 128;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "host model: %s\n", what);
  _Exit(4);
}

struct MBarrier {
  int arrivals = 0, missing = 0;
  int64_t bytes = 0;  // expected and still to come
  uint32_t phase = 0;
  bool visible = false;  // to the copy engine and to other threads: initialised and fenced

  void check() {
    if (missing < 0) fail("too many arrivals at a barrier");
    if (missing == 0 && bytes == 0) {
      phase ^= 1;
      missing = arrivals;
    }
  }
};

struct NamedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
};

struct Product {  // one wgmma, as one thread issued it
  uint64_t a, b;
  int accumulate, width;
};

struct Block;

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  int index = 0;
  bool done = false;
  bool apart = false;               // from its warp: since elect_one, until they meet again
  bool fenced = false;              // wgmma.fence since the last commit
  std::vector<Product> products;    // all that it issued
  std::vector<uint64_t> committed;  // how many of them at each commit
  uint64_t computed = 0;
  float* accumulators = nullptr;  // the kernel's registers while products are under way
  std::vector<float> sums;        // what they will hold
  std::vector<std::shared_ptr<int>> copy_groups;  // cp.async: how many of each are under way
  std::shared_ptr<int> open_group = std::make_shared<int>(0);
};

struct Block {
  std::vector<uint8_t> shared;
  int last_committed = -1;  // the warpgroup, if they must take turns
  std::map<uint32_t, MBarrier> barriers;
  NamedBarrier named[16], warps[16];
  uint32_t exchange[16][32][6];  // what the lanes of a warp show one another
  uint32_t rank = 0, index = 0;
  int live = 0;
  bool unfenced = false;  // since its last atomic operation
  std::vector<std::unique_ptr<Thread>> threads;
};

struct Held {  // a store for other blocks that they do not see yet
  std::function<void()> land;
  const Block* block;
  const Thread* thread;
  double value;
  bool synced;  // a barrier of its block came after it, so that any thread's fence lets it land
  bool late;    // its block has arrived without a fence: it lands when the kernel ends
};

struct Copy {
  std::function<void()> land;
  Block* block;
  uint32_t first, last;  // the shared memory it writes
};

struct Machine {
  std::vector<std::unique_ptr<Block>> blocks;  // of the cluster that runs
  Thread* current = nullptr;
  ucontext_t scheduler;
  std::mt19937 random;
  std::vector<Copy> copies;
  std::map<const void*, Held> held;
  NamedBarrier cluster_barrier;
  int cluster = 1, block_count = 1;
  bool turns = false;  // whether the warpgroups must commit their products in turn
  uint64_t progress = 0, races = 0;
  std::function<void()> kernel;
};

inline Machine*& machine() {
  static Machine* running;
  return running;
}
inline Thread& self() { return *machine()->current; }
inline Block& block() { return *self().block; }

// A block of the same cluster.
inline Block& peer(int rank) { return machine()->cluster > 1 ? *machine()->blocks[rank] : block(); }

inline void yield() {
  Thread* thread = machine()->current;
  swapcontext(&thread->context, &machine()->scheduler);
}
template <class Condition>
void wait_until(Condition condition) {
  while (!condition()) yield();
  ++machine()->progress;
}

inline uint8_t* shared_at(Block& b, uint32_t address) {
  if (address < kSharedBase || address >= kSharedBase + b.shared.size()) {
    fail("shared memory address out of range");
  }
  return b.shared.data() + (address - kSharedBase);
}
// Bits 4 to 6 of an address are exclusive-ored with bits 7 to 9.
inline uint32_t swizzle_128(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

inline MBarrier& visible_barrier(Block& b, uint32_t address) {
  auto found = b.barriers.find(address);
  if (found == b.barriers.end()) fail("a barrier was used before it was initialised");
  if (!found->second.visible) fail("a barrier was used before the fence after its initialisation");
  return found->second;
}
inline void must_be_live(const Block& b) {
  if (!b.live) fail("access to the shared memory of a block that has left");
}

// Whether products that are issued and not yet computed read shared memory in [first, last).
inline bool is_being_read(const Block& b, uint32_t first, uint32_t last) {
  for (const auto& thread : b.threads) {
    for (uint64_t i = thread->computed; i < thread->products.size(); ++i) {
      const Product& product = thread->products[i];
      const uint32_t a = (product.a & 0x3FFF) << 4, right = (product.b & 0x3FFF) << 4;
      const uint32_t leading = (product.b >> 16 & 0x3FFF) << 4;
      if (a >= first && a < last) return true;
      for (int c = 0; c < product.width / 64; ++c) {
        if (right + c * leading >= first && right + c * leading < last) return true;
      }
    }
  }
  return false;
}

inline void land(size_t which) {
  Machine& m = *machine();
  Copy copy = std::move(m.copies[which]);
  m.copies.erase(m.copies.begin() + which);
  if (is_being_read(*copy.block, copy.first, copy.last)) ++m.races;
  copy.land();
  ++m.progress;
}

// An element of an operand in shared memory, by its descriptor: ``outer`` is the row of D or its
// column, ``inner`` the token.
template <class Element>
float operand_at(Block& b, uint64_t descriptor, int outer, int inner) {
  if (descriptor >> 62 != 1) fail("the descriptor does not say 128-byte swizzle");
  const uint32_t start = (descriptor & 0x3FFF) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3FFF) << 4;
  const uint32_t address = start + outer % 64 * 2 + outer / 64 * leading + inner % 8 * 128 +
                           inner / 8 * stride;
  Element element;
  memcpy(&element, shared_at(b, swizzle_128(address)), sizeof element);
  return to_float(element);
}

// Computes the oldest product that all threads of a warpgroup have issued; false if there is none.
// The kernel's first product sets the type of its elements.
inline bool (*compute_product)(Block&, int) = [](Block&, int) { return false; };

template <class Element>
bool compute_oldest_product(Block& b, int warpgroup) {
  std::vector<Thread*> group;
  for (int t = 0; t < kThreadsOfWarpgroup; ++t) {
    group.push_back(b.threads[warpgroup * kThreadsOfWarpgroup + t].get());
  }
  const uint64_t next = group[0]->computed;
  for (Thread* t : group) {
    if (t->products.size() <= next) return false;
  }
  const Product product = group[0]->products[next];
  for (Thread* t : group) {
    const Product& own = t->products[next];
    if (own.a != product.a || own.b != product.b || own.accumulate != product.accumulate) {
      fail("the threads of a warpgroup issued different products");
    }
  }
  std::vector<float> left(64 * 16), right(product.width * 16);
  for (int i = 0; i < 64 * 16; ++i) left[i] = operand_at<Element>(b, product.a, i / 16, i % 16);
  for (int i = 0; i < product.width * 16; ++i) {
    right[i] = operand_at<Element>(b, product.b, i / 16, i % 16);
  }
  for (int t = 0; t < kThreadsOfWarpgroup; ++t) {
    Thread& thread = *group[t];
    const int lane = t % 32, warp = t / 32;
    for (int r = 0; r < product.width / 2; ++r) {
      const int row = warp * 16 + lane / 4 + (r % 4 >= 2 ? 8 : 0);
      const int column = r / 4 * 8 + lane % 4 * 2 + r % 2;
      float sum = product.accumulate ? thread.sums[r] : 0.f;
      for (int k = 0; k < 16; ++k) sum += left[row * 16 + k] * right[column * 16 + k];
      thread.sums[r] = sum;
    }
    if (++thread.computed == thread.products.size()) {
      memcpy(thread.accumulators, thread.sums.data(), product.width / 2 * sizeof(float));
      thread.accumulators = nullptr;
    }
  }
  ++machine()->progress;
  return true;
}

inline void named_sync(NamedBarrier& barrier, int threads) {
  const uint64_t generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++machine()->progress;
  } else {
    wait_until([&] { return barrier.generation != generation; });
  }
}
inline void named_arrive(NamedBarrier& barrier, int threads) {
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  ++machine()->progress;
}

inline void run_thread() {
  machine()->kernel();
  self().done = true;
  --block().live;
  ++machine()->progress;
  yield();
}

// The last blocks of ``order``: a cluster, or some that run at a time.
inline void start_blocks(Machine& m, std::vector<int>& order, int threads, int shared_bytes) {
  constexpr size_t kAtATime = 4;
  m.blocks.clear();
  m.copies.clear();
  m.cluster_barrier = NamedBarrier();
  const size_t count = m.cluster > 1 ? m.cluster : std::min(kAtATime, order.size());
  while (m.blocks.size() < count) {
    auto b = std::make_unique<Block>();
    b->shared.assign(shared_bytes + 16, 0xFF);  // NaN in every format
    b->rank = m.cluster > 1 ? m.blocks.size() : 0;
    b->index = order.back();
    order.pop_back();
    b->live = threads;
    while (static_cast<int>(b->threads.size()) < threads) {
      auto thread = std::make_unique<Thread>();
      thread->block = b.get();
      thread->index = b->threads.size();
      constexpr size_t kStack = 64 << 10;
      thread->stack.reset(new char[kStack]);
      getcontext(&thread->context);
      thread->context.uc_stack.ss_sp = thread->stack.get();
      thread->context.uc_stack.ss_size = kStack;
      thread->context.uc_link = nullptr;
      makecontext(&thread->context, run_thread, 0);
      b->threads.push_back(std::move(thread));
    }
    m.blocks.push_back(std::move(b));
  }
}

inline bool compute_any(Machine& m) {
  bool any = false;
  for (auto& b : m.blocks) {
    for (int group = 0; group + 1 < static_cast<int>(b->threads.size()) / 128; ++group) {
      any |= compute_product(*b, group);
    }
  }
  return any;
}

// Nothing may be unfinished when a block ends.
inline void must_be_at_rest(const Block& b) {
  for (const NamedBarrier& barrier : b.named) {
    if (barrier.arrived) fail("a named barrier was arrived at and never passed");
  }
  for (const auto& [address, barrier] : b.barriers) {
    if (barrier.bytes) fail("a barrier still expects bytes");
  }
  for (const auto& thread : b.threads) {
    if (thread->computed != thread->products.size()) fail("a product was never waited for");
  }
}

// The blocks of a launch from last to first, clusters in random order.
inline std::vector<int> shuffled_blocks(Machine& m) {
  std::vector<int> clusters(m.block_count / m.cluster), order;
  for (size_t k = 0; k < clusters.size(); ++k) clusters[k] = k;
  std::shuffle(clusters.begin(), clusters.end(), m.random);
  for (int cluster : clusters) {
    for (int rank = m.cluster - 1; rank >= 0; --rank) order.push_back(cluster * m.cluster + rank);
  }
  return order;
}

// Runs a kernel, one cluster after the other, the threads of a cluster interleaved. Returns how many
// copies overwrote what a product still had to read.
inline uint64_t launch(int block_count, int cluster, int threads, int shared_bytes, unsigned seed,
                       std::function<void()> kernel, bool turns = false) {
  Machine m;
  m.turns = turns;
  machine() = &m;
  m.cluster = cluster;
  m.block_count = block_count;
  m.random.seed(seed);
  m.kernel = std::move(kernel);
  for (auto order = shuffled_blocks(m); !order.empty();) {
    start_blocks(m, order, threads, shared_bytes);
    std::vector<Thread*> all;
    for (auto& b : m.blocks) {
      for (auto& thread : b->threads) all.push_back(thread.get());
    }
    // At times a whole block or a warp falls behind the others; one block does from the start.
    const Block* asleep = m.blocks[m.random() % m.blocks.size()].get();
    int asleep_warp = -1;
    for (bool live = true; live;) {
      std::shuffle(all.begin(), all.end(), m.random);
      const uint64_t before = m.progress;
      if (m.random() % 64 == 0) {
        asleep = m.blocks[m.random() % m.blocks.size()].get();
        asleep_warp = m.random() % 2 ? -1 : static_cast<int>(m.random() % (threads / 32));
      }
      if (m.random() % 1024 == 0) asleep = nullptr;  // mostly when the others wait for it
      live = false;
      for (Thread* thread : all) {
        if (thread->done) continue;
        live = true;
        if (thread->block == asleep && (asleep_warp < 0 || thread->index / 32 == asleep_warp)) {
          continue;
        }
        m.current = thread;
        swapcontext(&m.scheduler, &thread->context);
        if (!m.copies.empty() && m.random() % 64 == 0) land(m.random() % m.copies.size());
        if (m.random() % 256 == 0 && threads > kThreadsOfWarpgroup) {
          for (auto& b : m.blocks) compute_product(*b, m.random() % (threads / 128 - 1));
        }
      }
      if (live && m.progress == before) {  // all wait: for a copy, a product, or for ever
        if (!m.copies.empty()) {
          land(m.random() % m.copies.size());
        } else if (asleep) {
          asleep = nullptr;
        } else if (!compute_any(m)) {
          fail("deadlock");
        }
      }
    }
    while (!m.copies.empty()) land(0);
    for (auto& b : m.blocks) must_be_at_rest(*b);
  }
  for (auto& [address, store] : m.held) store.land();
  return m.races;
}

}  // namespace host_model
