# SPDX-License-Identifier: Apache-2.0
"""``functional.in_projection`` against torch's own products and single samples in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.functional import Plan, in_projection

B, T, E = 3, 5, 4
STARTS = torch.tensor([0, 4, 5, 11])
PLANS = {
    "batch first": Plan(),
    "sequence first": Plan(batch_dim=1),
    "documents": Plan(starts=STARTS),
}
SHAPES = {"batch first": (B, T), "sequence first": (T, B), "documents": (11,)}


def sample(t: Tensor, layout: str, b: int) -> Tensor:
    """The rows of sample ``b``."""
    if layout == "documents":
        return t[STARTS[b] : STARTS[b + 1]]
    return t.select(1 if layout == "sequence first" else 0, b)


@pytest.mark.parametrize("layout", PLANS)
@pytest.mark.parametrize("inputs", ["xxx", "qkk", "qkv"])
@pytest.mark.parametrize("packed", [True, False], ids=["one weight", "three weights"])
@pytest.mark.parametrize("frozen", ["", "bias", "key", "weights"])
def test_each_part_has_its_norms(frozen: str, packed: bool, inputs: str, layout: str) -> None:
    if frozen == "key" and packed:
        return
    widths = dict(zip("xqkv", (6, 6, 6, 6) if packed else (6, 6, 3, 2)))
    shape = SHAPES[layout]
    drawn = {n: torch.randn(*shape, widths[n], requires_grad=True) for n in dict.fromkeys(inputs)}
    xs = [drawn[name] for name in inputs]
    each = [torch.randn(E, x.shape[-1]) for x in xs]
    given = [torch.cat(each)] if packed else each
    needed = [frozen != "weights" and not (frozen == "key" and k == 1) for k in range(len(given))]
    weights = [w.requires_grad_(need) for w, need in zip(given, needed)]
    bias = torch.randn(3 * E, requires_grad=frozen != "bias")
    of_weights = 3 * needed[0] if packed else sum(needed)
    probe = torch.zeros(of_weights + 3 * bias.requires_grad, B + 2, requires_grad=True)
    weight = weights[0] if packed else tuple(weights)
    ours = in_projection(*xs, weight, bias, probe, PLANS[layout])
    parts = weights[0].chunk(3) if packed else weights
    torchs = [F.linear(x, w, b) for x, w, b in zip(xs, parts, bias.chunk(3))]
    dys = [torch.randn_like(y) for y in torchs]
    leaves = [t for t in (*drawn.values(), *weights, bias) if t.requires_grad]
    *found, rows = torch.autograd.grad(ours, [*leaves, probe], dys)
    for mine, want in zip((*ours, *found), (*torchs, *torch.autograd.grad(torchs, leaves, dys))):
        torch.testing.assert_close(mine, want)

    grads = []
    for k, (x, dy) in enumerate(zip(xs, dys)):
        if needed[0 if packed else k]:
            pairs = [(sample(x, layout, b), sample(dy, layout, b)) for b in range(B)]
            grads.append([dy_b.double().T @ x_b.double() for x_b, dy_b in pairs])
    if bias.requires_grad:
        grads += [[sample(dy, layout, b).double().sum(0) for b in range(B)] for dy in dys]
    for row, own in zip(rows, grads, strict=True):
        want = torch.stack([g.square().sum() for g in (*own, sum(own))])
        torch.testing.assert_close(row[: B + 1].double(), want, rtol=1e-5, atol=0)
        assert row[B + 1] == 1


def test_a_probe_of_another_shape() -> None:
    x, w = torch.randn(B, T, 6), torch.randn(3 * E, 6, requires_grad=True)
    with pytest.raises(ValueError, match=r"probe must be float32 \[3, B \+ 2\]"):
        in_projection(x, x, x, w, None, torch.zeros(1, B + 2))
