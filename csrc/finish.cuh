// SPDX-License-Identifier: Apache-2.0
// What is left after the product of linear_wgrad, in one kernel, for sm_80 and later: parts of cut
// tiles are added up, the bias gets its gradient and its norms, and all norms become probe rows.
//
//   rows[0] = ‖dW_0‖² .. ‖dW_B-1‖²  ‖dW‖²  1       rows[1] = the same of db
//
// Blocks are numbered by task:
//
//   parts   a share of a cut tile: adds its parts, writes dW          -> part_norms ─┐
//   norms   32 samples of some rows of partial norms: adds the rows   -> norm_sums  ─┤ last: rows
//   sums    256 tokens of a sample, 256 columns of dy -> bias_sums                   │
//             last of its columns: db and their norms                 -> bias_norms ─┘
//
// The last block to arrive does the rest. It adds in the same order whichever block it is, so two
// runs give the same bits.
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

// Adds the parts of a share of a tile, in the order of the runs that left them.
template <class Output>
GNSFAST_DEVICE void add_parts(Output* dw, const Problem& p, int block, double* shared) {
  const Plan& plan = p.plan;
  const int share = block % p.tasks.shares, whose = block / p.tasks.shares;
  const int cut = whose / plan.tile.cluster, rank = whose % plan.tile.cluster;
  const int pair = cut * p.B, first = pair / plan.run, last = (pair + p.B - 1) / plan.run;
  const int begin = share * kPairsOfThread * kFinishThreads + thread_index();
  float total[2 * kPairsOfThread];
  clear(total);
#pragma unroll 2
  for (int run = first; run <= last; ++run) {
    const float* part = part_at(p, plan.tile, run + cut, rank);
#pragma unroll
    for (int k = 0; k < kPairsOfThread; ++k) {
      float v[2];
      load_pair(v, part + 2 * (begin + k * kFinishThreads));
      total[2 * k] += v[0];
      total[2 * k + 1] += v[1];
    }
  }
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
  const double sqnorm = block_sum(sqnorm_of(total), shared);
  if (thread_index() == 0) store_for_others(p.work.part_norms + block, sqnorm);
}

GNSFAST_DEVICE void add_norms(const Problem& p, int block, double* shared) {
  const int group = block % p.tasks.norm_rows, lane = thread_index() % 32;
  const int column = block / p.tasks.norm_rows * 32 + lane, begin = group * kNormRows;
  const int end = begin + kNormRows < p.tasks.rows ? begin + kNormRows : p.tasks.rows;
  const double sum = column_sum(p.work.norms, begin, end, p.B + 1, column, shared);
  if (thread_index() < 32 && column <= p.B) {
    store_for_others(p.work.norm_sums + static_cast<int64_t>(group) * (p.B + 1) + column, sum);
  }
}

// Adds dy over a chunk of a sample's tokens: 8 columns for a lane, every eighth token for a warp.
template <class Element>
GNSFAST_DEVICE void add_tokens(const Finish& f, int64_t block, float* shared) {
  const Problem& p = f.p;
  const int chunk = static_cast<int>(block % p.tasks.tokens);
  const int b = static_cast<int>(block / p.tasks.tokens % p.B);
  const int columns = static_cast<int>(block / p.tasks.tokens / p.B);
  const int warp = thread_index() / 32, lane = thread_index() % 32;
  const int column = columns * kBiasColumns + lane * 8;
  const int begin = chunk * kBiasTokens;
  const int end = p.T - begin < kBiasTokens ? p.T : begin + kBiasTokens;
  float sum[8];
  clear(sum);
  if (column < p.O) {
    const Element* dy = static_cast<const Element*>(f.dy) + b * f.stride_b + column;
#pragma unroll 8  // loads in flight
    for (int t = begin + warp; t < end; t += kFinishWarps) {
      float v[8];
      load_8(v, dy + t * f.stride_t);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += v[k];
    }
  }
#pragma unroll
  for (int k = 0; k < 8; ++k) shared[warp * kBiasColumns + lane * 8 + k] = sum[k];
  block_sync();
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < kFinishWarps; ++k) total += shared[k * kBiasColumns + thread_index()];
  store_for_others(p.work.bias_sums + block * kBiasColumns + thread_index(), total);
}

// One column of db for each thread, when the sums of all samples are there. One block has to wait
// for B · tokens loads, so it asks for 16 at a time, of several samples where these are short.
template <class Output>
GNSFAST_DEVICE void finish_bias(Output* db, const Problem& p, int columns) {
  constexpr int kLoads = 16;
  const uint32_t thread = thread_index();
  const int sums = p.B * p.tasks.tokens;
  const float* from =
      p.work.bias_sums + static_cast<int64_t>(columns) * sums * kBiasColumns + thread;
  float* norms =
      p.work.bias_norms + static_cast<int64_t>(columns * kFinishWarps + thread / 32) * (p.B + 1);
  auto store_norm = [&](int b, double sum) {
    const float of_column = static_cast<float>(sum), sqnorm = warp_sum(of_column * of_column);
    if (thread % 32 == 0) store_for_others(norms + b, sqnorm);
  };
  double total = 0, sum = 0;
  int b = 0, chunk = 0;
#pragma unroll 1
  for (int first = 0; first < sums; first += kLoads) {
    float v[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const int64_t at = static_cast<int64_t>(first + k) * kBiasColumns;
      v[k] = first + k < sums ? load_of_others(from + at) : 0.f;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      sum += v[k];
      if (first + k < sums && ++chunk == p.tasks.tokens) {
        store_norm(b++, sum);
        total += sum;
        sum = 0;
        chunk = 0;
      }
    }
  }
  store_norm(p.B, total);
  const int column = columns * kBiasColumns + thread;
  if (column < p.O) store_one(db + column, static_cast<float>(total), p.add);
}

GNSFAST_DEVICE void write_rows(const Finish& f, double* shared) {
  const Problem& p = f.p;
  const int lane = thread_index() % 32;
  double of_parts = 0;
  for (int k = thread_index(); k < p.tasks.parts; k += kFinishThreads) {
    of_parts += load_of_others(p.work.part_norms + k);
  }
  of_parts = block_sum(of_parts, shared);
  for (int first = 0; first <= p.B; first += 32) {
    const int column = first + lane;
    const bool mine = thread_index() < 32 && column <= p.B;
    double sum = column_sum(p.work.norm_sums, 0, p.tasks.norm_rows, p.B + 1, column, shared);
    if (column == p.B) sum += of_parts;
    if (mine) f.rows[column] = static_cast<float>(sum);
    if (p.tasks.columns) {
      const int rows = p.tasks.columns * kFinishWarps;
      sum = column_sum(p.work.bias_norms, 0, rows, p.B + 1, column, shared);
      if (mine) f.rows[f.row_stride + column] = static_cast<float>(sum);
    }
  }
  if (thread_index() == 0) {
    f.rows[p.B + 1] = 1.f;
    if (p.tasks.columns) f.rows[f.row_stride + p.B + 1] = 1.f;
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
  const int64_t block = block_index(), sum = block - tasks.parts - tasks.norms;
  if (block < tasks.parts) {
    add_parts(dw, p, static_cast<int>(block), shared);
  } else if (sum < 0) {
    add_norms(p, static_cast<int>(block) - tasks.parts, shared);
  } else {
    const int of_columns = p.B * tasks.tokens, columns = static_cast<int>(sum / of_columns);
    add_tokens<Element>(f, sum, reinterpret_cast<float*>(memory));
    if (!arrives_last(p.work.tickets + columns, of_columns, flag)) return;
    finish_bias(db, p, columns);
  }
  // Of the blocks that add tokens, one for each group of columns comes here.
  const int blocks = tasks.parts + tasks.norms + tasks.columns;
  if (arrives_last(p.work.tickets + tasks.columns, blocks, flag)) write_rows(f, shared);
}

}  // namespace gnsfast
