# SPDX-License-Identifier: Apache-2.0
"""``gnsfast.functional.attention`` by plain PyTorch, and by the Triton kernels: outputs and
gradients of a softmax written out in float64, and the norms of its single samples.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gnsfast.functional import attention

LEARNED = ("sinks", "logit_scale", "q_gain", "k_gain")


def unseen(T: int, S: int, options: dict[str, Any]) -> Tensor:
    """[T, S], pair by pair."""
    window, cu = options.get("window"), options.get("cu_seqlens")
    starts = [] if cu is None else cu.tolist()

    def is_unseen(t: int, s: int) -> bool:
        later = bool(options.get("is_causal")) and s > t
        far = window is not None and abs(t - s) >= window
        return later or far or any((start > t) != (start > s) for start in starts)

    rows = [[is_unseen(t, s) for s in range(S)] for t in range(T)]
    return torch.tensor(rows, dtype=torch.bool).reshape(T, S)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, learned: Any, **options: Any) -> Tensor:
    """Written out, with every logit in memory."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    scale, mask = options.get("scale"), options.get("attn_mask")
    q, k = q * learned.get("q_gain", 1.0), k * learned.get("k_gain", 1.0)
    k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
    logits = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)
    if "logit_scale" in learned:
        logits = logits * learned["logit_scale"][:, None, None]
    logits = logits.masked_fill(unseen(T, S, options), -torch.inf)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -torch.inf) if boolean else logits + mask
    sinks = learned.get("sinks", torch.full((H,), -torch.inf, dtype=logits.dtype))
    logits = torch.cat([logits, sinks[None, :, None, None].expand(B, H, T, 1)], dim=3)
    nothing = (logits == -torch.inf).all(3, keepdim=True)
    weights = logits.masked_fill(nothing, 0.0).softmax(3).masked_fill(nothing, 0.0)
    return weights[..., :-1] @ v


def draw(
    B: int, H: int, K: int, T: int, S: int, D: int, learned: Any, device: str, seed: int = 0
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v as projections give them, token by token, and parameters far from doing nothing."""
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(B, n, h, D, device=device).transpose(1, 2).detach().requires_grad_()
        for h, n in ((H, T), (K, S), (K, S))
    )
    sizes = {"sinks": H, "logit_scale": H, "q_gain": D, "k_gain": D}
    parameters = {
        n: (torch.randn(sizes[n], device=device).abs() + 0.3).requires_grad_() for n in learned
    }
    return [q, k, v], parameters


def single_samples(
    inputs: list[Tensor], options: dict[str, Any], samples: int
) -> list[tuple[list[Tensor], dict[str, Any], Any]]:
    """Each sample's own inputs and options, and where it lies: its rows, or its document."""
    cu = options.get("cu_seqlens")
    if cu is not None:
        alone = {n: o for n, o in options.items() if n not in ("cu_seqlens", "max_seqlen")}
        places: list[Any] = [
            (slice(None), slice(None), slice(a, b)) for a, b in zip(cu.tolist(), cu.tolist()[1:])
        ]
        return [([t[place] for t in inputs], alone, place) for place in places]
    each, mask = len(inputs[0]) // samples, options.get("attn_mask")
    found = []
    for b in range(samples):
        rows = slice(b * each, (b + 1) * each)
        own = mask[rows] if mask is not None and mask.ndim == 4 else mask
        found.append(([t[rows] for t in inputs], {**options, "attn_mask": own}, rows))
    return found


def assert_attention(
    inputs: list[Tensor], parameters: dict[str, Tensor], samples: int, **options: Any
) -> None:
    """Output, every gradient, and each sample's norms, against float64."""
    device = inputs[0].device
    r = torch.randn_like(inputs[0])
    probe = torch.zeros(len(parameters), samples + 2, device=device, requires_grad=True)
    on = {n: o.to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
    y = attention(*inputs, **parameters, **on, probe=probe)
    (y * r).sum().backward()

    wide = [t.detach().double().cpu().requires_grad_() for t in inputs]
    named = {n: p.detach().double().cpu().requires_grad_() for n, p in parameters.items()}
    r = r.double().cpu()
    want = torch.zeros(len(named), samples, dtype=torch.float64)
    whole = torch.zeros_like(r)
    for b, (own, alone, place) in enumerate(single_samples(wide, options, samples)):
        out = softmax_attention(*own, named, **alone)
        whole[place] = out.detach()
        loss = (out * r[place]).sum()
        grads = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        want[:, b] = torch.stack([g.square().sum() for g in grads])
        loss.backward()
    torch.testing.assert_close(y.double().cpu(), whole, rtol=1e-5, atol=1e-5)
    for t, w in zip([*inputs, *parameters.values()], [*wide, *named.values()]):
        assert t.grad is not None and w.grad is not None
        near = dict(rtol=1e-4, atol=1e-5 * w.grad.abs().max().item())
        torch.testing.assert_close(t.grad.double().cpu(), w.grad, **near)
    assert probe.grad is not None
    for row, norms_B, p in zip(probe.grad.double().cpu(), want, named.values()):
        assert p.grad is not None
        near = dict(rtol=1e-4, atol=1e-5 * norms_B.max().item())
        torch.testing.assert_close(row[:samples], norms_B, **near)
        torch.testing.assert_close(row[samples], p.grad.square().sum(), **near)
        assert row[-1] == 1.0


def some_seen() -> Tensor:
    mask = torch.rand(3, 1, 9, 9) < 0.7
    mask[0, 0, 2] = False  # a query that sees nothing
    return mask


def nearly_unseen() -> Tensor:
    """As Hugging Face masks: a query whose keys all have such a number sees all of them alike."""
    mask = torch.zeros(3, 1, 9, 9)
    mask[0, 0, 2], mask[1, 0, :, 3:] = torch.finfo(torch.float32).min, -1e9
    return mask


PATTERNS: dict[str, Any] = {
    "all": dict,
    "causal": lambda: dict(is_causal=True),
    "window": lambda: dict(window=3),
    "causal window": lambda: dict(is_causal=True, window=4, scale=0.7),
    "bool mask": lambda: dict(attn_mask=some_seen()),
    "float mask": lambda: dict(attn_mask=torch.randn(3, 4, 9, 9)),
    "padding of large numbers": lambda: dict(attn_mask=nearly_unseen()),
    "mask that broadcasts": lambda: dict(attn_mask=torch.randn(9, 9), is_causal=True),
}


@pytest.mark.parametrize("learned", [LEARNED, *((n,) for n in LEARNED)], ids="-".join)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str, learned: Any, device: str) -> None:
    inputs, parameters = draw(3, 4, 2, 9, 9, 16, learned, device)
    assert_attention(inputs, parameters, 3, **PATTERNS[pattern]())


SHAPES = {
    "cross": (2, 2, 2, 5, 11, 32),
    "one key head": (2, 6, 1, 8, 8, 16),
    "one query": (3, 2, 1, 1, 7, 16),
    "head dim of 40": (2, 2, 2, 7, 7, 40),
    "one sample": (1, 2, 2, 6, 6, 16),
    "several blocks": (2, 2, 1, 150, 150, 64),
    "wide heads": (2, 2, 1, 40, 40, 160),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(shape: tuple[int, int, int, int, int, int], device: str) -> None:
    inputs, parameters = draw(*shape, LEARNED, device)
    window = 70 if shape[3] > 70 else None
    assert_attention(inputs, parameters, shape[0], is_causal=shape[3] == shape[4], window=window)


def test_rows_are_folded(device: str) -> None:
    inputs, parameters = draw(6, 2, 2, 5, 5, 16, LEARNED, device)
    assert_attention(inputs, parameters, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("options", [{}, dict(is_causal=True, window=3)], ids=["all", "window"])
@pytest.mark.parametrize("longest", [None, 7])
def test_documents(
    longest: int | None, options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    """Of odd lengths, one empty."""
    inputs, parameters = draw(1, 4, 2, 13, 13, 16, LEARNED, device)
    cu_seqlens = torch.tensor([0, 5, 5, 6, 13], dtype=dtype)
    options = {**options, "max_seqlen": longest}
    assert_attention(inputs, parameters, 4, cu_seqlens=cu_seqlens, **options)


def test_tokens_of_no_document(device: str) -> None:
    """Before the first, and behind the last."""
    inputs, parameters = draw(1, 2, 2, 9, 9, 16, LEARNED, device)
    probe = torch.zeros(4, 2 + 2, device=device, requires_grad=True)
    cu_seqlens = torch.tensor([2, 4, 7], device=device)
    y = attention(*inputs, **parameters, cu_seqlens=cu_seqlens, probe=probe)
    y.sum().backward()
    for t in (y, *(t.grad for t in inputs)):
        assert t is not None and not t[:, :, :2].any() and not t[:, :, 7:].any()
    learned = {n: p.detach() for n, p in parameters.items()}
    for span in (slice(2, 4), slice(4, 7)):
        alone = attention(*(t[:, :, span].detach() for t in inputs), **learned)
        torch.testing.assert_close(y[:, :, span], alone)
    assert probe.grad is not None and bool(probe.grad.isfinite().all())


@pytest.mark.second
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half(dtype: torch.dtype, device: str) -> None:
    """Each parameter's worst sample of twenty no further from float64 than twice plain torch's."""
    ours, theirs = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for seed in range(5):
        inputs, parameters = draw(4, 4, 2, 40, 40, 32, LEARNED, device, seed)
        narrow = [t.detach().to(dtype).requires_grad_() for t in inputs]
        probe = torch.zeros(4, 4 + 2, device=device, requires_grad=True)
        r = torch.randn(4, 4, 40, 32).to(device, dtype)
        (attention(*narrow, **parameters, is_causal=True, probe=probe) * r).sum().backward()

        def loop(
            at: torch.dtype, narrow: Any = narrow, parameters: Any = parameters, r: Tensor = r
        ) -> Tensor:
            ps = {n: p.detach().cpu().to(at).requires_grad_() for n, p in parameters.items()}
            norms = torch.zeros(4, 4, dtype=torch.float64)
            for b in range(4):
                own = (t[b : b + 1].detach().cpu().to(at) for t in narrow)
                out = softmax_attention(*own, ps, is_causal=True)
                grads = torch.autograd.grad((out * r[b].cpu().to(at)).sum(), list(ps.values()))
                norms[:, b] = torch.stack([g.double().square().sum() for g in grads])
            return norms

        exact, plain = loop(torch.float64), loop(dtype)
        assert probe.grad is not None
        found = probe.grad[:, :4].double().cpu()
        ours = torch.maximum(ours, ((found - exact).abs() / exact).amax(1))
        theirs = torch.maximum(theirs, ((plain - exact).abs() / exact).amax(1))
    assert bool((ours <= 2 * theirs).all()), (ours, theirs)


def test_without_parameters_it_is_torchs(device: str) -> None:
    (q, k, v), _ = draw(2, 4, 2, 9, 9, 16, (), device)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, is_causal=True), want)
    seen = torch.ones(9, 9, dtype=torch.bool, device=device).tril().triu(-3)
    want = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, is_causal=True, window=4), want)


@pytest.mark.parametrize("learned", [(), LEARNED], ids=["none", "all"])
def test_without_a_probe(learned: Any, device: str) -> None:
    """An ordinary function with an ordinary backward pass."""
    inputs, parameters = draw(2, 2, 2, 6, 6, 16, learned, device)
    leaves = [*inputs, *parameters.values()]
    grads = torch.autograd.grad(attention(*inputs, **parameters, window=3).square().sum(), leaves)
    wide = [t.detach().double().cpu().requires_grad_() for t in leaves]
    named = dict(zip(parameters, wide[3:]))
    y = softmax_attention(*wide[:3], named, window=3)
    for ours, theirs in zip(grads, torch.autograd.grad(y.square().sum(), wide)):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=1e-4, atol=1e-4)


def test_unlimited_window(device: str) -> None:
    inputs, parameters = draw(2, 2, 2, 6, 6, 16, LEARNED, device)
    for is_causal in (False, True):
        far = attention(*inputs, **parameters, is_causal=is_causal, window=2**31 - 1)
        torch.testing.assert_close(far, attention(*inputs, **parameters, is_causal=is_causal))


def test_sinks_of_nothing(device: str) -> None:
    """A sink of -inf is none, also where nothing is seen."""
    inputs, _ = draw(2, 2, 2, 4, 4, 16, (), device)
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    mask[0] = False
    sinks = torch.full((2,), -torch.inf, device=device)
    y = attention(*inputs, sinks=sinks, attn_mask=mask)
    torch.testing.assert_close(y[:, :, 1:], attention(*inputs, attn_mask=mask)[:, :, 1:])
    assert not y[:, :, 0].any()
    for g in torch.autograd.grad(y.sum(), inputs):
        assert bool(g.isfinite().all())


def test_large_logits(device: str) -> None:
    """The gradient of a logit scale at logits of hundreds, no worse than twice plain torch."""
    (q, k, v), parameters = draw(3, 2, 2, 32, 32, 32, ("logit_scale",), device)
    with torch.no_grad():
        parameters["logit_scale"].mul_(40)
    probe = torch.zeros(1, 3 + 2, device=device, requires_grad=True)
    attention(q, k, v, **parameters, probe=probe).square().sum().backward()
    found = {}
    for dtype in (torch.float32, torch.float64):
        own = {"logit_scale": parameters["logit_scale"].detach().cpu().to(dtype).requires_grad_()}
        norms = torch.zeros(3, dtype=torch.float64)
        for b in range(3):
            y = softmax_attention(*(t[b : b + 1].detach().cpu().to(dtype) for t in (q, k, v)), own)
            (g,) = torch.autograd.grad(y.square().sum(), list(own.values()))
            norms[b] = g.double().square().sum()
        found[dtype] = norms
    exact = found[torch.float64]
    assert probe.grad is not None
    ours = ((probe.grad[0, :3].double().cpu() - exact) / exact).abs().max()
    assert ours <= 2 * ((found[torch.float32] - exact) / exact).abs().max() + 1e-4


def test_frozen_parameters_have_no_row(device: str) -> None:
    inputs, parameters = draw(3, 2, 2, 5, 5, 16, LEARNED, device)
    parameters["sinks"].requires_grad_(False)
    parameters["q_gain"].requires_grad_(False)
    probe = torch.zeros(2, 3 + 2, device=device, requires_grad=True)
    attention(*inputs, **parameters, probe=probe).sum().backward()
    assert probe.grad is not None
    for row, name in zip(probe.grad, ("logit_scale", "k_gain")):
        g = parameters[name].grad
        assert g is not None
        torch.testing.assert_close(row[3], g.square().sum())


def test_empty(device: str) -> None:
    for shape in ((0, 2, 2, 5, 5, 16), (2, 2, 2, 0, 0, 16)):
        inputs, parameters = draw(*shape, LEARNED, device)
        probe = torch.zeros(4, shape[0] + 2, device=device, requires_grad=True)
        y = attention(*inputs, **parameters, probe=probe)
        y.sum().backward()
        assert y.shape == inputs[0].shape and probe.grad is not None
        assert not probe.grad[:, :-1].any()


@pytest.mark.parametrize("learned", [LEARNED, ("sinks",)], ids="-".join)
def test_compiled(learned: Any, device: str) -> None:
    inputs, parameters = draw(3, 2, 2, 6, 6, 16, learned, device)

    def run(*tensors: Tensor) -> Tensor:
        *ins, probe = tensors
        return attention(*ins, **parameters, is_causal=True, window=4, probe=probe).square().sum()

    grads = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        probe = torch.zeros(len(learned), 3 + 2, device=device, requires_grad=True)
        leaves = [*inputs, *parameters.values(), probe]
        grads.append(torch.autograd.grad(function(*inputs, probe), leaves))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b)


def test_operators_are_well_formed(device: str) -> None:
    inputs, parameters = draw(3, 4, 2, 6, 6, 16, LEARNED, device)
    q, k, v = (t.detach() for t in inputs)
    ps = [p.detach() for p in parameters.values()]
    rest = (None, None, True, 0.25, 4, 0)
    forward, backward = torch.ops.gnsfast.attention_forward, torch.ops.gnsfast.attention_backward
    torch.library.opcheck(forward, (q, k, v, *ps, *rest))
    o, highest, inverse = forward(q, k, v, *ps, *rest)
    wanted = [True, False, True, True]
    torch.library.opcheck(backward, (o, q, k, v, o, highest, inverse, *ps, *rest, 3, wanted))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "k": (dict(k=torch.zeros(2, 2, 5, 8)), "the same head dimension"),
    "heads": (dict(k=torch.zeros(2, 3, 5, 16)), "multiple of the key heads"),
    "v": (dict(v=torch.zeros(2, 2, 4, 16)), "k and v"),
    "sinks": (dict(sinks=torch.zeros(2)), r"sinks must have shape \[4\]"),
    "q_gain": (dict(q_gain=torch.zeros(4)), r"q_gain must have shape \[16\]"),
    "window": (dict(window=0), "at least 1"),
    "mask": (dict(attn_mask=torch.zeros(5, 4)), "cannot be broadcast"),
    "mask's type": (dict(attn_mask=torch.ones(5, 5, dtype=torch.int64)), "must be bool"),
    "mask's gradient": (
        dict(attn_mask=torch.zeros(5, 5, requires_grad=True)),
        "does not compute one",
    ),
    "documents": (dict(cu_seqlens=torch.tensor([0, 5])), "one packed row"),
    "max_seqlen": (dict(max_seqlen=4), "so it needs cu_seqlens"),
    "a probe of nothing": (dict(probe=torch.zeros(3, 5)), r"probe must be float32 \[0, B"),
    "probe": (dict(sinks=torch.zeros(4, requires_grad=True), probe=torch.zeros(1, 5)), "3 samples"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(changes: dict[str, Any], message: str) -> None:
    k = changes.get("k", torch.zeros(2, 2, 5, 16))
    arguments: dict[str, Any] = {"q": torch.zeros(2, 4, 5, 16), "k": k, "v": k, **changes}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)
