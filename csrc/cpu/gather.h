// SPDX-License-Identifier: Apache-2.0
// The loops of embedding_wgrad.cpp, for one instruction set.

// The rows of a run in the columns of a block: the squares of their sum, which is added to dW.
// ``kDense``: all of kColumns, side by side.
template <class Element, bool kDense>
void add_run(const Work& work, int64_t b, const Run& run, int block, double* squares, double* whole) {
  const EmbeddingWgrad& call = work.call;
  const int64_t first = int64_t{block} * kColumns, D = call.dy.N;
  const int columns = kDense ? kColumns : int(std::min<int64_t>(kColumns, D - first));
  const int64_t step = kDense ? 1 : call.dy.stride_n;
  const auto* data = static_cast<const Element*>(call.dy.data) + first * call.dy.stride_n;
  const auto add_rows = [&](const Place* at, const Place* end, float* sum) {
    for (; at < end; ++at) {
      const Element* row = data + b * call.dy.stride_b + at->token * call.dy.stride_t;
      for (int k = 0; k < columns; ++k) sum[k] += value(row[k * step]);
    }
  };
  float sum[kColumns] = {};
  add_rows(run.begin, std::min(run.end, run.begin + kFewTokens), sum);
  if (run.end - run.begin > kFewTokens) {
    double wide[kColumns];
    std::copy(sum, sum + kColumns, wide);
    for (const Place* at = run.begin + kFewTokens; at < run.end; at += kFewTokens) {
      float few[kColumns] = {};
      add_rows(at, std::min(run.end, at + kFewTokens), few);
      for (int k = 0; k < kColumns; ++k) wide[k] += few[k];
    }
    for (int k = 0; k < kColumns; ++k) sum[k] = static_cast<float>(wide[k]);
  }
  for (int k = 0; k < kColumns; ++k) squares[k] += double(sum[k]) * sum[k];
  float* const to = call.dw + run.begin->id * D + first;
  for (int k = 0; k < columns; ++k) to[k] += sum[k];
  for (int k = 0; k < columns && run.last; ++k) whole[k] += double(to[k]) * to[k];
}

// Some blocks of columns. ``memory`` [2, blocks, kColumns] holds the squares of a sample, and of dW.
inline void run(const Work& work, int from, int to, double* memory) {
  const EmbeddingWgrad& call = work.call;
  const auto add = call.bfloat16 ? add_run<Bfloat16, true> : add_run<float, true>;
  const auto add_loose = call.bfloat16 ? add_run<Bfloat16, false> : add_run<float, false>;
  double* const whole = memory + (to - from) * kColumns;
  std::fill(memory, whole + (to - from) * kColumns, 0.0);
  const auto note = [&](double* squares, int64_t b) {
    for (int block = from; block < to; ++block, squares += kColumns) {
      double& found = work.found[block * (call.B + 1) + b];
      for (int k = 0; k < kColumns; ++k) found += std::exchange(squares[k], 0.0);
    }
  };
  for (int64_t b = 0; b < call.B; ++b) {
    for (const Run& run : work.runs[b]) {
      for (int block = from; block < to; ++block) {
        const bool dense = call.dy.stride_n == 1 && call.dy.N >= (block + 1) * kColumns;
        const int64_t at = (block - from) * kColumns;
        (dense ? add : add_loose)(work, b, run, block, memory + at, whole + at);
      }
    }
    note(memory, b);
  }
  note(whole, call.B);
}
