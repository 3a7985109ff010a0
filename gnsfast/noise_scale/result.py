# SPDX-License-Identifier: Apache-2.0
"""The result of a measurement: a noise scale with its interval."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gnsfast.arguments import check_choice
from gnsfast.counts import counted, percent
from gnsfast.interval import NOT_KNOWN, Interval

OTHERS = {
    "adam": "under Adam's metric",
    "sign": "in sign descent's norm",
    "spectral": "in spectral descent's (Muon's) norm",
}
"""The noise scales beside the Euclidean one, by their fields in ``NoiseScale``, and in words."""

METRICS = ("euclidean", *OTHERS)


@dataclass(frozen=True)
class Estimate:
    """A noise scale in samples with its 95 % interval; NaN before the first measurement.

    ``upper`` is infinite where the window only says "at least ``lower``". ``lower`` is 0 where it
    only says "at most ``upper``", because one update holds most of the noise or the samples are
    alike. ``resolved`` says whether both ends are known. The interval holds the truth in 95 % of
    the windows with a finite ``upper``, if these are more than 1.25 % of all, and in 95 % of the
    others. Close to the border between both, ``upper`` is tens of times ``lower``, and
    ``noise_scale`` is then rather too small. More updates or samples give a narrower interval. If
    samples have heavy tails, the interval misses the truth more often: where one sample in a
    hundred is 10 times as large, it holds the truth in 65 % of the windows of 80 samples, and in
    88 % of those of 320.
    """

    noise_scale: float
    lower: float
    upper: float

    @property
    def interval(self) -> Interval:
        return Interval(self.noise_scale, self.lower, self.upper)

    @property
    def resolved(self) -> bool:
        return self.interval.resolved

    def __str__(self) -> str:
        if math.isnan(self.noise_scale):
            return "noise scale not measured yet"
        ends = self.interval.ends("{:,.4g}".format)
        if self.resolved:
            return f"noise scale {self.noise_scale:,.4g} samples (95 %: {ends})"
        if ends:
            return f"noise scale {ends} samples (95 %)"
        return "noise scale not resolved: it may have any size"


NO_ESTIMATE = Estimate(math.nan, 0.0, math.inf)


@dataclass(frozen=True)
class ModuleNoiseScale(Estimate):
    """A noise scale with its 95 % interval, and the two means whose ratio it is.

    ``noise_scale`` is ``trace / grad_sqnorm``, infinite where the mean |G|² is not positive.
    """

    trace: float
    grad_sqnorm: float


@dataclass(frozen=True)
class AdamNoiseScale(ModuleNoiseScale):
    """The noise scale under Adam's metric: ``trace`` is tr(PΣ) and ``grad_sqnorm`` GᵀPG.

    It comes from the gradients of an update's backward passes, in all processes: b times their
    variance is the variance of samples. An update needs two of them. The variance of K passes has
    K - 1 degrees of freedom. It covers all trained parameters.

    ``updates`` counts the updates that were used. The optimizer's first update is not: it has no
    second moments yet.

    >>> model = torch.nn.Linear(5, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    >>> for batch in torch.randn(8, 4, 16, 5):
    ...     with gns.update():
    ...         for x in batch:
    ...             with gns.microbatch(16, scale=1 / 4):
    ...                 (model(x).square().sum(1).mean() / 4).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> gns.compute().adam.updates
    7
    """

    updates: int

    def __str__(self) -> str:
        return f"under Adam's metric: {super().__str__()}, {counted(self.updates, 'update')}"


@dataclass(frozen=True)
class DualNormEstimate(Estimate):
    """A noise scale (σ / ‖G‖)² in a dual norm ‖·‖, and estimates of σ and ‖G‖.

    ``noise`` estimates σ, and is a little below it. ‖G‖ has no unbiased estimate:
    ``grad_norm_lower`` and ``grad_norm_upper`` estimate a lower and an upper bound, which come
    closer to each other with a larger batch. The interval reaches from one bound to the other, each
    with its 95 % limit, so it is wide where the batch is far below the noise scale.

    ``noise_scale`` lies between the bounds. It is right where the gradient's entries are spread as
    Gaussian noise is. It is up to π / 2 times too large where they are all alike, and several times
    too small where few of them hold most of the gradient. If the window does not show that ‖G‖ is
    positive, ``noise_scale`` and ``upper`` are infinite.
    """

    noise: float
    grad_norm_lower: float
    grad_norm_upper: float


@dataclass(frozen=True)
class DualNoiseScale(DualNormEstimate):
    """The noise scale in the dual norm of sign descent or of spectral descent.

    With ``metric`` ``"sign"`` it is (Σ_i σ_i / ‖G‖₁)², σ_i being the standard deviation of
    coordinate i over samples; with ``"spectral"`` (Σ tr C^½ / Σ ‖G‖_nuc)², summed over matrices, C
    = E (g_b - G)(g_b - G)ᵀ on the smaller side. The estimator keeps a float32 mean of the
    parameters' size, or of each smaller side squared.

    The noise is that of the gradients of an update's backward passes, in all processes: b times
    their variance is the variance of samples. An update needs two of them. The variance of K passes
    has K - 1 degrees of freedom. All trained parameters are measured; in the spectral norm all
    matrices but embeddings, or the matrices of ``optimizer``. Each pass adds twice to tensors of a
    parameter's size, and a measured update takes for each matrix two eigendecompositions and three
    SVDs: see ``every``.

    ``updates`` counts the updates that were used. The first is not: it has no earlier gradient to
    be compared with.
    ``left_out`` names the parameters that are in the Euclidean noise scale but not in this one.
    Source: Naganuma et al. 2026 (arXiv 2602.03001), who take the gradient of each data-parallel
    process.

    >>> model = torch.nn.Linear(5, 2)
    >>> gns = gnsfast.GradientNoiseScale(model, metric="sign")
    >>> for batch in torch.randn(8, 4, 16, 5):
    ...     with gns.update():
    ...         for x in batch:
    ...             with gns.microbatch(16, scale=1 / 4):
    ...                 (model(x).square().sum(1).mean() / 4).backward()
    ...     model.zero_grad()
    >>> gns.compute().sign.updates
    7
    """

    metric: str
    updates: int
    left_out: tuple[str, ...]
    per_module: Mapping[str, DualNormEstimate]

    def __str__(self) -> str:
        left_out = f", {counted(len(self.left_out), 'parameter')} left out" if self.left_out else ""
        norm = f"in the {self.metric} norm"
        return f"{norm}: {super().__str__()}, {counted(self.updates, 'update')}{left_out}"


@dataclass(frozen=True)
class GroupNoiseScale(ModuleNoiseScale):
    """The noise scale of one group of samples, from pairs of its samples within each micro-batch.

    ``updates`` counts the updates with at least two of the group's samples in a micro-batch, and
    ``samples`` counts their samples. Both may exceed the counts of the whole, which skips an update
    for a NaN in any group. ``left_out`` names the parameters without norms of groups: neither
    tr Σ nor |G|² includes them. With groups, gradients of gains in bfloat16 are rounded
    once per group.

    >>> model = torch.nn.Linear(5, 2)
    >>> gns = gnsfast.GradientNoiseScale(model, groups=["web", "code"])
    >>> for x in torch.randn(8, 4, 5):
    ...     with gns.update(4, groups=["web", "code", "web", "code"]):
    ...         model(x).square().sum(1).mean().backward()
    ...     model.zero_grad()
    >>> gns.compute().per_group["code"].samples
    16
    """

    updates: int
    samples: int
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        left_out = f", {counted(len(self.left_out), 'parameter')} left out" if self.left_out else ""
        used = f"{counted(self.updates, 'update')} ({counted(self.samples, 'sample')})"
        return f"{super().__str__()}, {used}{left_out}"


@dataclass(frozen=True)
class ClusterNoiseScale(ModuleNoiseScale):
    """The noise scale of samples that come in clusters, such as the rollouts of a prompt.

    ``noise_scale`` is the batch, in samples that come in such clusters, in which noise and gradient
    are equally large; ``in_clusters`` is the same in clusters. ``trace`` is their noise for each
    sample. Samples of a cluster are not independent, so that ``NoiseScale.noise_scale``, which
    takes them to be, is too small where they are alike. ``gnsfast.flag`` and controllers of the
    batch size use this one.

    ``independent`` is the noise scale of samples each of which is of a cluster of its own.
    ``correlation`` is ρ, the share of a sample's noise that it has in common with another of its
    cluster: 0 for independent samples, 1 for copies, at least -1 / (m - 1) in clusters of m.
    ``worth`` says whether to add samples to clusters or to add clusters: a sample more in a cluster
    lowers the noise ``worth`` times as much as a sample of a new cluster. It is (1 - ρ) / (1 + (m -
    1) ρ), so 1 for independent samples and 0 for copies.

    ``updates`` counts the updates that were used, those with at least two clusters, ``clusters``
    and ``samples`` what was in them.
    Source: ``gnsfast.noise_scale.clusters`` derives the estimates; Kish 1965 has the design effect.

    >>> model = torch.nn.Linear(5, 2)
    >>> gns = gnsfast.GradientNoiseScale(model)
    >>> for x in torch.randn(8, 4, 5):
    ...     with gns.update(16, clusters=4):
    ...         copies = x.repeat_interleave(4, 0)
    ...         model(copies).square().sum(1).mean().backward()
    ...     model.zero_grad()
    >>> found = gns.compute().clusters
    >>> found.clusters, f"{found.correlation.value:.3f}, {abs(found.worth.value):.3f}"
    (32, '1.000, 0.000')
    """

    independent: ModuleNoiseScale
    correlation: Interval
    worth: Interval
    updates: int
    clusters: int
    samples: int

    @property
    def size(self) -> float:
        """The mean number of samples in a cluster."""
        return self.samples / self.clusters if self.clusters else math.nan

    @property
    def in_clusters(self) -> Interval:
        """The noise scale in clusters."""
        return self.interval.times(1 / self.size)

    def __str__(self) -> str:
        if not self.updates:
            return f"clusters: {super().__str__()}: an update needs two or more clusters"
        alone = math.isnan(self.correlation.value)
        what = "sample" if alone else "samples"
        used = f"{counted(self.clusters, 'cluster')} of {self.size:.3g} {what}"
        found = f"in clusters: {super().__str__()}, {used}"
        if alone:
            return f"{found}, which have no correlation"
        return (
            f"{found}\n"
            f"each of a cluster of its own: {self.independent}\n"
            f"correlation {_three(self.correlation)} in a cluster: a sample more in each is worth "
            f"{_three(self.worth)} of a sample of a new one"
        )


def _three(found: Interval) -> str:
    """An interval that may end below zero."""
    value, lower, upper = (f"{end:.3g}" for end in found)
    return f"{value} (95 %: {lower} to {upper})"


@dataclass(frozen=True)
class NoiseScale(ModuleNoiseScale):
    """The noise scale of all covered parameters together, over the window.

    ``trace`` is tr Σ and ``grad_sqnorm`` is |G|², in the units of the loss before ``scale``.

    Args:
        drift: whether the noise scale moves within the window. The interval is then that of the
            mean of a changing noise scale.
        updates: the number of updates that were used, with ``samples`` samples in all.
        skipped: the number of updates with a NaN, an infinity or a single sample.
        per_module: noise scales by the path of the module that holds the parameters.
        adam: the noise scale under Adam's metric, where the estimator measures it; never part of
            the others.
        per_group: noise scales of groups of samples, where groups were named.
        sign, spectral: the noise scales in the dual norms of sign descent and of spectral descent
            (Muon), where the estimator measures them.
        covered: the share of the trainable elements that the noise scale measures.
        covered_norm: the same share of the squared gradient norms, of the samples that the model
            was learnt from.
        left_out: the names of the other trainable parameters. ``gnsfast.coverage`` says why.
        present: the noise scale at the weights of the newest update, by the window's trend; its
            interval also holds how far it leaves the trend from update to update. All other
            fields are means over the window, which lag behind.
        noise_from: ``"micro_batches"`` where mean gradients of micro-batches show the noise, not
            single samples (``unit="micro_batch"``).
        passes: how many such gradients, over all updates and processes.
        largest: the largest share that a sample has in the sum of squared norms of the newest
            update, where the estimator keeps the largest.
        clusters: the noise scale of samples that come in clusters, where ``update(clusters=)``
            says so. All other fields take samples to be independent.
        every: one update in so many is measured by now.
        cost: the share of the time that measuring takes, with a ``budget``.
        errors: how many updates an error of gnsfast has dropped, with ``on_error="skip"``.
        unequal: how unequally micro-batches and processes weigh tokens, or samples without
            ``tokens``: the root mean square, over samples, of the weight of a token of theirs, over
            its mean over tokens, so 1 where all weigh alike. It is above 1 where each micro-batch
            takes a mean over tokens of its own: all numbers are then those of that gradient, which
            is not the mean over all tokens of an update. NaN for ``source="local"``, where passes
            are measured by themselves.
        loss: why the table's proof of the loss failed (``gnsfast.learn(loss=...)``); empty where it
            did not, or was not asked for.
    """

    drift: bool
    updates: int
    skipped: int
    samples: int
    per_module: Mapping[str, ModuleNoiseScale]
    adam: AdamNoiseScale | None = None
    per_group: Mapping[str, GroupNoiseScale] = field(default_factory=dict)
    sign: DualNoiseScale | None = None
    spectral: DualNoiseScale | None = None
    covered: float = math.nan
    covered_norm: float = math.nan
    left_out: tuple[str, ...] = ()
    present: Estimate = NO_ESTIMATE
    noise_from: str = "samples"
    passes: int = 0
    largest: float = math.nan
    clusters: ClusterNoiseScale | None = None
    every: int = 1
    cost: float = math.nan
    errors: int = 0
    unequal: float = math.nan
    loss: str = ""

    @property
    def excess(self) -> tuple[float, float]:
        """How many times as large the errors of tr Σ and |G|² may be as from single samples: with K
        equal micro-batches of n samples in all √((n - 1) / (K - 1)) and √((n - 1) / (n - n / K)),
        for samples of Gaussian noise far below the noise scale. Else they are smaller.
        """
        if self.noise_from == "samples" or not self.updates:
            return 1.0, 1.0
        n, K = self.samples / self.updates, self.passes / self.updates
        return math.sqrt((n - 1) / (K - 1)), math.sqrt((n - 1) / (n - n / K))

    @property
    def warning(self) -> str:
        """What is odd about the loss, in words: it is in logs too. Empty where nothing is."""
        lines = []
        if self.unequal > UNEQUAL:
            lines.append(
                "Micro-batches weigh tokens unequally: the root mean square, over samples, of a "
                f"token's weight is {self.unequal:.3g} times its mean over tokens. This is the "
                "noise scale of that gradient, not of the mean over all tokens of an update. To "
                "train that mean, divide the sum of each micro-batch's losses by the tokens of the "
                "whole update."
            )
        if self.loss:
            lines.append(f"Proven for the model, not for the loss: {self.loss}.")
        return "\n".join(lines)

    @property
    def others(self) -> dict[str, Estimate]:
        """The noise scales beside the Euclidean one that are measured, by metric."""
        found = {metric: getattr(self, metric) for metric in OTHERS}
        return {metric: scale for metric, scale in found.items() if scale is not None}

    def under(self, metric: str) -> Estimate:
        """The noise scale in a metric: ``"euclidean"``, ``"adam"``, ``"sign"`` or ``"spectral"``.
        The Euclidean one is that of ``clusters`` where these are measured.

        Raises:
            ValueError: where the estimator does not measure it. The message says how to.
        """
        check_choice("metric", metric, METRICS)
        if metric == "euclidean":
            return self if self.clusters is None else self.clusters
        if metric in (others := self.others):
            return others[metric]
        optimizer = ", optimizer=optimizer" if metric == "adam" else ""
        raise ValueError(
            f"this estimator does not measure the noise scale {OTHERS[metric]}: make it with "
            f"GradientNoiseScale(model, metric={metric!r}{optimizer})"
        )

    def __str__(self) -> str:
        drift = ", drifting" if self.drift else ""
        skipped = f", {self.skipped} skipped (one sample, or a NaN)" if self.skipped else ""
        mean = f"{'mean ' if self.resolved else ''}over the last " if self.updates else ""
        used = f"{mean}{counted(self.updates, 'update')} ({counted(self.samples, 'sample')})"
        now = f"\nat the newest update: {self.present}" if self.present.lower > 0 else ""
        adam = "" if self.adam is None else f"\n{self.adam}"
        dual = "".join(f"\n{each}" for each in (self.sign, self.spectral) if each is not None)
        groups = "".join(f"\n{name}: {each}" for name, each in self.per_group.items())
        clusters = "" if self.clusters is None else f"\n{self.clusters}"
        alone = "" if self.clusters is None else ", as if samples were independent"
        often = ""
        if self.cost == self.cost:
            often = (
                f"\nmeasured in 1 of {counted(self.every, 'update')}, {self.cost:.2%} of the time"
            )
        if self.errors:
            often += f"\n{counted(self.errors, 'update')} dropped by an error, which the log tells"
        often += self.warning and f"\n{self.warning}"
        of = ""
        if self.left_out:
            some = ", ".join(self.left_out[:2]) + (", ..." if self.left_out[2:] else "")
            shares = f"{percent(self.covered)} of the trainable elements"
            if self.covered_norm == self.covered_norm:
                shares += f" and {percent(self.covered_norm)} of the squared gradient norms"
            of = f"\nmeasured on {shares}, without {some}"
        units = ""
        if self.noise_from != "samples":
            trace, grad_sqnorm = self.excess
            units = (
                f"\nfrom {self.passes:,} gradients of micro-batches, not from single samples: tr Σ "
                f"has up to {trace:.3g} times and |G|² {grad_sqnorm:.3g} times the error"
            )
        return (
            f"{super().__str__()}, {used}{skipped}{drift}{alone}{units}{often}{of}{now}{adam}{dual}"
            f"{groups}{clusters}"
        )


UNEQUAL = 1.01
"""From this on it is said that micro-batches weigh tokens unequally: their numbers of tokens vary
by 8 %."""

NOT_MEASURED = ModuleNoiseScale(math.nan, 0.0, math.inf, math.nan, math.nan)

NO_CLUSTERS = ClusterNoiseScale(
    **vars(NOT_MEASURED),
    independent=NOT_MEASURED,
    correlation=Interval(math.nan, -1.0, 1.0),
    worth=NOT_KNOWN,
    updates=0,
    clusters=0,
    samples=0,
)
