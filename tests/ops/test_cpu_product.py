# SPDX-License-Identifier: Apache-2.0
"""The choice between the CPU kernel's product of all tokens and torch's."""

import time
from typing import Any

import pytest
import torch
from cpu_cases import assert_agrees, linear
from torch import Tensor

from gnsfast.ops import cpu, cpu_product

pytestmark = pytest.mark.skipif(bool(cpu.missing()), reason=cpu.missing() or "the kernel is there")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, in which deterministic algorithms are off; every product is large."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.delenv(cpu_product.VARIABLE, raising=False)
    monkeypatch.setattr(cpu_product, "_probed", {})
    monkeypatch.setattr(cpu_product, "LARGE", 0)


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    of_way = getattr(cpu, name)

    def later(*args: Any, **named: Any) -> None:
        time.sleep(0.02)
        of_way(*args, **named)

    monkeypatch.setattr(cpu, name, later)


@pytest.mark.parametrize("name", cpu_product.NAMES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("T", [1, 5])
def test_both_are_right(
    T: int, bias: bool, transposed: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cpu_product.VARIABLE, name)
    monkeypatch.setattr(cpu, "takes_gram", lambda *_: T > 1)
    seen: list[Tensor] = []
    by_torch = cpu._by_torch
    monkeypatch.setattr(cpu, "_by_torch", lambda wgrad: seen.append(wgrad.dw_MN) or by_torch(wgrad))
    a = linear(torch.randn(40, T, 70), torch.randn(40, T, 45), bias, transposed)
    _, _, rows = assert_agrees(a)
    assert len(seen) == (name == "torch")
    assert len(rows) == 1 + bias


@pytest.mark.parametrize(("slower", "name"), [("_tiles", "torch"), ("_by_torch", "gnsfast")])
def test_the_faster_one_is_taken(slower: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, slower)
    taken = cpu.product()
    assert taken.name == name and "a probe took" in taken.why


def test_it_is_probed_once_and_only_for_short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = []
    probe = cpu_product.probe
    monkeypatch.setattr(cpu_product, "probe", lambda ways: probes.append(1) or probe(ways))
    cpu.linear_wgrad(linear(torch.randn(2, 300, 70), torch.randn(2, 300, 45)))
    cpu.linear_wgrad(linear(torch.randn(9, 1, 70).bfloat16(), torch.randn(9, 1, 45).bfloat16()))
    monkeypatch.setattr(cpu_product, "LARGE", 9 * 70 * 45 + 1)
    short = linear(torch.randn(9, 1, 70), torch.randn(9, 1, 45))
    cpu.linear_wgrad(short)
    assert not probes
    monkeypatch.setattr(cpu_product, "LARGE", 9 * 70 * 45)
    for _ in range(2):
        cpu.linear_wgrad(short)
    assert len(probes) == 1


def test_what_fixes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe would raise here."""
    monkeypatch.setattr(cpu_product, "probe", None)
    for name in cpu_product.NAMES:
        monkeypatch.setenv(cpu_product.VARIABLE, name)
        assert cpu.product() == (name, "GNSFAST_CPU_PRODUCT is set")
    monkeypatch.setenv(cpu_product.VARIABLE, "mkl")
    with pytest.raises(ValueError, match="must be one of gnsfast, torch, or not set"):
        cpu.product()
    monkeypatch.delenv(cpu_product.VARIABLE)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert cpu.product() == ("gnsfast", "torch multiplies float32 in a lower precision")
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert cpu.product() == ("gnsfast", "torch.use_deterministic_algorithms is on")
