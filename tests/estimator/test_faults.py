# SPDX-License-Identifier: Apache-2.0
"""An error in any function of gnsfast that a measured update reaches: training goes on with the
bits of plain torch, the update is dropped, and the next one is measured.
"""

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import gnsfast

PACKAGE = str(Path(gnsfast.__file__).parent)
B, T, V = 3, 4, 7


class Fault(Exception):
    """An error that a function of gnsfast never expects."""


class Everything(nn.Module):
    """Kernels, expressions of parameters, element-wise uses, a replayed function, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(V, 8), nn.LayerNorm(8)
        self.conv, self.lstm = nn.Conv1d(8, 8, 3, padding=1), nn.LSTM(8, 8, batch_first=True)
        self.gain, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, V)
        self.hidden = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids)) * (1 + self.gain)
        x = x + self.conv(x.mT).mT
        x = x + checkpoint(lambda t: torch.tanh(self.hidden(t)), x, use_reentrant=False)
        x, _ = self.lstm(x)
        logits: Tensor = self.head(x)
        return logits


def passes(model: nn.Module, batches: list[Tensor], gns: Any = None) -> list[Tensor]:
    """The losses and gradients of an update, which an estimator measures."""
    losses = []
    model.zero_grad()
    with nothing() if gns is None else gns.update():
        for ids in batches:
            with nothing() if gns is None else gns.microbatch(B, scale=1 / len(batches)):
                loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / len(batches)
                loss.backward()
            losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


@contextmanager
def nothing() -> Iterator[None]:
    yield


def called(run: Callable[[], object]) -> list[CodeType]:
    """The functions of gnsfast that a run calls, in the order of their first calls, but those that
    only a checkpoint calls when it runs its forward again: torch wants that to be as it was.
    """
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_name != "recompute_fn":
            caller = caller.f_back
        if caller is None:
            codes[frame.f_code] = None

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [*codes]


@contextmanager
def failing(code: CodeType) -> Iterator[list[str]]:
    """The function raises when it is called for the first time. Yields its name when it has."""
    raised: list[str] = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code is code and not raised:
            raised.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)
            raise Fault("planted")

    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(None)


KEEPERS = "estimator.py", "estimator/errors.py", "estimator/budget.py", "guard.py", "eager.py"
"""What keeps training going: it is short, and has tests of its own."""

ENTRIES = {
    *("Tracked.__torch_function__", "dispatch", "backward_pass.<locals>.run"),
    *("_arriving", "_arrived", "Hook.__call__", "BatchHook._show", "expression_of"),
    *("_Beside.backward", "_Replayed.backward", "_Replaced._install.<locals>.call"),
}
"""Where errors are taken."""


def sites(run: Callable[[], object]) -> list[CodeType]:
    """The functions that a measured update calls, but those that keep training going."""
    ours = [c for c in called(run) if not c.co_filename.endswith(KEEPERS)]
    return [c for c in ours if c.co_qualname not in ENTRIES and not c.co_name.startswith("<")]


@pytest.mark.parametrize("moment", ["the first update", "a later update", "compute"])
def test_each_function(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "gnsfast")
    torch.manual_seed(0)
    first = Everything()
    batches = [torch.randint(V, (B, T)) for _ in range(2)]
    plain = passes(copy.deepcopy(first), batches)

    def begun() -> tuple[nn.Module, Any]:
        model = copy.deepcopy(first)
        gns = gnsfast.GradientNoiseScale(model, gradients="torch", on_error="skip")
        if moment != "the first update":
            passes(model, batches, gns)
        return model, gns

    def run(model: nn.Module, gns: Any) -> list[Tensor]:
        if moment == "compute":
            gns.compute()
            return plain
        return passes(model, batches, gns)

    start = begun()
    of_all = sites(lambda: run(*start))
    assert len(of_all) > (20 if moment == "compute" else 120)
    wrong = {}
    for code in of_all:
        model, gns = begun()
        try:
            with failing(code) as raised:
                results = run(model, gns)
            if raised and not all(map(torch.equal, results, plain)):
                wrong[code.co_qualname] = "other bits"
            passes(model, batches, gns)
            if raised and not gns.compute().updates:
                wrong[code.co_qualname] = "measures no more"
        except (Fault, CheckpointError) as error:
            wrong[code.co_qualname] = f"ends the run: {type(error).__name__}"
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


@pytest.mark.parametrize("gradients", ["torch", "fused"])
def test_a_checkpoint_that_ends_in_a_layer(gradients: str) -> None:
    """Its second forward ends early, inside of the layer, by an exception that is no error."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), torch.randn(B, 5)
    losses = []
    for measured in (copy.deepcopy(model), None):
        net = measured or model
        gns = gnsfast.GradientNoiseScale(net, gradients=gradients, on_error="skip")
        for _ in range(6):
            net.zero_grad()
            with gns.update(B) if measured else nullcontext():
                y = checkpoint(net, x, use_reentrant=False)
                loss = y.square().sum(1).mean()
                loss.backward()
        losses.append([loss.detach(), *(p.grad for p in net.parameters())])
        if measured:
            assert gns.compute().updates == 6 and gns.compute().errors == 0
    for a, b in zip(*losses):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drop", ["an error", "discard"])
@pytest.mark.parametrize("gradients", ["torch", "fused"])
def test_dropped_before_a_checkpoint_runs_again(gradients: str, drop: str) -> None:
    """As where a callback's error comes after the forward pass: the pass ends as it has begun."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), torch.randn(B, 5)
    real = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    gns = gnsfast.GradientNoiseScale(model, gradients=gradients, on_error="skip")
    for k in range(3):
        model.zero_grad()
        with gns.update(B):
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            if k == 1 and drop == "an error":
                with gns.dropping_errors():
                    raise Fault
            if k == 1 and drop == "discard":
                gns.discard()
            loss.backward()
        for p, g in zip(model.parameters(), real):
            torch.testing.assert_close(p.grad, g)
    result = gns.compute()
    assert (result.updates, result.errors) == (2, drop == "an error")


def test_inference_and_initial_values_in_a_block() -> None:
    """Tensors of inference mode count no writes, and initial values are drawn once."""
    model = nn.Linear(4, 2)
    gns = gnsfast.GradientNoiseScale(model, gradients="torch", on_error="skip")
    drawn = []
    for measured in (False, True):
        torch.manual_seed(0)
        with gns.update(B) if measured else nullcontext():
            nn.init.normal_(model.weight)
            drawn.append(torch.rand(2))
            model(torch.randn(B, 4)).sum().backward()
            with torch.inference_mode():
                model(torch.randn(B, 4)).add(model.bias)
        model.zero_grad()
    assert torch.equal(*drawn)
    assert (gns.compute().updates, gns.compute().errors) == (1, 0)


def test_errors_of_the_user_in_measured_updates() -> None:
    """As where memory is short for them alone: a run that skips them meets few."""
    model = nn.Linear(4, 2)
    gns = gnsfast.GradientNoiseScale(model, budget=0.1, gradients="torch", on_error="skip")
    broken = 0
    for _ in range(200):
        try:
            with gns.update(B):
                model(torch.randn(B, 4)).sum().backward()
                if gns._is_due:
                    raise MemoryError
        except MemoryError:
            broken += 1
    assert 1 < broken < 20
