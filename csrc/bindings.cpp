// SPDX-License-Identifier: Apache-2.0
// gnsfast._C. Tensors come as addresses, shapes and strides, so it is built without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear_wgrad.h"

namespace py = pybind11;

namespace {

using gnsfast::Dtype;
using Shape = std::array<int64_t, 4>;

std::string text(const Shape& s) {
  return "B " + std::to_string(s[0]) + ", T " + std::to_string(s[1]) + ", I " +
         std::to_string(s[2]) + ", O " + std::to_string(s[3]);
}

Shape shape_of(const py::tuple& shape) {
  if (shape.size() != 4) throw std::invalid_argument("shape must be (B, T, I, O)");
  Shape s{};
  for (size_t i = 0; i < 4; ++i) s[i] = shape[i].cast<int64_t>();
  for (int64_t n : s) {
    if (n < 1 || n > INT32_MAX) throw std::invalid_argument("every size must be 1 to 2^31 - 1: " + text(s));
  }
  return s;
}

Dtype dtype_of(const std::string& name) {
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  if (name == "float32") return Dtype::kFloat32;
  if (name == "none") return Dtype::kNone;
  throw std::invalid_argument("no kernel for " + name + ": bfloat16, float16 or float32");
}

Dtype half_of(const std::string& name, const Shape& s) {
  const Dtype element = dtype_of(name);
  if (element != Dtype::kBfloat16 && element != Dtype::kFloat16) {
    throw std::invalid_argument("x and dy must be bfloat16 or float16, " + text(s));
  }
  return element;
}

template <class T>
T* pointer(const char* name, uintptr_t address, bool optional = false) {
  if (!address && !optional) throw std::invalid_argument(std::string(name) + " is a null pointer");
  return reinterpret_cast<T*>(address);
}

const gnsfast::Kernel& kernel_of(const std::string& name, int processors) {
  if (processors < 2) throw std::invalid_argument("processors must be two or more");
  for (const auto& kernel : gnsfast::kernels()) {
    if (name == kernel.name) return kernel;
  }
  throw std::invalid_argument("this build has no kernel " + name +
                              ": GNSFAST_CUDA_ARCHS=90 pip install . builds sm90, and with "
                              "GNSFAST_CUDA_VARIANTS=1 its variants too");
}

std::vector<std::string> kernels() {
  std::vector<std::string> names;
  for (const auto& kernel : gnsfast::kernels()) names.push_back(kernel.name);
  return names;
}

py::dict plan(const std::string& kernel, const py::tuple& shape, int processors) {
  const Shape s = shape_of(shape);
  const auto p = kernel_of(kernel, processors).plan(s[0], s[1], s[2], s[3], processors);
  py::dict result;
  result["tiles"] = p.tiles;
  result["whole_tiles"] = p.whole_tiles;
  result["own"] = p.own;
  result["helpers"] = p.helpers;
  result["busiest"] = p.busiest(s[0]);
  result["at_once"] = p.at_once;
  result["partial_rows"] = p.norm_rows();
  result["scratch_elements"] = p.scratch_elements();
  return result;
}

// All that stays the same from call to call: checked and planned once. Calls are positional, as
// names cost time.
class LinearWgrad {
 public:
  LinearWgrad(const std::string& kernel, const py::tuple& shape, const std::string& element,
              const std::string& output, bool bias, int processors, int device)
      : functions_(kernel_of(kernel, processors)) {
    const Shape s = shape_of(shape);
    call_.B = s[0];
    call_.T = s[1];
    call_.I = s[2];
    call_.O = s[3];
    call_.element = half_of(element, s);
    call_.output = dtype_of(output);
    call_.bias = bias;
    if (call_.output != Dtype::kFloat32 && call_.output != call_.element && stored()) {
      throw std::invalid_argument("dw must be float32 or " + element + ", not " + output);
    }
    call_.device = device;
    plan_ = functions_.plan(call_.B, call_.T, call_.I, call_.O, processors);
    const auto tasks = gnsfast::tasks_of(plan_, call_.B, call_.T, call_.O, bias);
    workspace_ = gnsfast::workspace_of(plan_, tasks, call_.B, nullptr).bytes;
  }

  int64_t workspace() const { return workspace_; }

  void operator()(uintptr_t x, int64_t x_stride_b, int64_t x_stride_t, uintptr_t dy,
                  int64_t dy_stride_b, int64_t dy_stride_t, uintptr_t dw, uintptr_t db,
                  uintptr_t rows, int64_t row_stride, uintptr_t workspace, bool add,
                  uintptr_t stream) const {
    gnsfast::LinearWgrad call = call_;
    call.x = {pointer<const void>("x", x), x_stride_b, x_stride_t};
    call.dy = {pointer<const void>("dy", dy), dy_stride_b, dy_stride_t};
    call.dw = pointer<void>("dw", dw, !stored());
    call.db = pointer<void>("db", db, !call.bias || !stored());
    if (db && !call.bias) throw std::invalid_argument("this call was made without a bias");
    if ((dw || db) && !stored()) {
      throw std::invalid_argument("this call gives norms alone: dw and db must be 0");
    }
    if (add && call.output != Dtype::kFloat32) {
      throw std::invalid_argument("only a float32 dw is added to");
    }
    call.add = add;
    call.rows = pointer<float>("rows", rows);
    call.row_stride = row_stride;
    call.workspace = pointer<void>("workspace", workspace);
    if (workspace % 16) {
      throw std::invalid_argument("the workspace must be at a multiple of 16 bytes");
    }
    call.stream = pointer<void>("stream", stream, true);
    py::gil_scoped_release release;
    functions_.launch(call, plan_);
  }

 private:
  bool stored() const { return call_.output != Dtype::kNone; }

  gnsfast::Kernel functions_;
  gnsfast::LinearWgrad call_{};
  gnsfast::Plan plan_;
  int64_t workspace_;
};

void token_sqnorms(uintptr_t x, int64_t x_stride, uintptr_t dy, int64_t dy_stride,
                   const py::tuple& shape, const std::string& element, uintptr_t product,
                   uintptr_t dy_sqnorm, uintptr_t stream, int device) {
  if (shape.size() != 3) throw std::invalid_argument("shape must be (B, I, O)");
  const Shape s = shape_of(py::make_tuple(shape[0], 1, shape[1], shape[2]));
  gnsfast::TokenSqnorms call{};
  call.x = pointer<const void>("x", x);
  call.dy = pointer<const void>("dy", dy);
  call.x_stride = x_stride;
  call.dy_stride = dy_stride;
  call.B = s[0];
  call.I = s[2];
  call.O = s[3];
  call.element = half_of(element, s);
  call.product = pointer<float>("product", product);
  call.dy_sqnorm = pointer<float>("dy_sqnorm", dy_sqnorm);
  call.stream = pointer<void>("stream", stream, true);
  call.device = device;
  py::gil_scoped_release release;
  gnsfast::token_sqnorms(call);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels of gnsfast; gnsfast.ops.extension checks the tensors that it passes.";
  m.def("missing_device", &gnsfast::missing_device, "Why no kernel can be launched; else empty.");
  m.def("plan_linear_wgrad", &plan, py::arg("kernel"), py::arg("shape"), py::arg("processors"),
        "How (B, T, I, O) is split, and what memory that needs.");
  py::class_<LinearWgrad>(m, "LinearWgrad", "Weight gradients of one shape, on one device.")
      .def(py::init<const std::string&, const py::tuple&, const std::string&, const std::string&,
                    bool, int, int>(),
           py::arg("kernel"), py::kw_only(), py::arg("shape"), py::arg("element"),
           py::arg("output"), py::arg("bias"), py::arg("processors"), py::arg("device"))
      .def_property_readonly("workspace", &LinearWgrad::workspace, "Bytes that a call needs.")
      .def("__call__", &LinearWgrad::operator(), py::arg("x"), py::arg("x_stride_b"),
           py::arg("x_stride_t"), py::arg("dy"), py::arg("dy_stride_b"), py::arg("dy_stride_t"),
           py::arg("dw"), py::arg("db"), py::arg("rows"), py::arg("row_stride"),
           py::arg("workspace"), py::arg("add"), py::arg("stream"),
           "dW [O, I], db [O] unless 0, and their rows [1 or 2, B + 2], launched on a stream. Of "
           "an output \"none\" the rows alone.");
  m.def("kernels", &kernels, "The names of linear_wgrad's kernels in this build.");
  m.def("token_sqnorms", &token_sqnorms, py::kw_only(), py::arg("x"), py::arg("x_stride"),
        py::arg("dy"), py::arg("dy_stride"), py::arg("shape"), py::arg("element"),
        py::arg("product"), py::arg("dy_sqnorm"), py::arg("stream"), py::arg("device"),
        "||x_b||^2 ||dy_b||^2 and ||dy_b||^2 of one-token samples, launched on a stream.");
}
