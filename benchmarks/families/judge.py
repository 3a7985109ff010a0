# SPDX-License-Identifier: Apache-2.0
"""What gnsfast makes of one architecture as it is: every sample's norm of every parameter beside a
float64 loop over single samples.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

import gnsfast
from benchmarks.families.exceptions import SINGLE
from benchmarks.families.models import B, Built, Family, build
from benchmarks.record import first_line

RTOL = 1e-5
"""Largest relative error of a squared norm, of one parameter and one sample."""
NOISE = 1e-10
"""A difference below this share of the sample's whole squared norm is rounding (a key bias)."""
SPLITS = 1e-6
"""Largest relative difference between the batch's gradient and the sum of the samples', in float64.
Some models compute a softmax or a norm in float32 whatever their dtype.
"""
HEADS = ("logits", "image_embeds", "text_embeds")
"""Outputs that belong to one sample each. Without any, all that hold one entry a sample count."""
PACKAGE = Path(gnsfast.__file__).parent

Batch = dict[str, Any]


class Case(NamedTuple):
    """A model, its inputs, and the weight of each entry of its outputs in the loss."""

    model: nn.Module
    batch: Batch

    def at(self, dtype: torch.dtype) -> "Case":
        """A copy in another precision."""

        def cast(t: Any) -> Any:
            return t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t

        return Case(copy.deepcopy(self.model).to(dtype), pytree.tree_map(cast, self.batch))


class Truth(NamedTuple):
    """Parameter -> [B] squared norms. ``apart``: how far the batch's gradient is from the sum of
    the samples'.
    """

    sqnorms: dict[str, Tensor]
    apart: float


class Verdict(NamedTuple):
    """A word, what there is to say about it, and the share of the elements that are covered."""

    word: str
    why: str = ""
    covered: float | None = None


def row_of(family: Family, seed: int = 0) -> dict[str, Any]:
    """An architecture's row."""
    torch.manual_seed(seed)
    try:
        case = case_of(build(family))
        dtype = torch.float32 if family.name in SINGLE else torch.float64
        truth = truth_of(case, dtype)
    except Exception as error:  # of transformers' own: a reason, not the end
        return row(family, None, Verdict("not built", said(error)))
    elements = sum(p.numel() for p in case.model.parameters())
    return row(family, elements, verdict(case, truth))


def row(family: Family, elements: int | None, found: Verdict) -> dict[str, Any]:
    columns: dict[str, Any] = {"architecture": family.name, "model type": family.model_type}
    columns |= {"input": family.kind, "elements": elements, "verdict": found.word}
    # Not rounded up: 1 stands for every element.
    covered = found.covered if found.covered is None else int(found.covered * 1e4) / 1e4
    return columns | {"covered": covered, "why": found.why}


def outputs_of(result: Any) -> dict[str, Tensor]:
    """The tensors of a model's result that belong to one sample each, by their names."""
    if isinstance(result, Tensor):
        result = [result]
    items = result.items() if isinstance(result, ModelOutput) else enumerate(result)
    found = {str(k): t for k, t in items if isinstance(t, Tensor) and t.is_floating_point()}
    return {k: found[k] for k in HEADS if k in found} or found


def case_of(built: Built) -> Case:
    """The loss is a sum over samples with random weights, in which no gradient cancels."""
    with torch.no_grad():
        outputs = outputs_of(built.model(**built.inputs))
    weights = {k: torch.randn_like(t) for k, t in outputs.items() if t.ndim and len(t) == B}
    if not weights:
        shapes = ", ".join(f"{k} {list(t.shape)}" for k, t in outputs.items())
        raise ValueError(f"no output holds one entry for each sample: {shapes or 'no tensors'}")
    return Case(built.model, {"inputs": built.inputs, "weights": weights})


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Entries that the model masks by an infinite value do not count."""
    outputs = outputs_of(model(**batch["inputs"]))
    parts = [(outputs[k] * w)[outputs[k].isfinite()].sum() for k, w in batch["weights"].items()]
    return torch.stack(parts).sum()


def truth_of(case: Case, dtype: torch.dtype) -> Truth:
    """By autograd over single samples, with the model in ``dtype``.

    A sample of a model with batch norm is a batch of two copies of which the loss counts one: the
    gradients of torch 2.13's batch norm in evaluation mode are wrong for one channels-last image.
    """
    model, batch = case.at(dtype)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    own = list(parameters.values())
    copies = 1 + any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())

    def gradients(part: Batch) -> list[Tensor]:
        model.zero_grad()
        loss_of(model, part).backward()  # not autograd.grad: reversible layers write to .grad
        return [torch.zeros_like(p) if p.grad is None else p.grad.double() for p in own]

    sqnorms = {name: torch.zeros(B, dtype=torch.float64) for name in parameters}
    with default_dtype(dtype):
        left = gradients(batch)
        whole = sum(g.square().sum().item() for g in left)
        for b in range(B):
            grads = gradients(sample_of(batch, b, copies))
            left = [rest - g for rest, g in zip(left, grads)]
            for name, g in zip(parameters, grads):
                sqnorms[name][b] = g.square().sum()
    apart = sum(g.square().sum().item() for g in left)
    return Truth(sqnorms, (apart / whole) ** 0.5 if whole else float("inf"))


def sample_of(batch: Batch, b: int, copies: int) -> Batch:
    """Sample ``b`` as a batch of its own; what does not hold one entry a sample stays whole."""

    def pick(t: Any) -> Any:
        return t[[b] * copies] if isinstance(t, Tensor) and t.ndim and len(t) == B else t

    found: Batch = pytree.tree_map(pick, batch)
    for weight in found["weights"].values():
        weight[1:] = 0.0
    return found


def verdict(case: Case, truth: Truth) -> Verdict:
    """What came of a model as it is."""
    model, batch = case.at(torch.float32)
    try:
        norms = norms_of(model, batch)
    except Exception as error:  # the refusal is the finding
        return Verdict("refused" if refuses(error) else "raises", said(error))
    coverage = gnsfast.coverage(model)
    left = Counter[str]()
    for each in coverage.rows:
        if not each.static and each.route != "frozen":
            left[cause(each.reason)] += each.elements
    share = coverage.covered_fraction
    why = "; ".join(f"{n:,} elements left out: {reason}" for reason, n in left.most_common())
    if truth.apart > SPLITS:
        apart = f"the batch's gradient is {truth.apart:.0e} away from the sum of the samples'"
        return Verdict("samples tied", apart, share)
    errors = errors_of(norms, truth)
    if max(errors.values()) > RTOL:
        if beyond := beyond_rounding(errors, model, case, truth):
            return Verdict("wrong", wrong(model, beyond), share)
        rounded = f"{max(errors.values()):.0e} off by rounding, as float32 autograd is"
        why = "; ".join(filter(None, (why, rounded)))
    return Verdict("right", why, share)


def beyond_rounding(
    errors: dict[str, float], model: nn.Module, case: Case, truth: Truth
) -> dict[str, float]:
    """Those of ``errors`` that float32 does not explain. Some models amplify rounding.

    It explains an error of at most twice the worst of float32 autograd over single samples if it is
    half as large, or less, with the model in float64. Where a model computes in float32 whatever
    its dtype, the limit is twice the error of float32 autograd at the same parameter, below 1e-4.
    """
    plain = errors_of(truth_of(case, torch.float32).sqnorms, truth)
    exact = errors_of(norms_of(model.double(), case.at(torch.float64).batch), truth)
    worst = max(plain.values())
    explained = {
        name
        for name, e in errors.items()
        if (e <= 2 * worst and exact[name] <= e / 2) or e <= 2 * plain[name] <= 2e-4
    }
    return {name: e for name, e in errors.items() if e > RTOL and name not in explained}


def norms_of(model: nn.Module, batch: Batch) -> gnsfast.SampleNorms:
    """The norms of one backward pass."""
    with default_dtype(next(model.parameters()).dtype):
        with gnsfast.per_sample_sqnorms(model, B) as norms:
            loss_of(model, batch).backward()
    return norms


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Of what a model creates in its forward."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def wrong(model: nn.Module, errors: dict[str, float]) -> str:
    """The worst parameter, by how much, and of how many."""
    worst = max(errors, key=lambda name: errors[name])
    owner = type(model.get_submodule(worst.rpartition(".")[0])).__name__
    return f"{worst} ({owner}) is off by {errors[worst]:.1e}, one of {len(errors)} parameters"


def errors_of(norms: Any, truth: Truth) -> dict[str, float]:
    """The largest relative error of each parameter's samples, infinite for a NaN."""
    total_B = torch.stack(list(truth.sqnorms.values())).sum(0)
    errors = {}
    for name in norms:
        want_B = truth.sqnorms[name]
        error_B = ((norms[name].double() - want_B).abs() - NOISE * total_B).clamp_min(0)
        error_B = (error_B / want_B.clamp_min(1e-300)).nan_to_num(nan=float("inf"))
        errors[name] = error_B.max().item()
    return errors


def refuses(error: BaseException) -> bool:
    """Whether gnsfast raised it, rather than the model or torch."""
    deepest = extract_tb(error.__traceback__)[-1].filename
    return PACKAGE in Path(deepest).parents and isinstance(error, (ValueError, RuntimeError))


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def cause(why: str) -> str:
    """A message without the names and numbers of one model, and without the last remedy."""
    why = re.sub(r" (Check num_samples|If this is no mistake|gnsfast\.(conf|cover)).*", "", why)
    why = re.sub(r"^(\w+Error: )[\w.]+:", r"\1a parameter:", why)
    why = re.sub(r"'[\w.]+'", "'...'", re.sub(r"\[[\d, ]*\]", "[...]", why))
    return re.sub(r"\d[\d,.]*", "n", why)


def causes(why: str) -> set[str]:
    """The causes in the ``why`` of a verdict."""
    return {cause(part) for part in re.split(r"; (?=[\d,]+ elements|\d\S* off by)", why) if part}
