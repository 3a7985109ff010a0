# SPDX-License-Identifier: Apache-2.0
"""``gradients="torch"``: the norms of every sample, and training to the last bit as without us."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt_models import ModdedGPT, NanoChat, NanoGPT, learned
from gpt_models import tokens as gpt_tokens
from made import Made
from oracle import assert_norms, loop_sqnorms
from random_models import D as WIDTH
from random_models import RandomModel
from random_models import loss as random_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gnsfast

B, T, D, V = 4, 6, 8, 19


def of_ids(m: Any, ids: Tensor) -> Tensor:
    return m.head(torch.tanh(m.embedding(ids)))


def with_position(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.norm(m.embedding(ids) + m.position(torch.arange(ids.shape[1]))))


def with_class_token(m: Any, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), x, m.other.repeat(len(x), 1, 1)], 1)
    y: Tensor = m.fc(x) * m.gain + m.shift
    y *= m.gain
    return y


def adapted(m: Any, x: Tensor) -> Tensor:
    """LoRA: the wide weight is frozen."""
    return F.linear(x, m.w) + m.scale * (x @ m.a @ m.b)


def made(m: Any, x: Tensor) -> Tensor:
    """Weights that arithmetic makes, one of which is used twice."""
    w = m.w / m.w.norm(dim=1, keepdim=True) * m.g
    y = F.linear(F.linear(torch.tanh(F.linear(x, w)), w), 1 + m.v.t())
    return F.rms_norm(y, (D,), 1 + m.gain)


def biased_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    bias = m.table[(torch.arange(T)[:, None] - torch.arange(T)).abs()].permute(2, 0, 1)
    return F.scaled_dot_product_attention(q, k, v, bias[None]).transpose(1, 2).flatten(2)


def tied(**options: Any) -> nn.Module:
    model = Made(of_ids, embedding=nn.Embedding(V, D, **options), head=nn.Linear(D, V, bias=False))
    model.head.weight = model.embedding.weight
    return model


def routed(m: Any, x: Tensor) -> Tensor:
    """Experts as in Mixtral: each takes the tokens that the data choose for it."""
    rows = x.flatten(0, 1)
    weight, chosen = m.gate(rows).softmax(-1).topk(2, dim=-1)
    y = torch.zeros_like(rows)
    for e in range(3):
        token, k = torch.where(chosen == e)
        own = F.linear(F.silu(F.linear(rows[token], m.up[e])), m.down[e])
        y = y.index_add(0, token, (own * weight[token, k, None]).to(y.dtype))
    return y.view_as(x)


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


def ids() -> Tensor:
    return torch.randint(0, V, (B, T))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, 3)),
        numbers(B, D),
    ),
    "linear": (
        lambda: nn.Sequential(nn.Linear(D, 16), nn.ReLU(inplace=True), nn.Linear(16, D)),
        numbers(B, T, D),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, D, 3, stride=2, padding=1),
            nn.BatchNorm2d(D).eval(),
            nn.ReLU(inplace=True),
            nn.Conv2d(D, D, 3, groups=2),
            nn.GroupNorm(2, D),
            nn.ConvTranspose2d(D, 5, 3, stride=2, output_padding=1),
            nn.InstanceNorm2d(5, affine=True),
        ),
        numbers(B, 3, 11, 11),
    ),
    "signals": (
        lambda: nn.Sequential(
            nn.Conv1d(3, D, 3, dilation=2), nn.PReLU(D), nn.ConvTranspose1d(D, 2, 3)
        ),
        numbers(B, 3, 9),
    ),
    "embedding": (
        lambda: Made(of_ids, embedding=nn.Embedding(V, D), head=nn.Linear(D, V)),
        ids,
    ),
    "max norm": (
        lambda: Made(of_ids, embedding=nn.Embedding(V, D, max_norm=1.0), head=nn.Linear(D, 3)),
        ids,
    ),
    "bags": (lambda: nn.Sequential(nn.EmbeddingBag(V, D), nn.Linear(D, 3)), ids),
    "tied": (tied, ids),
    "tied with padding": (lambda: tied(padding_idx=2), ids),
    "position": (
        lambda: Made(
            with_position,
            embedding=nn.Embedding(V, D),
            position=nn.Embedding(T, D),
            norm=nn.LayerNorm(D),
            head=nn.Linear(D, V),
        ),
        ids,
    ),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), numbers(B, T, D)),
    "RMS norm": (lambda: nn.Sequential(nn.RMSNorm(D), nn.Linear(D, D)), numbers(B, T, D)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True),
        numbers(B, T, D),
    ),
    "bilinear": (
        lambda: Made(lambda m, x: m.layer(x, torch.tanh(x)), layer=nn.Bilinear(D, D, 3)),
        numbers(B, T, D),
    ),
    "class token": (
        lambda: Made(
            with_class_token,
            token=torch.randn(1, 1, D),
            other=torch.randn(1, 2, D),
            fc=nn.Linear(D, D),
            gain=torch.randn(D),
            shift=torch.randn(T + 3, D),
        ),
        numbers(B, T, D),
    ),
    "LoRA": (
        lambda: Made(
            adapted,
            w=nn.Parameter(torch.randn(D, D), requires_grad=False),
            a=torch.randn(D, 2),
            b=torch.randn(2, D),
            scale=torch.tensor(0.5),
        ),
        numbers(B, T, D),
    ),
    "made": (
        lambda: Made(
            made,
            w=torch.randn(D, D),
            g=torch.rand(D, 1),
            v=torch.randn(D, D),
            gain=torch.randn(D),
        ),
        numbers(B, T, D),
    ),
    "attention bias": (
        lambda: Made(biased_attention, qkv=nn.Linear(D, 3 * D), table=torch.randn(T, 2)),
        numbers(B, T, D),
    ),
    "LSTM": (
        lambda: Made(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(D, 5, 2, batch_first=True)),
        numbers(B, T, D),
    ),
    "einsum": (
        lambda: Made(lambda m, x: torch.einsum("btd,de->bte", x, m.w), w=torch.randn(D, D)),
        numbers(B, T, D),
    ),
    "experts": (
        lambda: Made(
            routed,
            gate=nn.Linear(D, 3, bias=False),
            up=torch.randn(3, 12, D),
            down=torch.randn(3, D, 12),
        ),
        numbers(B, 9, D),
    ),
    "random order": (
        lambda: Made(
            lambda m, x: m.b(m.a(x.transpose(0, 1))).transpose(0, 1).contiguous(),
            a=nn.Linear(D, D),
            b=nn.LayerNorm(D),
        ),
        numbers(B, T, D),
    ),
}


KINDS = {"float64": torch.float64, "float32": torch.float32, "autocast": torch.float32}


def loss_of(model: nn.Module, x: Tensor, half: bool = False, checkpointed: bool = False) -> Tensor:
    """A sum over samples."""
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    y = y.float() if half else y
    return (
        (y * torch.linspace(0.5, 1.5, y[0].numel(), dtype=y.dtype).view(y[0].shape)).square().sum()
    )


def assert_bits(model: nn.Module, plain: nn.Module) -> None:
    """The same gradients, to the last bit."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert torch.equal(p.grad, q.grad), name
            assert p.grad.stride() == q.grad.stride(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_bits_and_norms(name: str, checkpointed: bool, kind: str) -> None:
    """Two passes that accumulate: the first one learns."""
    make, batch = MODELS[name]
    torch.manual_seed(1)
    model, options = make().to(KINDS[kind]), (kind == "autocast", checkpointed)
    plain = copy.deepcopy(model)
    for _ in range(2):
        x = batch()
        x = x.to(KINDS[kind]) if x.is_floating_point() else x
        own, theirs = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
        want = loss_of(plain, theirs, *options)
        want.backward()
        with gnsfast.per_sample_sqnorms(model, B, gradients="torch") as norms:
            loss = loss_of(model, own, *options)
            loss.backward()
        assert torch.equal(loss, want)
        assert own.grad is None or torch.equal(own.grad, theirs.grad)
        assert_bits(model, plain)
        assert {*norms} == {n for n, p in model.named_parameters() if p.requires_grad}
        if kind == "float64":
            assert_norms(norms, loop_sqnorms(plain, loss_of, x, B))


@pytest.mark.parametrize("name", ["linear", "tied", "position", "encoder", "LSTM", "convolutions"])
def test_norms_of_both_ways(name: str) -> None:
    """In float32 the norms are as near to the loop's as those of the fused kernels."""
    make, batch = MODELS[name]
    model, x = make(), batch()
    loop = loop_sqnorms(model, loss_of, x, B)
    for way in ("fused", "torch"):
        with gnsfast.per_sample_sqnorms(model, B, gradients=way) as norms:
            loss_of(model, x).backward()
        assert_norms(norms, loop)


@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gain", [torch.float32, torch.bfloat16])
def test_gains_of_another_dtype(gain: torch.dtype, data: torch.dtype) -> None:
    """Torch adds up a broadcast gradient in the dtype of the result, then casts it."""
    shifted = lambda m, x: torch.tanh(x * m.gain + m.shift)
    parts = {name: torch.randn(D).to(gain) for name in ("gain", "shift")}
    model, x = Made(shifted, **parts), torch.randn(B, 40, D).to(data)
    plain = copy.deepcopy(model)
    loss_of(plain, x).backward()
    with gnsfast.per_sample_sqnorms(model, B, gradients="torch") as norms:
        loss_of(model, x).backward()
    assert_bits(model, plain)
    assert_norms(norms, loop_sqnorms(plain, loss_of, x, B), rtol=5e-2)


def test_other_model_in_one_autocast() -> None:
    """What learning casts does not stay in the cache of autocast."""
    model, x = MODELS["encoder"][0](), MODELS["encoder"][1]()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(x)
        with gnsfast.per_sample_sqnorms(model, B, gradients="torch"):
            y = model(x)
            y.float().square().sum().backward()
        assert torch.equal(y, want)


@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed: int) -> None:
    model = RandomModel(seed).eval()
    plain = copy.deepcopy(model)
    for size in (model.B, model.B + 1):
        x = torch.randn(size, model.T, WIDTH)
        random_loss(plain, x).backward()
        try:
            with gnsfast.per_sample_sqnorms(model, size, gradients="torch"):
                random_loss(model, x).backward()
        except gnsfast.ObservationError:  # it names what it does not measure, in both ways
            with pytest.raises(gnsfast.ObservationError):
                with gnsfast.per_sample_sqnorms(copy.deepcopy(plain), size):
                    pass
            return
        assert_bits(model, plain)


class Fused(nn.Module):
    """A tied head whose logits are not stored."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), gnsfast.Linear(D, V, bias=not tie)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head.cross_entropy(torch.tanh(self.embedding(ids)), ids, reduction="none")


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_our_own_functions(kind: str, tie: bool) -> None:
    """The bits of ``linear_cross_entropy`` are those that it has without a block."""
    model, x = Fused(tie).to(KINDS[kind]), ids()
    plain = copy.deepcopy(model)
    for _ in range(2):
        loss_of(plain, x, kind == "autocast").backward()
        with gnsfast.per_sample_sqnorms(model, B, gradients="torch") as norms:
            loss_of(model, x, kind == "autocast").backward()
        assert_bits(model, plain)
    if kind == "float64":
        assert_norms(norms, loop_sqnorms(plain, loss_of, x, B))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["tied", "position", "RMS norm", "linear"])
def test_compiled(name: str, backend: str) -> None:
    """One graph, with torch's bits where nothing is fused. Inductor sums in another order where the
    norms need a tensor that it would not have stored.
    """
    make, batch = MODELS[name]
    model, x = make(), batch()
    plain = copy.deepcopy(model)
    gnsfast.learn(model, x)
    torch.compiler.reset()
    run, theirs = (torch.compile(m, fullgraph=True, backend=backend) for m in (model, plain))
    loss_of(theirs, x).backward()
    with gnsfast.per_sample_sqnorms(model, B, gradients="torch") as norms:
        loss_of(run, x).backward()
    if backend == "aot_eager":
        assert_bits(model, plain)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-4)
    assert_norms(norms, loop_sqnorms(plain, loss_of, x, B))


def test_nothing_else_is_kept() -> None:
    """A linear layer's input is the one that torch keeps, of autocast too."""
    for half in (False, True):
        model, x = MODELS["linear"][0](), MODELS["linear"][1]()
        kept: dict[bool, int] = {}
        for measured in (True, False):
            saved: list[Tensor] = []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            )
            block = gnsfast.per_sample_sqnorms(model, B, gradients="torch")
            with block if measured else nullcontext():
                if measured:
                    loss_of(model, x).backward()  # learns
            with block if measured else nullcontext():
                with hooks:
                    loss = loss_of(model, x, half)
                loss.backward()
            kept[measured] = sum(
                {t.data_ptr(): t.untyped_storage().nbytes() for t in saved}.values()
            )
        assert kept[True] == kept[False]


GPTS = {"nanoGPT": NanoGPT, "modded": ModdedGPT, "nanochat": NanoChat}


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", GPTS)
def test_training(name: str, half: bool) -> None:
    """The losses of 50 steps with AdamW, of two micro-batches each, and the weights after them."""
    torch.manual_seed(2)
    first = GPTS[name]()
    found: list[list[Tensor]] = []
    for measured in (False, True):
        model = copy.deepcopy(first)
        table = learned(model, gpt_tokens()) if measured else None
        gns = gnsfast.GradientNoiseScale(model, table, gradients="torch")
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(3)
        for _ in range(50):
            with gns.update() if measured else nullcontext():
                for _ in range(2):
                    batch = gpt_tokens()
                    with gns.microbatch(len(batch[0])) if measured else nullcontext():
                        with torch.autocast("cpu", torch.bfloat16, enabled=half):
                            out = model(*batch)
                        loss = out[1] if isinstance(out, tuple) else out
                        (loss / 2).backward()
                    losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        found.append([*losses, *(p.detach() for p in model.parameters())])
        assert not measured or gns.compute().updates == 50
    assert all(map(torch.equal, *found))
