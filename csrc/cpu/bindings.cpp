// SPDX-License-Identifier: Apache-2.0
// gnsfast._cpu. Tensors come as addresses, shapes and strides, so it is built without torch.
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "embedding_wgrad.h"
#include "gram.h"
#include "linear_wgrad.h"
#include "norm_backward.h"
#include "transpose.h"

namespace py = pybind11;

namespace {

using gnsfast::cpu::LinearWgrad;
using Strides = std::array<int64_t, 3>;

// torch's own OpenMP, which it has loaded: threads of another one would compete with torch's, which
// spin for a while after each of its operators.
gnsfast::cpu::Parallel openmp() {
  static void* const found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  return reinterpret_cast<gnsfast::cpu::Parallel>(found);
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <size_t kCount>
void check_sizes(const std::array<int64_t, kCount>& shape) {
  for (int64_t n : shape) {
    if (n < 1 || n > INT32_MAX) throw std::invalid_argument("every size must be 1 to 2^31 - 1");
  }
}

gnsfast::cpu::Side side(uintptr_t address, const Strides& strides, int64_t N) {
  return {at<const void>(address), strides[0], strides[1], strides[2], N};
}

// Positional, as names cost time. ``halves``: whether the sides are of bfloat16, and whether dW is.
// With ``starts`` T is the number of rows.
void linear_wgrad(const std::string& kernel, uintptr_t left, const Strides& left_strides,
                  uintptr_t right, const Strides& right_strides, const std::array<bool, 2>& halves,
                  const std::array<int64_t, 4>& shape, uintptr_t starts, uintptr_t sqnorms,
                  uintptr_t dw, uintptr_t db, bool bias_of_right, uintptr_t rows,
                  int64_t row_stride, int threads) {
  const auto [B, T, M, N] = shape;
  check_sizes(shape);
  if (!left || !right || !dw || !rows) throw std::invalid_argument("a null pointer");
  const auto* bounds = at<const int64_t>(starts);
  for (int64_t b = 0; bounds && b < B; ++b) {
    if (bounds[b] < 0 || bounds[b] > bounds[b + 1] || bounds[b + 1] > T) {
      throw std::invalid_argument("starts must be numbers of rows that do not decrease");
    }
  }
  LinearWgrad call{};
  call.left = side(left, left_strides, M);
  call.right = side(right, right_strides, N);
  call.bfloat16 = halves[0];
  call.dw_bfloat16 = halves[1];
  call.B = B;
  call.T = T;
  call.starts = bounds;
  call.sqnorms = at<const double>(sqnorms);
  call.dw = at<float>(dw);
  call.row_step = N;
  call.column_step = 1;
  call.db = at<float>(db);
  call.bias_of_right = bias_of_right;
  call.rows = at<float>(rows);
  call.row_stride = row_stride;
  call.team = {threads, openmp()};
  py::gil_scoped_release release;
  gnsfast::cpu::linear_wgrad(call, kernel);
}

void gram_sqnorms(const std::string& kernel, uintptr_t left, const Strides& left_strides,
                  uintptr_t right, const Strides& right_strides, bool bfloat16,
                  const std::array<int64_t, 4>& shape, uintptr_t sqnorms, uintptr_t terms,
                  int threads) {
  const auto [B, T, M, N] = shape;
  check_sizes(shape);
  if (!left || !right || !sqnorms || !terms) throw std::invalid_argument("a null pointer");
  const gnsfast::cpu::Gram call{
      side(left, left_strides, M), side(right, right_strides, N), bfloat16, B, T,
      at<double>(sqnorms), at<double>(terms), {threads, openmp()}};
  py::gil_scoped_release release;
  gnsfast::cpu::gram_sqnorms(call, kernel);
}

void norm_backward(const std::string& kernel, uintptr_t dy, const Strides& dy_strides, uintptr_t x,
                   const Strides& x_strides, bool bfloat16, const std::array<int64_t, 3>& shape,
                   uintptr_t mean, uintptr_t rstd, uintptr_t w, float eps, float offset,
                   uintptr_t dx, uintptr_t dw, uintptr_t db, uintptr_t rows, int64_t row_stride,
                   int threads) {
  const auto [B, T, F] = shape;
  check_sizes(shape);
  if (!dy || !x || !dx || !mean != !rstd || ((dw || db) && !rows) || (db && !mean)) {
    throw std::invalid_argument("a null pointer");
  }
  const gnsfast::cpu::NormBackward call{
      side(dy, dy_strides, F), side(x, x_strides, F), bfloat16, B, T,
      at<const float>(mean), at<const float>(rstd), at<const float>(w), eps, offset,
      at<void>(dx), at<float>(dw), at<float>(db), at<float>(rows), row_stride,
      {threads, openmp()}};
  py::gil_scoped_release release;
  gnsfast::cpu::norm_backward(call, kernel);
}

void embedding_wgrad(const std::string& kernel, uintptr_t dy, const Strides& dy_strides,
                     bool bfloat16, uintptr_t ids, const std::array<int64_t, 2>& ids_strides,
                     const std::array<int64_t, 4>& shape, int64_t padding_idx, uintptr_t dw,
                     uintptr_t rows, int threads) {
  const auto [B, T, D, V] = shape;
  check_sizes(shape);
  if (!dy || !ids || !dw || !rows) throw std::invalid_argument("a null pointer");
  const gnsfast::cpu::EmbeddingWgrad call{
      side(dy, dy_strides, D), bfloat16, B, T, at<const int64_t>(ids), ids_strides[0],
      ids_strides[1], V, padding_idx, at<float>(dw), at<float>(rows), {threads, openmp()}};
  py::gil_scoped_release release;
  gnsfast::cpu::embedding_wgrad(call, kernel);
}

void transpose(uintptr_t from, const Strides& from_strides, uintptr_t to, const Strides& to_strides,
               int bytes, const std::array<int64_t, 4>& shape, int threads) {
  const auto [n, C, H, W] = shape;
  check_sizes(shape);
  if (!from || !to) throw std::invalid_argument("a null pointer");
  if (bytes != 2 && bytes != 4) throw std::invalid_argument("a number must have 2 or 4 bytes");
  const auto [from_n, from_c, from_h] = from_strides;
  const auto [to_n, to_h, to_w] = to_strides;
  const gnsfast::cpu::Transpose call{at<const void>(from), at<void>(to), bytes, n, C, H, W, from_n,
                                     from_c, from_h, to_n, to_h, to_w, {threads, openmp()}};
  py::gil_scoped_release release;
  gnsfast::cpu::transpose(call);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  m.doc() = "CPU kernels of gnsfast; gnsfast.ops.cpu checks the tensors that it passes.";
  m.def("kernels", &gnsfast::cpu::instruction_sets, "What this processor runs, the fastest first.");
  m.def("has_threads", [] { return openmp() != nullptr; }, "Whether torch's OpenMP was found.");
  m.def("bfloat16_kernels", &gnsfast::cpu::bfloat16_kernels,
        "What this processor runs for linear layers in bfloat16 alone, the fastest first.");
  m.def("gram_sqnorms", &gram_sqnorms,
        "Short samples' squared norms, and the sums of their absolute terms.");
  m.def("linear_wgrad", &linear_wgrad, "dW, db unless 0, and their probe rows.");
  m.def("norm_backward", &norm_backward, "dx; dW and db unless 0, and their probe rows.");
  m.def("transpose", &transpose, "Copies [n, C, H, W] to [n, H, W, C].");
  m.def("embedding_wgrad", &embedding_wgrad, "Adds to dW; its probe row.");
}
