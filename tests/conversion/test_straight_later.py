# SPDX-License-Identifier: Apache-2.0
"""Layers that give what a kernel gives in a trial: arguments that a trial must show, and attributes
that change after ``convert``, which is an error.
"""

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gnsfast
from gnsfast.conversion import recognition
from gnsfast.conversion.recognition import recognised

B, T, D = 3, 6, 8
NARROW = torch.float32
ONCE = nn.Identity()
EPS = torch.tensor(1e-5)


class OfPadding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, padding_idx=0)


class OfLongRows(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, max_norm=5.0)


class OfFrequency(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, scale_grad_by_freq=True)


class OfSparse(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, sparse=True)


@pytest.mark.parametrize("rows", [3, 50, 50257])
@pytest.mark.parametrize("cls", [OfPadding, OfLongRows, OfFrequency, OfSparse])
def test_arguments_of_embeddings(cls: Any, rows: int) -> None:
    assert recognised(cls(rows, 4)) is None


class RMS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps, self.norm_type, self.bias = (
            nn.Parameter(torch.ones(D)),
            1e-5,
            1.0,
            0.0,
        )

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight * self.norm_type + self.bias


class OfSizes(RMS):
    def forward(self, x: Tensor) -> Tensor:
        _, t, *_ = x.shape
        return self._norm(x) * self.weight * (t / 3)


class OfErrors(RMS):
    def forward(self, x: Tensor) -> Tensor:
        try:
            y = self._norm(x) * self.weight
        except:  # noqa: E722
            y = x * self.weight
        return y


class OfTorchsName(RMS):
    def hardtanh(self, x: Tensor) -> Tensor:
        return self._norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh(self.hardtanh(x), -20, 20) * self.weight


class OfGlobalDtype(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.to(NARROW)).type_as(x) * self.weight


class OfGlobalModule(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return ONCE(self._norm(x)) * self.weight


class OfGlobalTensor(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weight


class OfTensor(RMS):
    def __init__(self) -> None:
        super().__init__()
        del self.eps
        self.register_buffer("eps", torch.tensor(1e-5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()


class OfLambda(RMS):
    """A module must go through pickle, and a lambda does not."""

    _norm = lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


GLOBALS = [OfGlobalDtype, OfGlobalModule, OfGlobalTensor]


@pytest.mark.parametrize("cls", [OfSizes, OfErrors, OfTorchsName, OfTensor, OfLambda, *GLOBALS])
def test_code_that_a_trial_does_not_show(cls: Any) -> None:
    assert recognised(cls()) is None


class Float32Head(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(enabled=False, device_type=x.device.type):
            return F.linear(x, self.weight, self.bias)


def test_a_head_without_autocast() -> None:
    assert recognised(Float32Head(4, 3)) is None
    model = gnsfast.convert(nn.Sequential(Float32Head(4, 3)))
    with torch.autocast("cpu", torch.bfloat16), gnsfast.per_sample_sqnorms(model, B):
        y = model(torch.randn(B, 4))
        y.sum().backward()
    assert y.dtype == torch.float32


class OwnEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight)


CHANGES: list[tuple[str, Any]] = [
    *(("eps", each) for each in (1, 0, 1e-2, None, torch.tensor(1e-2))),
    *(("bias", 0.5), ("norm_type", 3.0), ("_norm", lambda x: 2 * x)),
]


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_change_of_a_norm_is_an_error(name: str, value: Any) -> None:
    assert recognised(RMS()) is not None
    model = gnsfast.convert(nn.Sequential(RMS()))
    x = torch.randn(B, T, D)
    again = pickle.loads(pickle.dumps(model))
    with gnsfast.per_sample_sqnorms(again, B):
        again(x).sum().backward()
    setattr(model[0], name, value)
    with (
        pytest.raises(gnsfast.ObservationError, match=rf"0 \(RMS\): {name} is .*convert\(model\)"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(x)


def test_a_method_of_the_class_that_changes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gnsfast.convert(nn.Sequential(RMS()))
    monkeypatch.setattr(RMS, "_norm", lambda self, x: 2 * x)
    with (
        pytest.raises(gnsfast.ObservationError, match="_norm is "),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(torch.randn(B, T, D))


@pytest.mark.parametrize(("name", "value"), [("padding_idx", 0), ("max_norm", 1.0)])
def test_a_change_of_an_embedding_is_an_error(name: str, value: float) -> None:
    assert recognised(OwnEmbedding(9, D)) is not None
    model = gnsfast.convert(nn.Sequential(OwnEmbedding(9, D)))
    setattr(model[0], name, value)
    with (
        pytest.raises(gnsfast.ObservationError, match=f"{name} is {value}"),
        gnsfast.per_sample_sqnorms(model, B),
    ):
        model(torch.zeros(B, T).long())


class Scaled(nn.Module):
    def __init__(self, width: int, by: float) -> None:
        super().__init__()
        self.weight, self.by, self.eps = nn.Parameter(torch.ones(width)), by, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        if self.by == 1:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, 2 * self.weight, self.eps)


def test_modules_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, by_trial = [], recognition._by_trial

    def counted(module: Any, *args: Any) -> Any:
        tried.append((module.by, len(module.weight)))
        return by_trial(module, *args)

    monkeypatch.setattr(recognition, "_by_trial", counted)
    norms = [Scaled(D, 1), Scaled(D, 2), Scaled(D, 1), Scaled(D, 2), Scaled(4, 1)]
    model = gnsfast.convert(nn.ModuleList(norms))
    assert tried == [(1, D), (2, D), (1, 4)]
    routes = [row.route for row in gnsfast.coverage(model).rows]
    assert routes == ["rms_norm", "replay", "rms_norm", "replay", "rms_norm"]
