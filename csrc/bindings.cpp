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
  throw std::invalid_argument("no kernel for " + name + ": bfloat16, float16 or float32");
}

Dtype half_of(const std::string& name, const Shape& s) {
  const Dtype element = dtype_of(name);
  if (element == Dtype::kFloat32) {
    throw std::invalid_argument("x and dy must be bfloat16 or float16, " + text(s));
  }
  return element;
}

template <class T>
T* pointer(const char* name, uintptr_t address, bool optional = false) {
  if (!address && !optional) throw std::invalid_argument(std::string(name) + " is a null pointer");
  return reinterpret_cast<T*>(address);
}

gnsfast::Rows rows(const char* name, uintptr_t data, const py::tuple& strides) {
  if (strides.size() != 2) {
    throw std::invalid_argument(std::string(name) + "_strides must be (of samples, of tokens)");
  }
  return {pointer<const void>(name, data), strides[0].cast<int64_t>(),
          strides[1].cast<int64_t>()};
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
  result["whole_tiles"] = p.whole_tiles;
  result["parts"] = p.parts;
  result["partial_rows"] = p.partial_rows;
  result["scratch_elements"] = p.scratch_elements;
  return result;
}

void linear_wgrad(const std::string& kernel, uintptr_t x, const py::tuple& x_strides, uintptr_t dy,
                  const py::tuple& dy_strides, const py::tuple& shape, const std::string& element,
                  uintptr_t dw, const std::string& output, bool add, uintptr_t partial,
                  uintptr_t scratch, int processors, uintptr_t stream, int device) {
  const Shape s = shape_of(shape);
  const gnsfast::Kernel& functions = kernel_of(kernel, processors);
  gnsfast::LinearWgrad call{};
  call.x = rows("x", x, x_strides);
  call.dy = rows("dy", dy, dy_strides);
  call.B = s[0];
  call.T = s[1];
  call.I = s[2];
  call.O = s[3];
  call.element = half_of(element, s);
  call.output = dtype_of(output);
  if (call.output != Dtype::kFloat32 && call.output != call.element) {
    throw std::invalid_argument("dw must be float32 or " + element + ", not " + output);
  }
  call.add = add;
  if (add && call.output != Dtype::kFloat32) {
    throw std::invalid_argument("only a float32 dw is added to, not " + output);
  }
  call.dw = pointer<void>("dw", dw);
  call.partial = pointer<float>("partial", partial);
  const auto p = functions.plan(call.B, call.T, call.I, call.O, processors);
  call.scratch = pointer<float>("scratch", scratch, p.scratch_elements == 0);
  call.stream = pointer<void>("stream", stream, true);
  call.device = device;
  py::gil_scoped_release release;
  functions.launch(call, p, processors);
}

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
  m.def("linear_wgrad", &linear_wgrad, py::arg("kernel"), py::kw_only(), py::arg("x"), py::arg("x_strides"),
        py::arg("dy"), py::arg("dy_strides"), py::arg("shape"), py::arg("element"), py::arg("dw"),
        py::arg("output"), py::arg("add"), py::arg("partial"), py::arg("scratch"),
        py::arg("processors"), py::arg("stream"), py::arg("device"),
        "dW [O, I] and the partial squared norms [partial_rows, B + 1], launched on a stream.");
  m.def("kernels", &kernels, "The names of linear_wgrad's kernels in this build.");
  m.def("token_sqnorms", &token_sqnorms, py::kw_only(), py::arg("x"), py::arg("x_stride"),
        py::arg("dy"), py::arg("dy_stride"), py::arg("shape"), py::arg("element"),
        py::arg("product"), py::arg("dy_sqnorm"), py::arg("stream"), py::arg("device"),
        "||x_b||^2 ||dy_b||^2 and ||dy_b||^2 of one-token samples, launched on a stream.");
}
