# SPDX-License-Identifier: Apache-2.0
"""The CUDA extension as far as a machine without a device goes: it is imported, plans, and says in
one line what it refuses. ``test_gpu.py`` runs its kernels.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gnsfast.ops import extension

_C = pytest.importorskip("gnsfast._C", reason="built without nvcc")

MADE: dict[str, Any] = dict(kernel="sm80", shape=(2, 8, 8, 8), element="bfloat16")
MADE |= dict(output="float32", bias=True, processors=132, device=0)
CALL: dict[str, Any] = dict(x=1024, x_stride_b=64, x_stride_t=8, dy=1024, dy_stride_b=64)
CALL |= dict(dy_stride_t=8, dw=1024, db=1024, rows=1024, row_stride=4, workspace=1024)
CALL |= dict(add=False, stream=0)

REFUSED_SHAPES = {
    "every size must be 1 to .*T 0": dict(shape=(2, 0, 8, 8)),
    r"shape must be \(B, T, I, O\)": dict(shape=(2, 8, 8)),
    "no kernel for float64": dict(element="float64"),
    "x and dy must be bfloat16 or float16": dict(element="float32"),
    "dw must be float32 or bfloat16, not float16": dict(output="float16"),
    "this build has no kernel sm70": dict(kernel="sm70"),
    "processors must be two or more": dict(processors=0),
}
REFUSED = {
    "only a float32 dw is added to": (dict(output="bfloat16"), dict(add=True)),
    "x is a null pointer": ({}, dict(x=0)),
    "dy is a null pointer": ({}, dict(dy=0)),
    "dw is a null pointer": ({}, dict(dw=0)),
    "db is a null pointer": ({}, dict(db=0)),
    "made without a bias": (dict(bias=False), {}),
    "rows is a null pointer": ({}, dict(rows=0)),
    "workspace is a null pointer": ({}, dict(workspace=0)),
    "at a multiple of 16 bytes": ({}, dict(workspace=1032)),
    "norms alone: dw and db must be 0": (dict(output="none"), dict(db=0)),
}


@pytest.mark.parametrize("message", REFUSED_SHAPES)
def test_refused_shapes(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.LinearWgrad(**{**MADE, **REFUSED_SHAPES[message]})


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    made, call = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        _C.LinearWgrad(**{**MADE, **made})(**{**CALL, **call})


def test_without_a_device() -> None:
    if torch.cuda.is_available():
        assert _C.missing_device() == extension.missing() == ""
    else:
        assert extension.missing().startswith("no device: ")
        for kernel in (name for name in _C.kernels() if " " not in name):  # no variant
            for output, call in (("float32", CALL), ("none", dict(CALL, dw=0, db=0))):
                made = {**MADE, "kernel": kernel, "output": output}
                with pytest.raises(RuntimeError, match="cudaSetDevice: "):
                    _C.LinearWgrad(**made)(**call)


@pytest.mark.parametrize("stored", [True, False], ids=["stored", "norms alone"])
@pytest.mark.parametrize("bias", [False, True])
def test_arguments_of_a_call(bias: bool, stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By place, as the extension takes them; the plan of a shape is made once."""
    B, T, I, O = 3, 5, 8, 16
    x, dy = torch.zeros(T, B, I).transpose(0, 1), torch.zeros(B, T, O)
    dw = torch.zeros(O, I) if stored else None
    db = torch.zeros(O) if bias and stored else None
    rows = torch.zeros(1 + bias, B + 7)[:, : B + 2]
    made: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []

    class Recorded:
        workspace = 640

        def __init__(self, kernel: str, **arguments: Any) -> None:
            made.append(dict(arguments, kernel=kernel))

        def __call__(self, *arguments: Any) -> None:
            calls.append(dict(zip(CALL, arguments, strict=True)))

    monkeypatch.setattr(extension, "ELEMENTS", {torch.float32: "bfloat16"})
    monkeypatch.setattr(extension, "_module", lambda: SimpleNamespace(LinearWgrad=Recorded))
    monkeypatch.setattr(extension, "cuda_stream", lambda device: 77)
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    extension._planned.cache_clear()
    for _ in range(2):
        extension.linear_wgrad(x, dy, dw, db, rows, stored, "sm80")
    extension._planned.cache_clear()
    shape = dict(kernel="sm80", shape=(B, T, I, O), element="bfloat16")
    shape["output"] = "float32" if stored else "none"
    assert made == [dict(shape, bias=bias, processors=132, device=-1)]
    call = dict(calls[-1])
    assert call.pop("workspace") % 16 == 0
    assert call == dict(
        x=x.data_ptr(),
        x_stride_b=I,
        x_stride_t=B * I,
        dy=dy.data_ptr(),
        dy_stride_b=T * O,
        dy_stride_t=O,
        dw=0 if dw is None else dw.data_ptr(),
        db=0 if db is None else db.data_ptr(),
        rows=rows.data_ptr(),
        row_stride=B + 7,
        add=stored,
        stream=77,
    )


TOKENS: dict[str, Any] = dict(x=1024, x_stride=8, dy=1024, dy_stride=8, shape=(2, 8, 8))
TOKENS |= dict(element="float16", product=1024, dy_sqnorm=1024, stream=0, device=0)

REFUSED_TOKENS = {
    "every size must be 1 to": dict(shape=(0, 8, 8)),
    r"shape must be \(B, I, O\)": dict(shape=(2, 8)),
    "x and dy must be bfloat16 or float16": dict(element="float32"),
    "product is a null pointer": dict(product=0),
}


@pytest.mark.parametrize("message", REFUSED_TOKENS)
def test_refused_tokens(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.token_sqnorms(**{**TOKENS, **REFUSED_TOKENS[message]})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cudaSetDevice: "):
            _C.token_sqnorms(**TOKENS)


FITS = {
    "contiguous": (lambda t: t, True),
    "sequence first": (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), True),
    "a slice of packed projections": (lambda t: t.repeat(1, 1, 3)[..., 16:32], True),
    "rows of 9": (lambda t: t[..., :9].contiguous(), False),
    "expanded": (lambda t: t[:1].expand(3, -1, -1), False),
    "every second feature": (lambda t: t[..., ::2], False),
    "unaligned": (lambda t: t.repeat(1, 1, 2)[..., 4:20], False),
    "empty": (lambda t: t[:, :0], False),
    "float32": (lambda t: t.float(), False),
}


@pytest.mark.parametrize(("view", "wanted"), FITS.values(), ids=FITS.keys())
def test_fits(view: Any, wanted: bool) -> None:
    assert extension.fits(view(torch.randn(3, 5, 16).bfloat16())) is wanted
