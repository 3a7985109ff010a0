// SPDX-License-Identifier: Apache-2.0
// What is left after the product of linear_wgrad, in one kernel, for sm_80 and later: parts of cut
// tiles are added up, the bias gets its gradient and its norms, and all norms become probe rows.
//
//   rows[0] = ‖dW_0‖² .. ‖dW_B-1‖²  ‖dW‖²  1       rows[1] = the same of db
//
// Blocks are numbered by task:
//
//   parts   a share of a cut tile: adds its parts, writes dW if wanted     -> part_norms ─┐
//   norms   32 samples of some rows of partial norms: adds the rows        -> norm_sums   │
//             the last of these samples writes their numbers                             ─┤
//   sums    256 columns of dy, of some samples or of a chunk of one        -> bias_sums   │
//             the last of these samples, where they are whole, writes their numbers       │
//             the last of these columns writes db if wanted                -> bias_norms ─┘
//
// The last block to arrive writes the numbers of the sums. Each adds in the same order whichever
// block it is, so two runs give the same bits.
#pragma once
#ifdef GNSFAST_HOST_MODEL
#include "host_model/primitives.h"
#else
#include "primitives_simt.cuh"
#endif
#include "work.cuh"

namespace gnsfast {

constexpr int kFinishShared = kFinishWarps * kBiasColumns * static_cast<int>(sizeof(float));

struct Finish {
  Problem p;
  const void* dy;  // [B, T, O]
  int64_t stride_b, stride_t;
  float* rows;  // [1 or 2, B + 2]
  int64_t row_stride;
};

// Whether this is the last of ``blocks`` to come here. What all of them have stored for others is
// then visible to it. ``flag`` is in shared memory.
GNSFAST_DEVICE bool arrives_last(int* ticket, int blocks, int* flag) {
  block_sync();  // the stores of all threads come before the arrival of one
  if (thread_index() == 0) {
    fence();
    *flag = atomic_add(ticket, 1) == blocks - 1;
    fence();
  }
  block_sync();
  return *flag;
}

// The sum of a value of each thread, in every thread.
GNSFAST_DEVICE double block_sum(double value, double* shared) {
  block_sync();  // what was in ``shared`` has been read
  shared[thread_index()] = value;
  for (int half = kFinishThreads / 2; half; half /= 2) {
    block_sync();
    const int thread = thread_index();
    if (thread < half) shared[thread] += shared[thread + half];
  }
  block_sync();
  return shared[0];
}

// Σ from[row, column] over rows ``begin`` to ``end``: a column for each lane, every eighth row for
// a warp. The first warp gets the sums.
template <class Number>
GNSFAST_DEVICE double column_sum(const Number* from, int begin, int end, int columns, int column,
                                 double* shared) {
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  double sum = 0;
  if (column < columns) {
#pragma unroll 8  // loads in flight
    for (int row = begin + warp; row < end; row += kFinishWarps) {
      sum += load_of_others(from + static_cast<int64_t>(row) * columns + column);
    }
  }
  block_sync();  // the sum before this one has been read
  shared[warp * 32 + lane] = sum;
  block_sync();
  double total = 0;
  if (warp == 0) {
    for (int k = 0; k < kFinishWarps; ++k) total += shared[k * 32 + lane];
  }
  return total;
}

// Adds the parts of a share of a tile, in the order of the samples: the owner's, then the helpers'.
template <class Output>
GNSFAST_DEVICE void add_parts([[maybe_unused]] Output* dw, const Problem& p, int block, double* shared) {
  const Plan& plan = p.plan;
  const int share = block % p.tasks.shares, whose = block / p.tasks.shares;
  const int cut = whose / plan.tile.cluster, rank = whose % plan.tile.cluster;
  const Helpers helpers = helpers_of(p, cut);
  const int begin = share * kPairsOfThread * kFinishThreads + thread_index();
  float total[2 * kPairsOfThread];
  clear(total);
#pragma unroll 2
  for (int helper = helpers.begin - 1; helper < helpers.end; ++helper) {
    const int slot = helper < helpers.begin ? cut : slot_of(plan, cut, helper);
    const float* part = part_at(p, plan.tile, slot, rank);
#pragma unroll
    for (int k = 0; k < kPairsOfThread; ++k) {
      float v[2];
      load_pair(v, part + 2 * (begin + k * kFinishThreads));
      total[2 * k] += v[0];
      total[2 * k + 1] += v[1];
    }
  }
  if constexpr (kStored<Output>) {
    const Corner corner = corner_of(plan, plan.tile, plan.whole_tiles + cut, rank);
#pragma unroll
    for (int k = 0; k < kPairsOfThread; ++k) {
      const int at = 2 * (begin + k * kFinishThreads);
      const int row = corner.o + at / plan.tile.i, column = corner.i + at % plan.tile.i;
      if (row < p.O && column < p.I) {
        Output* to = dw + static_cast<int64_t>(row) * p.I + column;
        store_pair(to, total[2 * k], total[2 * k + 1], p.add);
      }
    }
  }
  const double sqnorm = block_sum(sqnorm_of(total), shared);
  if (thread_index() == 0) store_for_others(p.work.part_norms + block, sqnorm);
}

GNSFAST_DEVICE void add_norms(const Problem& p, int height, int width, double* shared) {
  const int column = width * 32 + thread_index() % 32, begin = height * kNormRows;
  const int end = begin + kNormRows < p.tasks.rows ? begin + kNormRows : p.tasks.rows;
  const double sum = column_sum(p.work.norms, begin, end, p.B + 1, column, shared);
  if (thread_index() < 32 && column <= p.B) {
    store_for_others(p.work.norm_sums + static_cast<int64_t>(height) * (p.B + 1) + column, sum);
  }
}

// Numbers of samples ``begin`` to ``end`` of a probe row: ``rows`` rows of ``from``, added.
template <class Number>
GNSFAST_DEVICE void write_row(float* to, const Number* from, int rows, const Problem& p, int begin,
                              int end, double* shared) {
  for (; begin < end; begin += 32) {
    const int column = begin + thread_index() % 32;
    const double sum = column_sum(from, 0, rows, p.B + 1, column, shared);
    if (thread_index() < 32 && column < end) to[column] = static_cast<float>(sum);
  }
}

// Adds dy over the tokens of some samples, or of a chunk of one. As many warps read a sample as its
// length can use, 8 columns a lane; then a thread has one column of all samples, and adds what
// their warps found. A whole sample's norm follows at once.
template <class Element>
GNSFAST_DEVICE void add_tokens(const Finish& f, int columns, int piece, float* shared) {
  const Problem& p = f.p;
  const Tasks& tasks = p.tasks;
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const int column = columns * kBiasColumns + lane * 8;
  const int chunk = piece % tasks.chunks, first = piece / tasks.chunks * tasks.samples;
  const int last = p.B - first < tasks.samples ? p.B : first + tasks.samples;
  const int begin = chunk * tasks.tokens;
  const int end = p.T - begin < tasks.tokens ? p.T : begin + tasks.tokens;
  float total = 0.f;
#pragma unroll 1
  for (int b = first; b < last; b += tasks.together) {
    const int mine = b + warp * tasks.together / kFinishWarps;
    float sum[8];
    clear(sum);
    if (column < p.O && mine < last) {
      int t = begin + (warp & (tasks.warps - 1));
      const Element* dy = static_cast<const Element*>(f.dy) + column;
      dy += mine * f.stride_b + t * f.stride_t;
#pragma unroll 8  // loads in flight
      for (; t < end; t += tasks.warps, dy += tasks.warps * f.stride_t) {
        float v[8];
        load_8(v, dy);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[k] += v[k];
      }
    }
    block_sync();  // the sums before these have been read
#pragma unroll
    for (int k = 0; k < 8; ++k) shared[warp * kBiasColumns + lane * 8 + k] = sum[k];
    block_sync();
    float of_sample = 0.f;
    int at = b;
#pragma unroll
    for (int k = 1; k <= kFinishWarps; ++k) {
      of_sample += shared[(k - 1) * kBiasColumns + thread];
      if (k & (tasks.warps - 1)) continue;
      if (tasks.chunks == 1 && at < last) {
        const int64_t row = columns * kFinishWarps + warp;
        const float sqnorm = warp_sum(of_sample * of_sample);
        if (lane == 0) store_for_others(p.work.bias_norms + row * (p.B + 1) + at, sqnorm);
      }
      total += of_sample;
      of_sample = 0.f;
      ++at;
    }
  }
  const int64_t to = static_cast<int64_t>(columns) * tasks.pieces + piece;
  store_for_others(p.work.bias_sums + to * kBiasColumns + thread, total);
}

// One column of db for each thread, when all pieces are there, and norms of these columns: of the
// sum, and of samples in chunks, kPieces / 2 at most. One block has to wait for all these loads, so
// it asks for 16 at a time.
template <class Output>
GNSFAST_DEVICE void finish_bias([[maybe_unused]] Output* db, const Problem& p, int columns,
                                float* shared) {
  constexpr int kLoads = 16;
  const int thread = thread_index(), pieces = p.tasks.pieces;
  const float* from =
      p.work.bias_sums + static_cast<int64_t>(columns) * pieces * kBiasColumns + thread;
  auto leave_norm = [&](int b, double sum) {
    const float of_column = static_cast<float>(sum), sqnorm = warp_sum(of_column * of_column);
    if (thread % 32 == 0) shared[thread / 32 * kPieces + b] = sqnorm;
  };
  double total = 0, sum = 0;
  int b = 0, chunk = 0;
#pragma unroll 1
  for (int first = 0; first < pieces; first += kLoads) {
    float v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t at = static_cast<int64_t>(first + k) * kBiasColumns;
      v[k] = first + k < pieces ? load_of_others(from + at) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      total += v[k];
      if (p.tasks.chunks == 1) continue;
      sum += v[k];
      if (first + k < pieces && ++chunk == p.tasks.chunks) {
        leave_norm(b++, sum);
        sum = 0;
        chunk = 0;
      }
    }
  }
  leave_norm(b, total);
  block_sync();
  if (thread <= b) {
    float norm = 0.f;
    for (int warp = 0; warp < kFinishWarps; ++warp) norm += shared[warp * kPieces + thread];
    const int64_t row = static_cast<int64_t>(columns) * (p.B + 1);
    store_for_others(p.work.bias_norms + row + p.B - b + thread, norm);
  }
  if constexpr (kStored<Output>) {
    const int column = columns * kBiasColumns + thread;
    if (column < p.O) store_one(db + column, static_cast<float>(total), p.add);
  }
}

// Σ from[k · step] over ``count`` values, in every thread.
template <class Number>
GNSFAST_DEVICE double stepped_sum(const Number* from, int count, int step, double* shared) {
  double sum = 0;
#pragma unroll 8  // loads in flight
  for (int k = thread_index(); k < count; k += kFinishThreads) {
    sum += load_of_others(from + static_cast<int64_t>(k) * step);
  }
  return block_sum(sum, shared);
}

// What is left: the numbers of the sums, and of the bias's samples that are cut into chunks.
GNSFAST_DEVICE void write_rest(const Finish& f, double* shared) {
  const Problem& p = f.p;
  const Tasks& tasks = p.tasks;
  const int rows = tasks.columns;
  float* row = f.rows + f.row_stride;
  const double of_parts = stepped_sum(p.work.part_norms, tasks.parts, 1, shared);
  const double of_tiles = stepped_sum(p.work.norm_sums + p.B, tasks.heights, p.B + 1, shared);
  const double of_bias = stepped_sum(p.work.bias_norms + p.B, rows, p.B + 1, shared);
  if (rows && tasks.chunks > 1) write_row(row, p.work.bias_norms, rows, p, 0, p.B, shared);
  if (thread_index() == 0) {
    f.rows[p.B] = static_cast<float>(of_tiles + of_parts);
    f.rows[p.B + 1] = 1.f;
    if (rows) {
      row[p.B] = static_cast<float>(of_bias);
      row[p.B + 1] = 1.f;
    }
  }
}

template <class Element, class Output>
GNSFAST_SIMT_KERNEL(kFinishThreads, 4)
finish_kernel(Output* dw, Output* db, const GNSFAST_GRID_CONSTANT Finish f) {
  GNSFAST_SHARED(memory);
  auto* shared = reinterpret_cast<double*>(memory);
  auto* flag = reinterpret_cast<int*>(memory + kFinishShared);
  const Problem& p = f.p;
  const Tasks& tasks = p.tasks;
  int* tickets = p.work.tickets + 1;
  const int block = block_index(), norm = block - tasks.parts;
  const int sum = norm - static_cast<int>(tasks.norms);
  if (norm < 0) {
    add_parts(dw, p, block, shared);
  } else if (sum < 0) {
    const int height = norm % tasks.heights, width = norm / tasks.heights;
    add_norms(p, height, width, shared);
    if (!arrives_last(tickets + width, tasks.heights, flag)) return;
    const int begin = width * 32, end = begin + 32 < p.B ? begin + 32 : p.B;
    write_row(f.rows, p.work.norm_sums, tasks.heights, p, begin, end, shared);
  } else {
    const int columns = sum / tasks.pieces, piece = sum % tasks.pieces;
    add_tokens<Element>(f, columns, piece, reinterpret_cast<float*>(memory));
    tickets += tasks.widths;
    if (tasks.chunks == 1 && arrives_last(tickets + tasks.columns + piece, tasks.columns, flag)) {
      const int begin = piece * tasks.samples, rows = tasks.columns * kFinishWarps;
      const int end = p.B - begin < tasks.samples ? p.B : begin + tasks.samples;
      write_row(f.rows + f.row_stride, p.work.bias_norms, rows, p, begin, end, shared);
    }
    if (!arrives_last(tickets + columns, tasks.pieces, flag)) return;
    finish_bias(db, p, columns, reinterpret_cast<float*>(memory));
  }
  // One block comes here for each share of a cut tile, 32 samples, and group of columns of dy.
  const int blocks = tasks.parts + tasks.widths + tasks.columns;
  if (arrives_last(p.work.tickets, blocks, flag)) write_rest(f, shared);
}

}  // namespace gnsfast
