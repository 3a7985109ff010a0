# SPDX-License-Identifier: Apache-2.0
"""Clusters of samples: every number is that of pairs of single samples in float64."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import test_documents as documents
import torch
import torch.nn.functional as F
from noise_cases import one_update, through_a_file
from processes import spawn
from test_groups_in_models import Tied
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gnsfast
from gnsfast.integrations.trackers import metrics

V, D, T = 11, 8, 5


class Model(Tied):
    """A weight that embedding and head share, a layer that is called twice, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.twice = nn.LSTM(D, D, batch_first=True), nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.tokens(ids))
        x = x + self.mix(x)[0]
        x = x + self.twice(torch.tanh(self.twice(x)))
        out: Tensor = self.head(self.after(x + torch.tanh(self.up(x))))
        return out


def make(kind: Callable[[], nn.Module] = Tied) -> nn.Module:
    torch.manual_seed(1)
    return kind()


Batch = tuple[Tensor, Tensor, Any]
"""Tokens, labels, and what is given as clusters."""


def draw(clusters: Any, n: int) -> Batch:
    """Samples whose labels are alike in a cluster."""
    names = [k // clusters for k in range(n)] if isinstance(clusters, int) else list(clusters)
    own = {name: torch.randint(0, V - 2, (1,)) for name in dict.fromkeys(map(int, names))}
    first = torch.stack([own[int(name)] for name in names])
    return torch.randint(0, V, (n, T)), first + torch.randint(0, 3, (n, T)), clusters


def sizes(updates: int = 8, n: int = 12, clusters: Any = 3) -> list[list[Batch]]:
    torch.manual_seed(2)
    return [[draw(clusters, n)] for _ in range(updates)]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def grads_of(model: nn.Module, batch: Batch) -> Tensor:
    """[B, parameters] float64: single samples."""
    wide = copy.deepcopy(getattr(model, "module", model)).double()
    rows = []
    for ids, labels in zip(*batch[:2]):
        g = torch.autograd.grad(loss_of(wide, ids[None], labels[None]), [*wide.parameters()])
        rows.append(torch.cat([t.flatten() for t in g]))
    return torch.stack(rows)


def of_pairs(
    g_BP: Tensor, u_B: Tensor, cluster_B: Tensor, part_B: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The means of g_b · g_c, weighted by u_b u_c: over pairs of different clusters, which is |G|²;
    over those of one cluster, |G|² + R; of each sample with itself, |G|² + S. Only pairs of one
    part of the samples count, all without ``part_B``.
    """
    products, weights = g_BP @ g_BP.T, u_B[:, None] * u_B
    same = cluster_B[:, None] == cluster_B
    itself = torch.eye(len(u_B), dtype=torch.bool)
    if part_B is not None:
        weights = torch.where(part_B[:, None] == part_B, weights, 0.0)
    kinds = ~same, same & ~itself, itself
    apart, within, alone = ((products * weights)[k].sum() / weights[k].sum() for k in kinds)
    return apart, within, alone


def weight_of(cluster_B: Tensor, u_B: Tensor) -> Tensor:
    """m = W / U₂."""
    same = cluster_B[:, None] == cluster_B
    return (u_B[:, None] * u_B)[same].sum() / u_B.square().sum()


class Truth:
    """The numbers of a window of updates of samples with equal weights."""

    def __init__(self, found: list[tuple[Tensor, ...]], samples: list[int]) -> None:
        w = torch.tensor(samples, dtype=torch.float64)
        w = w / w.sum()
        apart, within, alone, m = (w @ torch.stack(own) for own in zip(*found))
        each = [torch.stack(own) for own in zip(*found)]
        self.grad_sqnorm = apart
        self.alone = w @ (each[2] - each[0])
        self.trace = w @ (each[2] + (each[3] - 1) * each[1]) - m * apart
        self.correlation = (self.trace / self.alone - 1) / (m - 1)
        self.worth = (1 - self.correlation) / (1 + (m - 1) * self.correlation)

    def check(self, found: gnsfast.ClusterNoiseScale, rel: float = 2e-5) -> None:
        near = lambda t: pytest.approx(float(t), rel=rel)
        assert found.grad_sqnorm == near(self.grad_sqnorm)
        assert found.trace == near(self.trace)
        assert found.noise_scale == near(self.trace / self.grad_sqnorm)
        assert found.independent.trace == near(self.alone)
        assert found.independent.noise_scale == near(self.alone / self.grad_sqnorm)
        assert found.correlation.value == near(self.correlation)
        assert found.worth.value == near(self.worth)
        assert found.lower < found.noise_scale < found.upper
        assert found.correlation.lower < found.correlation.value < found.correlation.upper
        assert found.worth.lower < found.worth.value < found.worth.upper


def names_of(batch: Batch) -> Tensor:
    clusters, n = batch[2], len(batch[0])
    return torch.arange(n) // clusters if isinstance(clusters, int) else torch.tensor(clusters)


def truth(model: nn.Module, updates: list[list[Batch]]) -> Truth:
    """Of updates of mean losses, whose micro-batches have equally many samples."""
    found = []
    for passes in updates:
        g = torch.cat([grads_of(model, batch) for batch in passes])
        part = torch.cat([torch.full((len(b[0]),), k) for k, b in enumerate(passes)])
        cluster = torch.cat([names_of(batch) for batch in passes]) + 1000 * part
        u = torch.ones(len(g), dtype=torch.float64)
        found.append((*of_pairs(g, u, cluster), weight_of(cluster, u)))
    return Truth(found, [sum(len(b[0]) for b in passes) for passes in updates])


def measure(
    model: nn.Module, updates: list[list[Batch]], clusters: bool = True, **settings: Any
) -> gnsfast.NoiseScale:
    gns = gnsfast.GradientNoiseScale(model, **settings)
    for passes in updates:
        with gns.update():
            for ids, labels, given in passes:
                n = len(ids)
                share = n if settings.get("loss_reduction") == "sum" else 1.0
                asked = {"clusters": given} if clusters else {}
                with gns.microbatch(n, scale=1 / len(passes), **asked):
                    (share * loss_of(model, ids, labels) / len(passes)).backward()
        model.zero_grad()
    return gns.compute()


def of(result: gnsfast.NoiseScale) -> gnsfast.ClusterNoiseScale:
    assert result.clusters is not None
    return result.clusters


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_consecutive_samples(loss_reduction: str) -> None:
    """What else is measured stays what it is, and so do the gradients."""
    model, updates = make(), sizes()
    settings = {"loss_reduction": loss_reduction}
    result = measure(model, updates, **settings)
    found = of(result)
    scale = 12**2 if loss_reduction == "sum" else 1  # only ratios do not depend on it
    if scale == 1:
        truth(model, updates).check(found)
    assert (found.updates, found.clusters, found.samples, found.size) == (8, 32, 96, 3.0)
    assert found.in_clusters.value == pytest.approx(found.noise_scale / 3)
    plain = measure(model, updates, clusters=False, **settings)
    assert plain.clusters is None
    assert result.noise_scale == pytest.approx(plain.noise_scale, rel=1e-5)
    assert result.upper == pytest.approx(plain.upper, rel=1e-4)


def test_every_kind_of_function() -> None:
    model, updates = make(Model), sizes()
    truth(model, updates).check(of(measure(model, updates)))


UNEQUAL = [[7, 3, 7, 5, 3, 7, 7], [1, 2, 2, 1, 2, 9, 9], [4, 4, 5, 5, 5, 6, 6]]


@pytest.mark.parametrize("given", [list, torch.tensor], ids=["list", "tensor"])
def test_named_clusters_of_any_size(given: Any) -> None:
    """One of a single sample among them, in another order than they have in the batch."""
    torch.manual_seed(2)
    model, updates = make(), [[draw(names, 7)] for names in UNEQUAL * 3]
    as_given = [[(ids, labels, given(names)) for ids, labels, names in each] for each in updates]
    truth(model, updates).check(of(measure(model, as_given)))


def test_accumulation() -> None:
    """Clusters of one name in the same update are refused: see ``TestErrors``."""
    model = make()
    updates = [[*a, *b] for a, b in zip(sizes(6, 6), sizes(7, 6)[1:])]
    truth(model, updates).check(of(measure(model, updates)))


def test_a_cluster_in_several_micro_batches_that_are_measured_by_themselves() -> None:
    """As TRL shuffles rollouts: only pairs within a micro-batch count."""
    torch.manual_seed(2)
    model, found = make(), []
    updates = [[draw([1, 2, 1, 2, 1, 3], 6), draw([3, 3, 1, 2, 2, 1], 6)] for _ in range(6)]
    for passes in updates:
        g = torch.cat([grads_of(model, batch) for batch in passes])
        part = torch.arange(12) // 6
        cluster = torch.cat([names_of(batch) for batch in passes])
        u = torch.ones(12, dtype=torch.float64)
        found.append((*of_pairs(g, u, cluster, part), weight_of(cluster + 9 * part, u)))
    Truth(found, [12] * 6).check(of(measure(model, updates, source="local")))


def check_lengths(
    found: gnsfast.ClusterNoiseScale, updates: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Of updates with equally many samples: their gradients, weights and clusters. The weight of
    tr Σ is Σ a² times the square of the samples' mean length, for weights u = a L.
    """
    rows = []
    for g_BP, u_B, cluster_B in updates:
        apart, within, alone = of_pairs(g_BP, u_B, cluster_B)
        weight = len(u_B) * (u_B.sum() / len(u_B)) ** 2
        share = u_B.square().sum() / weight
        more = weight_of(cluster_B, u_B) - 1
        common = share * (within - apart)
        rows.append(torch.stack([apart, share * (alone - apart), common, more * common, more]))
    square, trace, common, shared, more = torch.stack(rows).mean(0).tolist()
    assert found.grad_sqnorm == pytest.approx(square, rel=1e-5)
    assert found.independent.trace == pytest.approx(trace, rel=1e-5)
    assert found.trace == pytest.approx(trace + shared, rel=1e-5)
    assert found.correlation.value == pytest.approx(shared / trace / more, rel=1e-5)
    assert found.samples == sum(len(u) for _, u, _ in updates)
    assert found.clusters == sum(len(cluster.unique()) for _, _, cluster in updates)


def test_tokens_scaler_and_padding() -> None:
    """Unequal weights, from lengths and from factors; a row of padding is no sample."""
    model, updates = make(), sizes(6, 6, [1, 1, 2, 2, 2, 3])
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    gns = gnsfast.GradientNoiseScale(model, grad_scaler=scaler)
    single, tokens = [], torch.tensor([T, 2, 3, T, 1, 0])
    for at, [(ids, labels, clusters)] in enumerate(updates):
        for row, n in zip(labels, tokens):
            row[n:] = -100
        scale = 0.5 + at / 10
        with one_update(gns, 6, tokens=tokens, scale=scale, clusters=clusters):
            scaler.scale(scale * loss_of(model, ids, labels)).backward()
        u = (scale * tokens / tokens.sum()).double()[:5]
        g = grads_of(model, (ids[:5], labels[:5], None))
        single.append((g, u, torch.tensor(clusters[:5])))
    check_lengths(of(gns.compute()), single)


@pytest.mark.parametrize("kind", ["eager", "tied", "compiled"])
def test_packed_documents(kind: str) -> None:
    """Clusters of documents that do not lie side by side."""
    torch.manual_seed(1)
    model, clusters = documents.Packed(kind == "tied"), [2, 1, 2, 1, 1]
    called = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    n, single = len(documents.LENGTHS), []
    tokens = torch.tensor(documents.LENGTHS)
    gns = gnsfast.GradientNoiseScale(model, source="update")
    for _ in range(6):
        batch = documents.draw()
        starts = gnsfast.cu_seqlens(batch[1])
        with one_update(gns, n, cu_seqlens=starts, tokens=tokens, clusters=clusters):
            (documents.packed_loss(called, batch) / tokens.sum()).backward()
        wide, rows = copy.deepcopy(model).double(), []
        for document in zip(*(t[0].split(documents.LENGTHS) for t in batch)):
            loss = documents.packed_loss(wide, tuple(t[None] for t in document))
            g = torch.autograd.grad(loss / len(document[0]), [*wide.parameters()])
            rows.append(torch.cat([t.flatten() for t in g]))
        single.append((torch.stack(rows), tokens / tokens.sum(), torch.tensor(clusters)))
    check_lengths(of(gns.compute()), [(g, u.double(), names) for g, u, names in single])


def test_documents_in_a_shared_weight_that_is_compiled() -> None:
    """The first batch runs as it is; compiled code joins no uses."""
    model, batch = documents.Packed(tied=True), documents.draw()
    compiled, tokens = torch.compile(model, backend="aot_eager"), torch.tensor(documents.LENGTHS)
    gns, starts = gnsfast.GradientNoiseScale(model), gnsfast.cu_seqlens(batch[1])
    for match in ("", "tokens.weight: compiled code uses it several times"):
        with pytest.raises(gnsfast.ObservationError, match=match) if match else nullcontext():
            with one_update(gns, 5, cu_seqlens=starts, tokens=tokens, clusters=[1, 1, 1, 2, 2]):
                documents.packed_loss(compiled, batch).backward()


def test_resumed() -> None:
    """Also into an estimator that has not seen a cluster."""
    model, updates = make(), sizes()
    whole, first = gnsfast.GradientNoiseScale(model), gnsfast.GradientNoiseScale(model)
    for k, [(ids, labels, clusters)] in enumerate(updates):
        for gns in (whole, first):
            with one_update(gns, len(ids), clusters=clusters):
                loss_of(model, ids, labels).backward()
        if k == 4:
            state = through_a_file(first.state_dict())
            first = gnsfast.GradientNoiseScale(model)
            first.load_state_dict(state)
    assert of(whole.compute()) == of(first.compute())
    first.reset()  # the next micro-batch decides anew
    with first.update(12):
        loss_of(model, *updates[0][0][:2]).backward()
    assert first.compute().clusters is None


def test_said_and_logged() -> None:
    model, updates = make(), sizes()
    result = measure(model, updates)
    found, logged = of(result), metrics(result)
    assert ", as if samples were independent" in str(result)
    assert "in clusters: noise scale" in str(result) and "32 clusters of 3 samples" in str(result)
    assert "a sample more in each is worth" in str(result)
    assert logged["gns/clusters"] == found.noise_scale
    assert logged["gns/clusters_independent_lo"] == found.independent.lower
    assert logged["gns/clusters_correlation"] == found.correlation.value
    assert logged["gns/clusters_worth_hi"] == found.worth.upper
    gns = gnsfast.GradientNoiseScale(model)
    with gns.update(12, clusters=[0] * 12):  # one cluster says nothing of itself
        loss_of(model, *updates[0][0][:2]).backward()
    nothing = gns.compute()
    assert "clusters: noise scale not measured yet: an update needs two" in str(nothing)
    assert not any("clusters" in name for name in metrics(nothing))


def test_clusters_of_one_sample() -> None:
    """They are single samples, which have nothing in common with another one."""
    gns = gnsfast.GradientNoiseScale(model := make())
    for [(ids, labels, _)] in sizes():
        with one_update(gns, 12, clusters=[*range(12)]):
            loss_of(model, ids, labels).backward()
    said = str(gns.compute()).splitlines()[-1]
    assert said.endswith("clusters of 1 sample, which have no correlation") and "nan" not in said


def test_flags_and_controllers_take_that_of_clusters() -> None:
    result = measure(make(), sizes())
    assert result.under("euclidean") == of(result) != result
    said = gnsfast.flag(12, result, factor=1.0)
    assert (said.lower, said.upper) == (of(result).lower, of(result).upper)
    drifting = gnsfast.flag(12, replace(result, drift=True), factor=1.0)
    assert drifting.verdict == "unresolved" and drifting.lower == 0


def test_an_overflow_is_skipped() -> None:
    model, updates = make(), sizes(7)
    gns = gnsfast.GradientNoiseScale(model)
    for k, [(ids, labels, clusters)] in enumerate(updates):
        with one_update(gns, 12, clusters=clusters):
            (loss_of(model, ids, labels) * (torch.inf if k == 3 else 1.0)).backward()
    del updates[3]
    truth(model, updates).check(of(gns.compute()))


def test_largest_samples_beside_them() -> None:
    model, updates = make(), sizes()
    result = measure(model, updates, keep_largest=2)
    truth(model, updates).check(of(result))
    assert 0 < result.largest < 1


def two_processes(rank: int) -> None:
    """Each process measures its own clusters; the sums of both are one process's, under DDP and
    FSDP2.
    """
    updates = [[*a, *b] for a, b in zip(sizes(6, 6), sizes(7, 6)[1:])]
    model, sharded = DistributedDataParallel(make()), make()
    fully_shard(sharded)
    expected = truth(model, updates)
    for each in (model, sharded):
        gns = gnsfast.GradientNoiseScale(each)
        for passes in updates:
            ids, labels, clusters = passes[rank]
            with one_update(gns, len(ids), clusters=clusters):
                loss_of(each, ids, labels).backward()
        expected.check(of(gns.compute()))
    parts = gnsfast.GradientNoiseScale(model)
    with pytest.raises(gnsfast.ObservationError, match="cluster 5 are in the batches of two"):
        with parts.update(6, clusters=[rank, rank, rank, 5, 5, 5]):
            loss_of(model, *updates[0][rank][:2]).backward()
    model.zero_grad()
    one = gnsfast.GradientNoiseScale(model)
    with pytest.raises(gnsfast.ObservationError, match="Some processes gave"):
        with one.update(6, **({"clusters": 3} if rank else {})):
            loss_of(model, *updates[0][rank][:2]).backward()


@pytest.mark.dist
def test_two_processes() -> None:
    spawn(two_processes)


class TestErrors:
    @pytest.mark.parametrize(
        "clusters, message",
        [
            (5, "num_samples is 12. Where clusters have other sizes"),
            (1, "clusters must be a whole number of at least 2"),
            ([1, 2], "clusters has length 2, but num_samples is 12"),
            ({1, 2}, "a list or a tensor with the cluster of each sample"),
            (torch.zeros(12, 1), "a list or a tensor with the cluster of each sample"),
        ],
    )
    def test_arguments(self, clusters: Any, message: str) -> None:
        model, updates = make(), sizes(1)
        gns = gnsfast.GradientNoiseScale(model)
        with pytest.raises(ValueError, match=message):
            with gns.update(12, clusters=clusters):
                pass
        with gns.update(12, clusters=3):  # the refused block has left nothing open
            loss_of(model, *updates[0][0][:2]).backward()

    def test_not_in_each_micro_batch(self) -> None:
        model, updates = make(), sizes(1)
        for first, second in [({"clusters": 3}, {}), ({}, {"clusters": 3})]:
            gns, [(ids, labels, _)] = gnsfast.GradientNoiseScale(model), updates[0]
            with gns.update(12, **first):
                loss_of(model, ids, labels).backward()
            with pytest.raises(ValueError, match=r"call gns.reset\(\) to begin anew"):
                with gns.update(12, **second):
                    pass
            model.zero_grad()

    def test_a_cluster_in_two_micro_batches(self) -> None:
        model, updates = make(), sizes(2, 6, [1, 1, 1, 2, 2, 2])
        gns = gnsfast.GradientNoiseScale(model)
        for [(ids, labels, clusters)] in updates:  # of two updates they may be
            with gns.update(6, clusters=clusters):
                loss_of(model, ids, labels).backward()
            model.zero_grad()
        with pytest.raises(ValueError, match="cluster 1 are in two micro-batches"):
            with gns.update():
                for [(ids, labels, clusters)] in updates:
                    with gns.microbatch(6, clusters=clusters):
                        loss_of(model, ids, labels).backward()

    def test_what_does_not_go_together(self) -> None:
        model = make()
        others: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"groups": ["a"]}, NotImplementedError, "groups and clusters"),
            ({"unit": "micro_batch"}, ValueError, "leave out source='local', groups, clusters"),
        ]
        for settings, kind, message in others:
            gns = gnsfast.GradientNoiseScale(model, **settings)
            with pytest.raises(kind, match=message):
                with gns.update(4, clusters=2):
                    pass

    def test_tokens_in_total(self) -> None:
        gns = gnsfast.GradientNoiseScale(make())
        with pytest.raises(ValueError, match="With clusters, tokens must be a tensor"):
            with gns.update(4, clusters=2, tokens=20):
                pass
