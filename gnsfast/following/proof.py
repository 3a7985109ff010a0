# SPDX-License-Identifier: Apache-2.0
"""The proof of what an example has shown: the norms of one measured pass over the whole batch,
beside a loop over a few single samples of the very same model.

The loss weighs these samples' outputs at random, so that no gradients cancel. Gradients come from
``autograd.grad``: nothing reaches ``.grad``, hooks of accumulation, or other processes.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, count, islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnsfast.errors import ObservationError, first_line
from gnsfast.following.examples import Example
from gnsfast.following.layouts import FIRST, SHARED, UNKNOWN, Layout, Print
from gnsfast.following.leaf import Leaf
from gnsfast.following.learning import Trial
from gnsfast.following.passes import Weighted, gradients
from gnsfast.functional import Documents, documents_of_rows, graphs_of_gradients
from gnsfast.kept import kept_modes
from gnsfast.parallel import parameter_groups, shared
from gnsfast.tensors import map_tensors, tensors_of, whole


class Proof(NamedTuple):
    """What a proof has found. ``reason`` says why there is none; else ``wrong`` holds the
    parameters whose norms are wrong, with the reason, and ``unproven`` those that got no gradient.
    ``lost`` are those that the batch gave no norms, with the reason.
    ``of_loss`` says why the loss that the model returns beside its outputs is not proven.
    ``seconds``: how long the first batch took, with all that it shows.
    """

    reason: str = ""
    wrong: dict[str, str] = {}
    unproven: frozenset[str] = frozenset()
    of_loss: str = ""
    seconds: float = 0.0
    lost: dict[str, str] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """The parameters that have no norms, or wrong ones, with the reason."""
        return self.lost | self.wrong

    def joined(self, other: "Proof") -> "Proof":
        """The proof of two parts of a model."""
        return Proof(
            self.reason or other.reason,
            self.wrong | other.wrong,
            self.unproven | other.unproven,
            self.of_loss or other.of_loss,
            self.seconds + other.seconds,
            self.lost | other.lost,
        )

    def later(self, other: "Proof") -> "Proof":
        """This proof after that of a later batch."""
        if other.reason:  # of what is proven, only a loss can be seen to be wrong now
            return self._replace(reason=self.reason or JOINED) if other.reason == JOINED else self
        of_loss = self.of_loss or other.of_loss
        return self._replace(unproven=self.unproven & other.unproven, of_loss=of_loss)


DRAWS = "the model draws random numbers"
NO_RESULT = "no result of the model belongs to single samples"
OF_TWO = (
    "a result of the model has an entry for each two samples: samples meet in it, or there are as "
    "many of something else, as of classes, and gnsfast.configure(model, example=...) with another "
    "number of samples shows which"
)
TWICE = "a gradient of its gradient is taken, as a penalty on gradients does"


ALONE, TOGETHER, LOSS = "alone", "together", "loss"
"""What a measured pass is compared with: samples alone; each sample's own outputs in the same
batch, with the same random numbers; or the loss that the model returns for samples alone.
"""


def prove(trial: Trial) -> Proof:
    """The proof of an example. Where the model draws random numbers, its samples are compared alone
    in evaluation mode, and together as it is.
    """
    structure = trial.structure
    if any(own.unsharded_accumulated_grad is not None for own in structure.sharded()):
        return Proof("FSDP2 held back gradients of an earlier pass")
    groups = [group for _, group in parameter_groups(structure.model)]
    if any(getattr(group, "reduce_scatter_unused_params", False) for group in groups):
        return Proof("FSDP2 reduces gradients of unused parameters too")
    found = _compared(trial, ALONE)
    if drew := found.reason == DRAWS:  # on all processes
        own = _compared(trial._replace(batch=trial.example), TOGETHER)
        with kept_modes(trial.module):
            trial.module.eval()
            alone = _with_loss(trial, _compared(trial, ALONE))
        wrong, lost = own.wrong | alone.wrong, own.lost | alone.lost
        found = own._replace(wrong=wrong, of_loss=alone.of_loss, lost=lost)
    else:
        found = _with_loss(trial, found)
    own_sets, is_small = telling_apart(trial.batch.n), trial.batch.n <= trial.example.n
    number = len(own_sets) if found.reason else int(drew or is_small)  # else a loss had no others
    for k in range(shared(number, max, structure.groups)):
        wrong = meeting(trial, own_sets[k % len(own_sets)])
        found = found._replace(wrong=found.wrong | wrong, lost=found.lost | trial.failed)
    wrong, lost = (shared(own, dict.__or__, structure.groups) for own in (found.wrong, found.lost))
    return found._replace(wrong=wrong, lost=lost)


def telling_apart(samples: int) -> list[list[int]]:
    """Sets of samples, such that for each two of them a set has the first one and not the second:
    where other samples have no norm in a loss of any of these, each sample has its own.
    """
    m = next(m for m in count(1) if math.comb(m, m // 2) >= samples)
    chosen = [*islice(combinations(range(m), m // 2), samples)]
    return [[b for b, own in enumerate(chosen) if k in own] for k in range(m)]


def _with_loss(trial: Trial, found: Proof) -> Proof:
    """``found``, with what is wrong in the loss that the model returns beside its outputs."""
    if not found.reason and UNKNOWN in trial.learned.results:
        return found._replace(of_loss=OF_TWO)
    if found.reason or SHARED not in trial.learned.results:
        return found
    few = trial._replace(batch=trial.example)  # a loss in which samples meet shows it of these too
    reason = _compared(few, LOSS).reason
    return found._replace(of_loss=reason if reason == JOINED else "")


def _compared(trial: Trial, how: str) -> Proof:
    """The norms of one measured pass beside those of single samples."""
    structure, leaves, B, few = trial.structure, trial.leaves, trial.batch.n, trial.example.n
    before, graphs = structure.chance(), graphs_of_gradients[0]
    with trial.measured() as results:
        if structure.on_any(graphs_of_gradients[0] != graphs):
            return Proof("", {leaf.name: TWICE for leaf in leaves})
        for leaf in leaves:
            leaf.known_uses, leaf.is_known_joined = leaf.expected, leaf.found.joined
        drew = structure.on_any(structure.chance() != before)
        if drew and how != TOGETHER:  # a sample alone draws other numbers
            return Proof(DRAWS)
        weighed = [] if how == LOSS else _weighed(trial, results, range(min(few, B)))
        if structure.on_any(not weighed):
            how, weighed = LOSS, [] if how == TOGETHER else _loss(results)
            if structure.on_any(not weighed):
                wrong = dict.fromkeys((leaf.name for leaf in leaves), OF_TWO)
                wrong = wrong if UNKNOWN in trial.learned.results else {}
                why = NO_RESULT + (f" where {DRAWS}" if drew else "")
                return Proof(why, wrong, lost=trial.failed)
        norms = trial.norms([(results[w.number], w.weights) for w in weighed])
    failed = trial.failed
    if isinstance(norms, str):
        return Proof(norms, lost=failed)
    # Torch 2.13's gradients of a batch norm in evaluation mode are wrong for one image that is
    # stored channels-last.
    copies = 1 + bool(structure.batch_norms)
    with structure.bare():
        truth = _truths(trial, weighed, 0 if how == TOGETHER else copies)
    if isinstance(truth, str):
        return Proof(truth, lost=failed)
    zero = torch.zeros(B, device="cpu")
    found = {leaf: norms.get(leaf, zero) for leaf in leaves if leaf.name not in failed}
    rtol = 5e-2 if trial.learned.is_half else 1e-3
    judged = judge(found, truth, rtol, by_loss=how == LOSS) if found else Proof()
    if how == LOSS:
        adds_up = _adds_up(trial, rtol)  # on each process
        if structure.on_any(bool(judged.wrong) or not adds_up):
            return Proof(JOINED, lost=failed)
    return judged._replace(lost=failed)


def _adds_up(trial: Trial, rtol: float) -> bool:
    """Whether the gradient of the loss that the model returns for the example is the sum of those
    for its samples alone, each times a number. (Norms of single samples do not tell: a number for
    each may explain those of one layer.)
    """
    example, copies = trial.example, 1 + bool(trial.structure.batch_norms)
    values, prints = [leaf.current for leaf in trial.leaves], list[list[Tensor]]()
    for samples in ([*range(example.n)], *([b] * copies for b in range(example.n))):
        with trial.structure.bare(), _pass_over(trial, example.part(samples)) as (results, more):
            parts = [(results[w.number], w.weights) for w in _loss(results)]
            found = gradients(parts, [*values, *more], keep=True)
        prints.append([_print(g, p) for g, p in zip(found, values)])
    own = [torch.stack(of_leaf) for of_leaf in zip(*prints)]
    sizes = torch.stack([each_NS.norm(dim=1).max() for each_NS in own])
    sizes = sizes.clamp(min=max(1e-2 * float(sizes.max()), LEAST))  # below it rounding counts
    of_all_NS = torch.cat([each_NS / size for each_NS, size in zip(own, sizes)], 1)
    together_1S, alone_NS = of_all_NS.tensor_split((1,))
    weights_N1 = torch.linalg.lstsq(alone_NS.T, together_1S.T, driver="gelsd").solution
    return bool((alone_NS.T @ weights_N1 - together_1S.T).abs().max() <= rtol)


def _print(g: Tensor | None, p: Tensor) -> Tensor:
    """Numbers that are linear in a gradient, one for each index of its dimensions."""
    if g is None:
        return torch.zeros(sum(p.shape) or 1, dtype=torch.float64, device="cpu")
    g = whole(g.to_dense() if g.is_sparse else g).float()
    along = Print.of(g if g.ndim else g[None], 1).along
    return torch.cat(along).to("cpu", torch.float64)


class Weighed(NamedTuple):
    """A result of the model: its number, where its samples lie, and weights of its entries in a
    loss, which are random for some samples and zeros for the others. A loss of all samples has no
    layout, and its weight is one.
    """

    number: int
    layout: Layout | None
    weights: Tensor

    def of_sample(self, results: Sequence[Tensor], b: int, B: int, at: int, n: int) -> Weighted:
        """The part of sample number ``at`` of n with the weights of sample b of B.

        Raises:
            ValueError: if the result does not hold such a part.
        """
        t, weights = results[self.number], self.weights
        if self.layout is not None and self.layout.fits(t.shape, n):
            t, weights = self.layout.of_sample(t, at, n), self.layout.of_sample(weights, b, B)
        if t.shape != weights.shape:
            raise ValueError("its results then have another shape")
        return t, weights


def _weighed(trial: Trial, results: Sequence[Tensor], samples: Sequence[int]) -> list[Weighed]:
    """The results that belong to single samples, with random weights for some ``samples``."""
    found, B = [], trial.batch.n
    for k, (t, place) in enumerate(zip(results, trial.learned.results)):
        if not isinstance(place, Layout) or not t.requires_grad or not place.fits(t.shape, B):
            continue
        weights = torch.zeros_like(t, requires_grad=False)
        for b in samples:
            place.of_sample(weights, b, B).normal_()
        found.append(Weighed(k, place, weights))
    return found


def _loss(results: Sequence[Tensor]) -> list[Weighed]:
    """The first result that is a single number with a gradient."""
    number = next((k for k, t in enumerate(results) if t.requires_grad and t.numel() == 1), None)
    return [] if number is None else [Weighed(number, None, torch.ones_like(results[number]))]


def meeting(
    trial: Trial, samples: Sequence[int], documents: Documents | None = None
) -> dict[str, str]:
    """The parameters of which other samples have a norm in a loss of some ``samples`` alone, with
    the reason. Samples may be packed ``documents``.
    """
    others = [b for b in range(trial.batch.n) if b not in samples]
    with trial.measured(documents) as results:
        if documents is None:
            weighed = _weighed(trial, results, samples)
            parts = [(results[w.number], w.weights) for w in weighed]
        else:
            parts = _of_documents(trial, results, documents, samples)
        norms = "" if trial.structure.on_any(not parts) else trial.norms(parts)
        names = [] if isinstance(norms, str) else _mixed(norms, others)
        return {name: MIXED for name in names if name not in trial.failed}


def refuse_mixed_documents(trial: Trial, documents: Documents) -> None:
    """Raise if packed documents attend to each other: a loss of every second document must give the
    others no gradient.
    """
    lost = {leaf.name for leaf in trial.leaves if leaf.left_out}
    for k in (0, 1):
        found = meeting(trial, range(k, trial.batch.n, 2), documents)
        for name in (name for name in found if name not in lost):
            raise ObservationError(
                f"{type(trial.module).__name__}: the packed documents attend to each other, as the "
                f"gradients of {name} show. The attention mask must be block-diagonal: "
                "position_ids that begin again at 0 with every document for models of "
                "transformers, attn_mask [rows * heads, T, T] for torch.nn.MultiheadAttention."
            )


def _of_documents(
    trial: Trial, results: list[Tensor], documents: Documents, chosen: Sequence[int]
) -> list[Weighted]:
    """The rows of the ``chosen`` documents in the results that hold the tokens, with random
    weights.
    """
    found, rows, N = [], trial.leaves[0].rows, documents.tokens
    for t, place in zip_longest(results, trial.learned.results, fillvalue=FIRST):
        if not (isinstance(t, Tensor) and t.requires_grad and isinstance(place, Layout)):
            continue
        if rows > 1 and place.fits(t.shape, rows):
            t = place.samples_first(t, rows)
        if any(t.shape[:d].numel() == N for d in range(1, t.ndim + 1)):
            document_N = documents_of_rows(documents.starts.to(t.device), N)
            own = t.reshape(N, -1)[torch.isin(document_N, document_N.new_tensor([*chosen]))]
            found.append((own, torch.randn_like(own)))
    return found


def _truths(trial: Trial, weighed: list[Weighed], copies: int) -> "list[dict[Leaf, float]] | str":
    """Each sample's squared norm of each leaf, by a pass over ``copies`` of this sample alone, of
    which the loss counts one, or without copies by a pass over all samples; or why the model does
    not take single samples.
    """
    leaves, batch = trial.leaves, trial.batch
    found: list[dict[Leaf, float]] = []
    values = [leaf.current for leaf in leaves]
    for k in range(trial.example.n):
        b = k % batch.n
        at, n = (0, copies) if copies else (b, batch.n)
        try:
            one = batch.part([b] * copies or range(n))
            with _pass_over(trial, one) as (results, more):
                parts = [w.of_sample(results, b, batch.n, at, n) for w in weighed]
                grads = gradients(parts, [*values, *more], keep=True)
        except Exception as error:  # the model's own, whatever it is: then there is no proof
            return f"the model does not take a single sample ({first_line(error)})"
        found.append({leaf: 0.0 if g is None else _sqnorm(g) for leaf, g in zip(leaves, grads)})
    return found


@contextmanager
def _pass_over(trial: Trial, one: Example) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The results of an example, and images in it that get a gradient: torch 2.13's group norm of
    images that are stored channels-last crashes on a CPU where its input gets none.
    """
    images: list[Tensor] = []

    def pick(t: Tensor) -> Tensor:
        if t.is_cuda or t.ndim < 4 or t.is_contiguous() or not t.is_floating_point():
            return t
        images.append(t.detach().requires_grad_())
        return images[-1].clone()  # which may be written to

    with trial.structure.as_it_was():
        args, kwargs = map_tensors(pick, (one.args, one.kwargs))
        yield [*map(whole, tensors_of(trial.run(*args, **kwargs)))], images


def _sqnorm(g: Tensor) -> float:
    g = g.coalesce().values() if g.is_sparse else g
    sqnorm: float = whole(g).detach().double().square().sum().item()
    return sqnorm


def judge(
    norms: dict[Leaf, Tensor], truth: list[dict[Leaf, float]], rtol: float, by_loss: bool = False
) -> Proof:
    """The parameters whose ``norms`` differ from those of single samples by more than ``rtol``, and
    those without a gradient: what is behind them was not seen. ``truth`` is of the first K samples;
    the loss has no part of the others, which have no gradient. ``by_loss``: the loss is the model's
    own, in which each sample may have another weight than alone: a number for all parameters.
    """
    own_PB = torch.stack([own.double().cpu() for own in norms.values()])
    own_PK = own_PB[:, [k % own_PB.shape[1] for k in range(len(truth))]]
    if not bool(own_PK.isfinite().all()):
        return Proof("the gradients of its samples are not finite")
    real_PK = own_PB.new_tensor([[each[leaf] for each in truth] for leaf in norms])
    if by_loss:
        real_PK *= (own_PK.sum(0) / real_PK.sum(0)).nan_to_num(1.0, 1.0)
    # Rounding adds an error to the gradient, not to its square.
    eps_P1 = own_PB.new_tensor([[torch.finfo(leaf.current.dtype).eps] for leaf in norms])
    noise_PK = 32 * eps_P1 * real_PK.sum(0).sqrt() + LEAST
    is_right_PK = (own_PK.sqrt() - real_PK.sqrt()).abs() <= rtol * real_PK.sqrt() + noise_PK
    wrong = {}
    for p, leaf in enumerate(norms):
        if not bool(is_right_PK[p].all()):
            k = is_right_PK[p].tolist().index(False)
            wrong[leaf.name] = (
                UNSEEN
                if not bool(own_PB[p].any())
                else (
                    f"its norm for a sample is {own_PK[p, k]:.6g}, and {real_PK[p, k]:.6g} for the "
                    "same sample alone: samples meet in the model, or were not told apart"
                )
            )
    for name in () if by_loss else _mixed(norms, slice(len(truth), None)):
        wrong.setdefault(name, MIXED)
    is_none_P = (real_PK.sqrt() <= noise_PK).all(1).tolist()
    return Proof("", wrong, frozenset(leaf.name for leaf, none in zip(norms, is_none_P) if none))


def _mixed(norms: dict[Leaf, Tensor], others: Any) -> list[str]:
    """The parameters of which the ``others`` have norms, samples that have no part in the loss."""
    return [
        leaf.name
        for leaf, own in norms.items()
        if float(own[others].sum()) > 1e-12 * float(own.sum())
    ]


JOINED = (
    "in the loss that the model returns, the norms of a sample are not those of the sample alone "
    "times one number: samples meet in it, or its terms weigh them in several ways"
)

MIXED = (
    "a loss of some samples gives others a gradient of it: samples meet in the model, or have "
    "another order in it than in the batch"
)
UNSEEN = (
    "it gets a gradient, but no function of torch takes it: a kernel or an autograd function of "
    "its own does, or a gradient of its gradient is taken"
)


LEAST = torch.finfo(torch.float32).tiny ** 0.5
"""The square of a smaller norm is no normal float32."""
