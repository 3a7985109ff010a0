# SPDX-License-Identifier: Apache-2.0
"""Each group of samples has the noise scale that its samples have by themselves."""

import copy
import importlib
from typing import Any

import pytest
import test_documents as documents
import torch
import torch.distributed as dist
import torch.nn.functional as F
from noise_cases import one_update, through_a_file
from processes import spawn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import gnsfast
from gnsfast.integrations.trackers import metrics

V, D, T = 11, 8, 5
NAMES = ("web", "code", "talk")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.before, self.after = nn.Embedding(V, D), nn.LayerNorm(D), nn.RMSNorm(D)
        self.up, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.tokens(ids))
        out: Tensor = self.head(self.after(x + torch.tanh(self.up(x))))
        return out


def make() -> nn.Module:
    torch.manual_seed(1)
    return Model()


def draw(groups: list[str]) -> tuple[Tensor, Tensor]:
    """The groups' labels differ."""
    ids = torch.randint(0, V, (len(groups), T))
    first = torch.tensor([3 * NAMES.index(g) for g in groups])[:, None]
    return ids, first + torch.randint(0, 3, ids.shape)


def batches() -> list[tuple[list[str], tuple[Tensor, Tensor]]]:
    torch.manual_seed(2)
    web, code, talk = NAMES
    kinds = [[web, code, web, web, code], [code, code, web, talk, code], [web] * 4, [talk, web]]
    return [(kind, draw(kind)) for kind in kinds * 3]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def grads_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """[B, parameters] float64: single samples."""
    wide = copy.deepcopy(model).double()
    rows = []
    for ids, labels in zip(*batch):
        g = torch.autograd.grad(loss_of(wide, (ids[None], labels[None])), [*wide.parameters()])
        rows.append(torch.cat([t.flatten() for t in g]))
    return torch.stack(rows)


def truth(model: nn.Module, updates: list[Any], name: str) -> tuple[float, float, int]:
    """tr Σ and |G|² of a group: unbiased in each micro-batch, updates weighed as its samples."""
    found = []
    for groups, batch in updates:
        g = grads_of(model, batch)[[k for k, of in enumerate(groups) if of == name]]
        n = len(g)
        if n > 1:
            p, q = g.square().sum(), g.sum(0).square().sum()
            found.append((n, (p - q / n) / (n - 1), (q - p) / (n * (n - 1))))
    weights = torch.tensor([float(n) for n, _, _ in found])
    trace, square = (torch.stack([f[i] for f in found]).double() for i in (1, 2))
    weights = weights.double() / weights.sum()
    return float(weights @ trace), float(weights @ square), sum(n for n, _, _ in found)


def measure(model: nn.Module, updates: list[Any], **settings: Any) -> gnsfast.NoiseScale:
    gns = gnsfast.GradientNoiseScale(model, groups=NAMES, **settings)
    for groups, batch in updates:
        factor = len(groups) if settings.get("loss_reduction") == "sum" else 1
        with one_update(gns, len(groups), groups=groups):
            (factor * loss_of(model, batch)).backward()
    return gns.compute()


def check(result: gnsfast.NoiseScale, model: nn.Module, updates: list[Any]) -> None:
    for name in NAMES[:2]:
        trace, grad_sqnorm, samples = truth(model, updates, name)
        found = result.per_group[name]
        assert found.trace == pytest.approx(trace, rel=1e-5)
        assert found.grad_sqnorm == pytest.approx(grad_sqnorm, rel=1e-5)
        assert found.noise_scale == pytest.approx(trace / grad_sqnorm, rel=1e-5)
        assert found.samples == samples and found.left_out == ()
    talk = result.per_group["talk"]  # never two of them in a micro-batch
    assert talk.updates == 0 and talk.upper == float("inf")


@pytest.mark.parametrize("source", ["update", "local"])
def test_groups(source: str) -> None:
    """Beside the noise scale of all samples, which stays what it is; so do the gradients."""
    model, updates = make(), batches()
    result = measure(model, updates, source=source)
    check(result, model, updates)
    plain = gnsfast.GradientNoiseScale(model, source=source)
    for groups, batch in updates:
        with one_update(plain, len(groups)):
            loss_of(model, batch).backward()
    assert result.noise_scale == pytest.approx(plain.compute().noise_scale, rel=1e-5)
    assert "\ncode: noise scale" in str(result)
    assert metrics(result)["gns/group/web"] == result.per_group["web"].noise_scale
    assert "gns/group/talk" not in metrics(result)

    groups, batch = updates[0]
    loss_of(model, batch).backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    gns = gnsfast.GradientNoiseScale(model, groups=NAMES)
    with gns.update(5, groups=groups):
        loss_of(model, batch).backward()
    for ours, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, ours)


def test_sum_loss() -> None:
    """A loss summed over samples says the same of a group as their mean."""
    model, updates = make(), batches()[:4]
    found = [measure(model, updates, loss_reduction=r).per_group["code"] for r in ("sum", "mean")]
    assert found[0].trace == pytest.approx(found[1].trace, rel=1e-5)
    assert found[0].grad_sqnorm == pytest.approx(found[1].grad_sqnorm, rel=1e-5)


f = gnsfast.functional
LAYERS: dict[str, Any] = {
    "linear": lambda ids, x, w, gain, *last: f.linear(x, w, None, *last),
    "frozen weight": lambda ids, x, w, gain, *last: f.linear(x, w.detach(), w[:, 0], *last),
    "embedding": lambda ids, x, w, gain, *last: f.embedding(ids, w, *last)[0],
    "layer_norm": lambda ids, x, w, gain, *last: f.layer_norm(x, (D,), gain, None, *last),
    "rms_norm": lambda ids, x, w, gain, *last: f.rms_norm(x, gain, *last),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_norms_stay_those_of_each_sample(layer: str) -> None:
    """A layer's own probe and gradients, with groups out of order and without."""
    inputs = torch.randn(4, T, D), torch.randn(V, D), torch.randn(D)
    ids, members = torch.randint(0, V, (4, T)), [[2, 0], [], [3, 1]]
    index = tuple(torch.tensor(m, dtype=torch.int64) for m in members)
    found = []
    for members in ((), index):
        probe = torch.zeros(1, 4 + 2 + len(members), requires_grad=True)
        leaves = [t.clone().requires_grad_() for t in inputs]
        y = LAYERS[layer](
            ids, *leaves, probe, f.Plan(groups=f.Groups.of(*members) if members else None)
        )
        (y.sin() * y).sum().backward()
        assert probe.grad is not None
        found.append([probe.grad[:, : 4 + 2], *(t.grad for t in leaves if t.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_accumulation_tokens_and_scaler() -> None:
    """Two micro-batches of unequal lengths, a token mean, a loss scale: the sums of both."""
    model = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    gns = gnsfast.GradientNoiseScale(model, groups=NAMES, grad_scaler=scaler)
    updates = batches()[:2]
    p, q, v, u2, samples, square, length = (0.0 for _ in range(7))
    with gns.update():
        for groups, batch in updates:
            ids, labels = batch
            tokens = torch.tensor([T, 2, 3, T, 4])
            for row, n in zip(labels, tokens):
                row[n:] = -100
            with gns.microbatch(5, tokens=tokens, scale=0.5, groups=groups):
                scaler.scale(0.5 * loss_of(model, batch)).backward()
            a = 0.5 / tokens.sum()
            index = [k for k, of in enumerate(groups) if of == "code"]
            g = grads_of(model, (ids[index], labels[index])) * (a * tokens[index])[:, None]
            u = (a * tokens[index]).double()
            p, q = p + g.square().sum(), q + g.sum(0).square().sum()
            v, u2 = v + u.sum() ** 2, u2 + u.square().sum()
            samples, length = samples + len(index), length + tokens[index].sum()
            square = square + a**2 * len(index)
    found = gns.compute().per_group["code"]
    grad_sqnorm = float((q - p) / (v - u2))
    assert found.grad_sqnorm == pytest.approx(grad_sqnorm, rel=1e-5)
    weight = float(square * (length / samples) ** 2)
    assert found.trace == pytest.approx(float(p - u2 * grad_sqnorm) / weight, rel=1e-5)


def test_resumed() -> None:
    model, updates = make(), batches()
    whole = gnsfast.GradientNoiseScale(model, groups=NAMES)
    first = gnsfast.GradientNoiseScale(model, groups=NAMES)
    for k, (groups, batch) in enumerate(updates):
        for gns in (whole, first):
            with one_update(gns, len(groups), groups=groups):
                loss_of(model, batch).backward()
        if k == 5:
            state = through_a_file(first.state_dict())
            first = gnsfast.GradientNoiseScale(model, groups=NAMES)
            first.load_state_dict(state)
    assert whole.compute().per_group["code"] == first.compute().per_group["code"]


def test_functions_whose_kernels_take_no_groups() -> None:
    class Mixed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv1d(D, D, 1)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.before(self.tokens(ids))
            out: Tensor = self.head(self.mix(self.after(self.up(x)).mT).mT)
            return out

    model, updates = Mixed(), batches()[:2]
    result = measure(model, updates)
    assert result.per_group["web"].left_out == ()
    check(result, model, updates)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_packed_documents(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The domains of documents are those of the same documents, padded to one length."""
    torch.manual_seed(1)
    model, kinds = documents.Packed(tied), ["web", "code", "web", "code", "code"]
    results, tokens = [], torch.tensor(documents.LENGTHS)
    called: list[str] = []
    by_group = importlib.import_module("gnsfast.ops.by_group")
    kernel = by_group._of_segments

    def counted(operator: Any, a: Any, groups: Any) -> tuple[Tensor, ...]:
        called.append(type(a).__name__)
        return kernel(operator, a, groups)

    monkeypatch.setattr(by_group, "_of_segments", counted)
    for packed in (True, False):
        torch.manual_seed(2)
        gns = gnsfast.GradientNoiseScale(model, groups=NAMES)
        for _ in range(5):
            ids, places, labels = documents.draw()
            starts, T = gnsfast.cu_seqlens(places), max(documents.LENGTHS)
            rows = [t[0].split(documents.LENGTHS) for t in (ids, places, labels)]
            if not packed:
                padded = [pad_sequence(row, batch_first=True) for row in rows]
                padded[2] = pad_sequence(rows[2], batch_first=True, padding_value=-100)
                # Padding is a document of its own, which no other token attends to.
                outside = torch.arange(T) >= tokens[:, None]
                ids, places, labels = padded[0], padded[1].masked_fill(outside, 0), padded[2]
            asked = {"cu_seqlens": starts} if packed else {}
            with one_update(gns, 5, groups=kinds, tokens=tokens, **asked):
                loss = documents.packed_loss(model, (ids, places, labels))
                (loss / tokens.sum()).backward()
        results.append(gns.compute())
        assert bool(called) == packed
        called.clear()
    for name in NAMES[:2]:
        ours, theirs = (result.per_group[name] for result in results)
        assert ours.trace == pytest.approx(theirs.trace, rel=1e-4)
        assert ours.grad_sqnorm == pytest.approx(theirs.grad_sqnorm, rel=1e-4)
        assert ours.samples == theirs.samples
    whole, padded_too = results
    assert whole.noise_scale == pytest.approx(padded_too.noise_scale, rel=1e-4)


def test_refused_passes_leave_nothing() -> None:
    """A graph of gradients, gradients that were written to, a group without tokens."""
    model, updates = make(), batches()
    gns = gnsfast.GradientNoiseScale(model, groups=NAMES, source="update")
    groups, batch = updates[0]
    with pytest.raises(gnsfast.ObservationError, match="create_graph"):
        with gns.update(5, groups=groups):
            loss_of(model, batch).backward(create_graph=True)
    model.zero_grad()
    silent = batch[1].clone()
    of_code = torch.tensor([g == "code" for g in groups])
    silent[of_code] = -100
    with gns.update():
        for labels in (batch[1], silent):
            tokens = (labels >= 0).sum(1)
            with gns.microbatch(5, groups=groups, tokens=tokens):
                loss_of(model, (batch[0], labels)).backward()
    trace, grad_sqnorm, samples = truth(model, [(groups, batch)], "code")
    found = gns.compute().per_group["code"]
    assert (found.samples, found.updates) == (samples, 1)
    assert found.noise_scale == pytest.approx(trace / grad_sqnorm, rel=1e-5)


def two_processes(rank: int) -> None:
    with pytest.raises(ValueError, match="name them in another order"):
        order = NAMES if rank else NAMES[::-1]
        with gnsfast.GradientNoiseScale(make(), groups=order).update(1, groups=["web"]):
            pass
    """Each process measures its own micro-batches; the sums of both are one process's."""
    updates = batches()
    model = DistributedDataParallel(make())
    gns = gnsfast.GradientNoiseScale(model, groups=NAMES)
    for pair in zip(updates[::2], updates[1::2]):
        groups, batch = pair[rank]
        with one_update(gns, len(groups), groups=groups):
            loss_of(model, batch).backward()
    single, _ = dist.new_subgroups(group_size=1)
    plain = make()
    alone = gnsfast.GradientNoiseScale(plain, groups=NAMES, process_group=single)
    for pair in zip(updates[::2], updates[1::2]):
        with alone.update():
            for groups, batch in pair:
                with alone.microbatch(len(groups), groups=groups):
                    loss_of(plain, batch).backward()
        plain.zero_grad()
    for name in NAMES[:2]:
        ours, theirs = (g.compute().per_group[name] for g in (gns, alone))
        assert ours.noise_scale == pytest.approx(theirs.noise_scale, rel=1e-5)
        assert ours.samples == theirs.samples


@pytest.mark.dist
def test_two_processes() -> None:
    spawn(two_processes)


class TestErrors:
    @pytest.mark.parametrize(
        "groups, message",
        [
            (["web"] * 4, "groups has length 4, but num_samples is 5"),
            (["web"] * 4 + ["book"], "group 'book' is not one of 'web', 'code', 'talk'"),
            (None, "[Gg]ive both or neither"),
        ],
    )
    def test_assignment(self, groups: Any, message: str) -> None:
        gns = gnsfast.GradientNoiseScale(make(), groups=NAMES)
        with pytest.raises(ValueError, match=message):
            with gns.update(5, groups=groups):
                pass
        with gns.update(5, groups=["web"] * 5):  # the refused block has left nothing open
            loss_of(gns.model, draw(["web"] * 5)).backward()

    def test_without_names(self) -> None:
        with pytest.raises(ValueError, match="[Gg]ive both or neither"):
            with gnsfast.GradientNoiseScale(make()).update(2, groups=["web", "web"]):
                pass

    def test_layers_by_hand(self) -> None:
        x, w, probe = torch.randn(3, 5), torch.randn(2, 5, requires_grad=True), torch.zeros(1, 6)
        some = f.Plan(groups=f.Groups.of(torch.tensor([0, 2])))
        with pytest.raises(ValueError, match="each of the 3 samples of the probe once"):
            f.linear(x, w, None, probe, some)

    @pytest.mark.parametrize("names", ["web", {"web", "code"}, ["web", "web"]])
    def test_names(self, names: Any) -> None:
        with pytest.raises(ValueError, match="a list of different names"):
            gnsfast.GradientNoiseScale(make(), groups=names)
