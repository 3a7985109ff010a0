# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks and their per-sample norms, forward and backward, beside torch's: without
the sinks by ``F.scaled_dot_product_attention``, with them by ``flex_attention``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from benchmarks import measure
from benchmarks.gpu import operators
from benchmarks.record import Growing, Tables
from gnsfast.functional import attention


@dataclass(frozen=True)
class AttentionCase:
    """The named model's heads; causal, within a window if there is one."""

    model: str
    B: int
    H: int
    K: int
    T: int
    D: int
    window: int | None = None

    @property
    def name(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"{self.model} {self.H}/{self.K}x{self.D}, T={self.T}{window}"


CASES = [
    AttentionCase("GPT-2", 16, 12, 12, 1024, 64),
    AttentionCase("gpt-oss", 2, 64, 8, 4096, 64),
    AttentionCase("gpt-oss", 2, 64, 8, 4096, 64, window=128),
    AttentionCase("Llama-8B", 2, 32, 8, 4096, 128),
    AttentionCase("Qwen3-8B", 1, 32, 8, 8192, 128),
]


def tensors(case: AttentionCase, device: str) -> list[Tensor]:
    """q, k, v, sinks, and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(case.B, case.T, h, case.D, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for h in (case.H, case.K, case.K)
    )
    leaves = [t.detach().requires_grad_() for t in (q, k, v, torch.randn(case.H, device=device))]
    return [*leaves, torch.randn_like(q)]


def forwards(case: AttentionCase, device: str) -> dict[str, Callable[..., Tensor]]:
    """Functions of q, k, v, sinks."""

    def sdpa(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, probe: Tensor | None = None) -> Tensor:
        return attention(q, k, v, is_causal=True, window=case.window, sinks=sinks, probe=probe)

    def seen(b: Any, h: Any, t: Tensor, s: Tensor) -> Tensor:
        near = t >= s
        return near & (t - s < case.window) if case.window else near

    block_mask = flex.create_block_mask(seen, None, None, case.T, case.T, device=device)
    compiled: Any = flex.flex_attention
    if device == "cuda":
        torch._dynamo.reset()  # or the next shape would be compiled as a dynamic one
        compiled = torch.compile(compiled, dynamic=False)

    def with_flex(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        o, lse = compiled(q, k, v, block_mask=block_mask, enable_gqa=True, return_lse=True)
        return o * torch.sigmoid(lse - sinks[:, None])[..., None].to(o.dtype)

    return {"sdpa": sdpa, "gnsfast": ours, "flex": with_flex}


def ways(case: AttentionCase, device: str) -> dict[str, Callable[[], object]]:
    """One forward and backward pass each; ``flex_attention`` has no backward pass on a CPU."""
    *leaves, do = tensors(case, device)
    probe = torch.zeros(1, case.B + 2, device=device, requires_grad=True)
    passes: dict[str, Callable[[], object]] = {}
    for name, forward in forwards(case, device).items():
        if name == "flex" and device != "cuda":
            continue
        inputs = [*leaves, probe] if name == "gnsfast" else leaves
        passes[name] = partial(both, forward, inputs, inputs[:3] if name == "sdpa" else inputs, do)
    return passes


def both(
    forward: Callable[..., Tensor], inputs: list[Tensor], taken: list[Tensor], do: Tensor
) -> object:
    return torch.autograd.grad(forward(*inputs), taken, do)


def tables(device: str) -> Iterator[Tables]:
    return Growing().over("Attention", CASES, partial(row, device))


def row(device: str, case: AttentionCase) -> list[dict[str, Any]]:
    """Ratios to ``F.scaled_dot_product_attention``, which has no sinks and no window."""
    timings = measure.interleave(ways(case, device), operators.ROUNDS, operators.clock(device))
    about = {"attention with sinks, bf16, forward and backward": case.name, "B": case.B}
    about["sdpa ms"] = round(timings["sdpa"].milliseconds, 3)
    return [about | operators.ratios(timings)]
