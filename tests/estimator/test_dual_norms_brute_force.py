# SPDX-License-Identifier: Apache-2.0
"""Both dual norms at a frozen checkpoint against every sample's gradient of a whole data set, in
float64; ``python tests/estimator/test_dual_norms_brute_force.py 2048 4`` takes that many samples
and layers.
"""

import sys

import pytest
import torch
from torch import Tensor

import gnsfast
from examples import tiny_gpt

N, K = 16, 8  # samples and micro-batches of an update


def truth(model: torch.nn.Module, data: Tensor) -> dict[str, tuple[float, float]]:
    """σ and ‖G‖ in each norm, of samples drawn from ``data`` with replacement."""
    wide = tiny_gpt.TinyGPT(width=16, heads=2, layers=len(model.blocks)).double()
    wide.load_state_dict(model.state_dict())
    named = dict(wide.named_parameters())
    first = {n: torch.zeros_like(p) for n, p in named.items()}
    squares = {n: torch.zeros_like(p) for n, p in named.items()}
    grams: dict[str, Tensor] = {}
    for sample in data.split(1):
        grads = torch.autograd.grad(tiny_gpt.loss_of(wide, sample), [*named.values()])
        for name, g in zip(named, grads):
            first[name] += g / len(data)
            squares[name] += g.square() / len(data)
            if ".weight" in name and g.ndim == 2 and name.startswith("blocks"):
                grams[name] = grams.get(name, 0.0) + gram(g) / len(data)
    sigma = sum((squares[n] - first[n].square()).clamp(min=0).sqrt().sum() for n in named)
    norm = sum(g.abs().sum() for g in first.values())
    of_matrices = [
        torch.linalg.eigvalsh(grams[n] - gram(first[n])).clamp(min=0).sqrt().sum() for n in grams
    ]
    nuclear = sum(torch.linalg.svdvals(first[n]).sum() for n in grams)
    return {
        "sign": (float(sigma), float(norm)),
        "spectral": (float(sum(of_matrices)), float(nuclear)),
    }


def gram(g: Tensor) -> Tensor:
    return g @ g.mT if g.shape[0] <= g.shape[1] else g.mT @ g


def check(samples: int, layers: int, updates: int) -> None:
    torch.manual_seed(0)
    data = tiny_gpt.draw(tiny_gpt.read_text(), samples, torch.Generator().manual_seed(1))[:, :33]
    model = tiny_gpt.TinyGPT(width=16, heads=2, layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        tiny_gpt.loss_of(model, data[torch.randint(samples, (N,))]).backward()
        optimizer.step()
        optimizer.zero_grad()
    exact = truth(model, data)
    gns = gnsfast.GradientNoiseScale(model, metric=["sign", "spectral"], window=updates)
    for _ in range(updates):
        with gns.update():
            for _ in range(K):
                with gns.microbatch(N // K, scale=1 / K):
                    own = data[torch.randint(samples, (N // K,))]
                    (tiny_gpt.loss_of(model, own) / K).backward()
        model.zero_grad()
    found = gns.compute()
    for metric, (sigma, norm) in exact.items():
        scale = getattr(found, metric)
        print(f"{metric}: noise scale {(sigma / norm) ** 2:.3f}, measured {scale}")
        print(
            f"  σ {sigma:.5g}, {scale.noise:.5g}; ‖G‖ {norm:.5g}, {scale.grad_norm_lower:.5g} "
            f"to {scale.grad_norm_upper:.5g}"
        )
        # A root of a mean of few samples with heavy tails is too small: 4 % after 60 updates of
        # 16, 2 % after 256.
        assert -0.06 < scale.noise / sigma - 1 < 0.01
        assert 0 < scale.grad_norm_lower < norm < scale.grad_norm_upper
        assert scale.lower < (sigma / norm) ** 2 < scale.upper
        assert 0.5 < scale.noise_scale / (sigma / norm) ** 2 < 2.0


@pytest.mark.second
def test_frozen_checkpoint() -> None:
    check(samples=200, layers=1, updates=60)


if __name__ == "__main__":
    check(int(sys.argv[1]), int(sys.argv[2]), 256)
