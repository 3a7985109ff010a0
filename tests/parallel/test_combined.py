# SPDX-License-Identifier: Apache-2.0
"""Situations in which combined parallelism gave wrong gradients in silence elsewhere, numbered as
in Megatron-LM's issue 7452. Here the norms and the noise scale are those of one process in float64,
or an error says why not.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layers import assert_as_loop
from noise_cases import through_a_file
from oracle import assert_norms, loop_sqnorms
from processes import each, spawn
from test_estimator_distributed import check
from test_model_parallel import Block, Transformer, alone, measured, split_block, split_heads
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gnsfast

pytestmark = pytest.mark.dist
UPDATES, N, T, D, V = 4, 4, 6, 8, 24
Loss = Callable[[nn.Module, Any], Tensor]
Updates = list[list[Any]]


def drawn(draw: Callable[[], Any]) -> Updates:
    """[update][batch], the same on every process."""
    torch.manual_seed(2)
    return [[draw(), draw()] for _ in range(UPDATES)]


def texts() -> tuple[Tensor, ...]:
    return torch.randint(0, 20, (N, T)), torch.randint(0, 3, (N, T))


def vectors() -> tuple[Tensor, ...]:
    return torch.randn(N, T, D), torch.randn(N, T, D) + 0.5


def mean(loss: Loss) -> Loss:
    return lambda model, batch: loss(model, batch) / len(batch[0])


def noise(model: nn.Module, loss: Loss, updates: Updates) -> gnsfast.NoiseScale:
    return measured(gnsfast.GradientNoiseScale(model), model, mean(loss), updates)


def true_noise(plain: nn.Module, loss: Loss, updates: Updates) -> gnsfast.NoiseScale:
    """That of one process in float64."""
    plain = copy.deepcopy(plain).double()
    wide = lambda t: t.double() if t.is_floating_point() else t
    batches = [[tuple(map(wide, batch)) for batch in each] for each in updates]
    return measured(alone(plain), plain, mean(loss), batches)


def right(
    model: nn.Module, plain: nn.Module, loss: Loss, updates: Updates, mine: Updates | None = None
) -> None:
    """The norms of each sample and the noise scale; ``loss`` is a sum over samples."""
    mine = mine or updates
    assert_as_loop(model, mine[0][0], N, loss, twin=plain)
    model.zero_grad()
    check(noise(model, loss, mine), true_noise(plain, loss, updates))


def left_out(model: nn.Module) -> list[str]:
    return [row.parameter for row in gnsfast.coverage(model).rows if not row.observed]


def vocabulary(rank: int, smoothing: float, gathered: bool) -> None:
    """1, 2: label smoothing over a split vocabulary, and a loss of gathered logits."""

    def loss(m: nn.Module, batch: Any) -> Tensor:
        logits = m(batch[0]).flatten(0, 1)
        y = F.cross_entropy(logits, batch[1].flatten(), reduction="sum", label_smoothing=smoothing)
        return y.full_tensor() if isinstance(y, DTensor) else y

    torch.manual_seed(1)
    plain = Transformer()
    plain.head = nn.Linear(D, V)
    model = copy.deepcopy(plain)
    split_heads(model, init_device_mesh("cpu", (2,)), None if gathered else Shard(-1))
    with nullcontext() if gathered else loss_parallel():
        if smoothing and not gathered:
            with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):  # torch's
                noise(model, loss, drawn(texts))
        else:
            right(model, plain, loss, drawn(texts))


class TwoAhead(nn.Module):
    """Predicts the next token, and by a second head the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(V, D), Block()
        self.head, self.second = nn.Linear(D, V), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(self.tokens(ids))
        return self.head(x), self.second(x)


def second_token(rank: int) -> None:
    """3: a mean over other tokens for each head, of which processes have unequal numbers."""

    def draw() -> tuple[Tensor, ...]:
        ids, labels = torch.randint(0, V, (2, N, T))
        return ids, labels, (torch.rand(N, T) < torch.rand(N, 1)), torch.rand(N, T) < 0.4

    def weighed(batches: list[Any]) -> list[Any]:
        """Each head's loss is a mean over its tokens in all batches of an update."""
        samples = N * len(batches)
        first, second = (sum(int(batch[k].sum()) for batch in batches) for k in (2, 3))
        return [(*b[:2], b[2] * samples / first, b[3] * samples / second) for b in batches]

    def loss(m: nn.Module, batch: Any) -> Tensor:
        ids, labels, *weights = batch
        rows = [F.cross_entropy(y.mT, labels, reduction="none") for y in m(ids)]
        return (rows[0] * weights[0]).sum() + (rows[1] * weights[1]).sum()

    torch.manual_seed(1)
    plain = TwoAhead()
    updates = [weighed(batches) for batches in drawn(draw)]
    model = DistributedDataParallel(copy.deepcopy(plain))
    mine = [batches[rank : rank + 1] for batches in updates]
    check(noise(model, loss, mine), true_noise(plain, loss, updates))


class Heads(nn.Module):
    """Attention with a norm of each head's queries. ``sinks``: a learnt logit of each head for no
    token.
    """

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(4, eps=0.1)
        self.sinks = nn.Parameter(torch.randn(2)) if sinks else None
        self.heads = slice(None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = self.norm(q) @ k.mT + x.new_full((T, T), -torch.inf).triu(1)
        if self.sinks is not None:
            local = self.sinks.to_local() if isinstance(self.sinks, DTensor) else self.sinks
            sinks = local[self.heads][None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        mixed = scores.softmax(-1)[..., :T] @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def squares(m: nn.Module, batch: Any) -> Tensor:
    out: Tensor = (m(batch[0]) - batch[1]).square().sum()
    return out


HEADS = {**{p: ColwiseParallel() for p in "qkv"}, "o": RowwiseParallel()}
NORM = {"norm": SequenceParallel(sequence_dim=1, use_local_output=True)}


def sinks(rank: int, how: str) -> None:
    """8: each process has the logits of its heads."""
    torch.manual_seed(1)
    plain, mesh = Heads(sinks=True), init_device_mesh("cpu", (2,))
    model = parallelize_module(copy.deepcopy(plain), mesh, HEADS | NORM)
    own = slice(rank, rank + 1)
    assert plain.sinks is not None
    whole = plain.sinks.detach()
    if how == "DTensor":  # its to_local() is no function that gnsfast sees
        model.sinks = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        batch = drawn(vectors)[0][0]
        loop = loop_sqnorms(plain, squares, batch, N)
        with gnsfast.per_sample_sqnorms(model, N) as norms:
            squares(model, batch).backward()
        assert_norms(norms, loop, names={*loop} - {"sinks"})
        assert left_out(model) == ["sinks"]
        return
    if how == "part":
        model.sinks = nn.Parameter(whole[own].clone())
    else:
        model.heads = own
    with pytest.raises(gnsfast.ObservationError, match="no DTensor, such as sinks.*configure"):
        noise(model, squares, drawn(vectors))


def norms_of_heads(rank: int, how: str) -> None:
    """11: each process has the heads of which it takes the norm."""
    torch.manual_seed(1)
    plain, mesh = Heads(sinks=False), init_device_mesh("cpu", (2,))
    model = parallelize_module(copy.deepcopy(plain), mesh, HEADS | (NORM if how == "known" else {}))
    if how == "known":
        right(model, plain, squares, drawn(vectors))
        return
    if how == "summed by hand":
        add_up = lambda p: dist.all_reduce(p.grad)
        model.norm.weight.register_post_accumulate_grad_hook(add_up)
    with pytest.raises(gnsfast.ObservationError, match="no DTensor, such as norm.weight"):
        noise(model, squares, drawn(vectors))


def masked_parts(rank: int) -> None:
    """9: a mean over tokens that count, of which each part of a sequence has others."""
    mesh = init_device_mesh("cpu", (2,))
    model, (x, y) = Block(), vectors()
    weights = torch.arange(T).expand(N, T) < 2
    gns = gnsfast.GradientNoiseScale(DistributedDataParallel(model))
    with pytest.raises(gnsfast.ObservationError, match="splits each sample over processes"):
        with gns.update(N), context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
            ((gns.model(x) - y).square().sum(-1) * weights[:, : T // 2]).sum().backward()


class Routed(nn.Module):
    """Two experts that all tokens take, weighed by a router, and the loss that balances them: of
    how often each is the first choice of the tokens that count, over all processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 2), nn.ModuleList(nn.Linear(D, D) for _ in "ab")
        self.group: Any = None

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.router(x).softmax(-1)
        y = sum(expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts))
        first = F.one_hot(weights.argmax(-1), 2) * counts[..., None]
        often = torch.cat([first.sum((0, 1)), counts.sum()[None]]).detach()
        if self.group is not None:
            dist.all_reduce(often, group=self.group)
        balance = (weights * counts[..., None] * often[:2] / often[2]).sum((1, 2))
        return y, balance


def balanced(rank: int) -> None:
    """10: the tokens that count are those of all processes. The router's samples meet in them."""

    def loss(m: nn.Module, batch: Any) -> Tensor:
        x, labels, counts = batch
        y, balance = m(x, counts)
        out: Tensor = (y - labels).square().sum() + balance.sum()
        return out

    torch.manual_seed(1)
    plain = Routed()
    model = DistributedDataParallel(copy.deepcopy(plain))
    model.module.group = dist.group.WORLD
    draw = lambda: (*vectors(), (torch.rand(N, T) < 0.6).float())
    updates = drawn(draw)
    together = [[tuple(map(torch.cat, zip(*batches)))] for batches in updates]
    mine = [batches[rank : rank + 1] for batches in updates]
    check(noise(model, loss, mine), true_noise(plain, loss, together))
    assert left_out(model.module) == ["router.weight", "router.bias"], left_out(model.module)


def other_layout(rank: int) -> None:
    """12: a state of two tensor-parallel processes goes on in one, and not in another stage."""

    def loss(m: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(m(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")

    torch.manual_seed(1)
    plain, updates = Transformer(), drawn(texts)
    model = copy.deepcopy(plain)
    split_heads(model, init_device_mesh("cpu", (2,)))
    split = gnsfast.GradientNoiseScale(model)
    measured(split, model, mean(loss), updates[:2])
    state, whole = through_a_file(split.state_dict()), alone(plain)
    whole.load_state_dict(state)
    truth = noise(model, loss, updates)
    check(measured(whole, plain, mean(loss), updates[2:]), truth)
    stage = alone(plain.block)
    with pytest.raises(gnsfast.ObservationError, match="with other trained parameters"):
        stage.load_state_dict(state)


class Both(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y


class Pictures(nn.Module):
    """A picture and a text, one after the other, with padding, which a router leaves out. Positions
    are added to all tokens, or to those of this process. The block runs again in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.picture = nn.Embedding(V, D), nn.Linear(D, D)
        self.positions, self.split, self.block = nn.Embedding(2 * T, D), Both(), Block()
        self.router, self.head, self.own = nn.Linear(D, 1), nn.Linear(D, V), slice(0)

    def forward(self, ids: Tensor, pixels: Tensor, counts: Tensor) -> Tensor:
        x, places = torch.cat([self.picture(pixels), self.tokens(ids)], 1), torch.arange(2 * T)
        if self.own == slice(0):
            x = x + self.positions(places)[None]
        x, counts = self.split(x, counts[..., None])
        if self.own != slice(0):
            x = x + self.positions(places[self.own])[None]
        y = checkpoint(self.block, x, use_reentrant=False)
        out: Tensor = self.head(y + x * self.router(x).sigmoid() * counts)
        return out


def pictures(rank: int) -> None:
    """4, 5, 6, 7: recomputed blocks, padding, positions and pictures follow the groups of the
    model, which are not the usual ones.
    """

    def draw() -> tuple[Tensor, ...]:
        ids, labels = torch.randint(0, V, (N, T)), torch.randint(0, 3, (N, 2 * T))
        return ids, torch.randn(N, T, D), (torch.rand(N, 2 * T) < 0.7).float(), labels

    def loss(m: nn.Module, batch: Any) -> Tensor:
        *inputs, labels = batch
        return F.cross_entropy(m(*inputs).flatten(0, 1), labels.flatten(), reduction="sum")

    torch.manual_seed(1)
    plain, whole, split = Pictures(), Replicate(), Shard(1)
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    inputs: Any = dict(input_layouts=(whole, whole), desired_input_layouts=(split, split))
    plan = {
        "split": PrepareModuleInput(**inputs, use_local_output=True),
        **split_block(),
        "router": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    updates = drawn(draw)
    replica, place = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    mine = [batches[replica : replica + 1] for batches in updates]
    for own in (slice(0), slice(place * T, place * T + T)):
        model = parallelize_module(copy.deepcopy(plain), mesh["tp"], plan)
        model.own = own
        fully_shard(model, mesh=mesh["dp"])
        if own == slice(0):
            right(model, plain, loss, updates, mine)
            continue
        with pytest.raises(gnsfast.ObservationError, match="no DTensor, such as .*configure"):
            noise(model, loss, mine)


CASES: list[tuple[Any, ...]] = [
    *((vocabulary, *case) for case in ((0.0, True), (0.1, True), (0.0, False), (0.1, False))),
    *((sinks, how) for how in ("DTensor", "part", "whole")),
    *((norms_of_heads, how) for how in ("known", "forgotten", "summed by hand")),
    *((work,) for work in (second_token, masked_parts, balanced, other_layout)),
]


def case(rank: int, work: Any, *args: Any) -> None:
    work(rank, *args)


def test_two_processes() -> None:
    spawn(each, args=([case], *CASES))


def test_four_processes() -> None:
    spawn(pictures, 4)


def test_a_weight_of_two_stages() -> None:
    """Tied embeddings, of which each has a part of the gradient: left out, the rest adds up."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Tanh())
    last = nn.Sequential(nn.Linear(D, D), nn.Linear(D, V, bias=False))
    last[1].weight.data.copy_(first[0].weight)
    whole = nn.Sequential(*map(copy.deepcopy, (first, last)))
    whole[1][1].weight = whole[0][0].weight
    for model, tied in ((first, "0"), (last, "1"), (whole, "0.0")):
        gnsfast.configure(model, exclude=[tied])
    models = first, last, whole
    stages = [gnsfast.GradientNoiseScale(model, unit="micro_batch") for model in models]
    for batches in drawn(texts):
        with stages[0].update(), stages[1].update(), stages[2].update():
            for ids, labels in batches:
                with ExitStack() as blocks:
                    for gns in stages:
                        blocks.enter_context(gns.microbatch(N, scale=1 / 2))
                    for logits in (last(first(ids)), whole(ids)):
                        (F.cross_entropy(logits.mT, labels) / 2).backward()
        for model in models:
            model.zero_grad()
    parts, truth = [gns.compute() for gns in stages[:2]], stages[2].compute()
    for name in ("trace", "grad_sqnorm"):
        total = sum(getattr(part, name) for part in parts)
        assert total == pytest.approx(getattr(truth, name), rel=1e-5)
    assert not {"0", "0.0"} & {*parts[0].per_module, *truth.per_module}
