# SPDX-License-Identifier: Apache-2.0
"""Trackers write metrics to JSON lines, TensorBoard or Weights & Biases."""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from gnsfast.estimator import LargestSample
from gnsfast.integrations.needed import needed
from gnsfast.noise_scale import METRICS, OTHERS, UNEQUAL, Estimate, NoiseScale

FORMAT = 1
"""The format of run logs, which their header names and ``gnsfast report`` checks."""

SCALES = dict(zip(METRICS, ("gns/b_simple", *(f"gns/{metric}" for metric in OTHERS))))
"""The name of the noise scale in each metric."""

PRESENT = "gns/present"
"""The name of the noise scale at the weights of the newest update."""

LARGEST = "largest samples"
"""The kind of a line with samples whose gradients are large."""


@runtime_checkable
class Tracker(Protocol):
    """Receives the named numbers of an optimizer step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def metrics(
    result: NoiseScale,
    *,
    tokens: int | None = None,
    batch_tokens: float | None = None,
    per_module: bool = False,
) -> dict[str, float]:
    """The numbers of ``gns.compute()`` under flat names.

    - ``gns/b_simple`` is the noise scale in samples; ``gns/b_simple_lo`` and ``gns/b_simple_hi``
      are the ends of its 95 % interval. If the window only gives a lower bound, there is only
      ``gns/b_simple_lo``: the noise scale is at least that large. If it only gives an upper bound,
      ``gns/b_simple_lo`` is 0, and there is no ``gns/b_simple``.
    - ``gns/present`` is the noise scale at the weights of the newest update, by the window's trend,
      with ``_lo`` and ``_hi``. The others are means over the window, which lag behind.
    - ``gns/adam``, ``gns/sign``, ``gns/spectral`` and ``gns/group/<name>`` are the noise scales in
      other metrics and of groups, also with ``_lo`` and ``_hi``.
    - ``gns/b_simple_from_micro_batches`` is 1 where micro-batches show the noise instead of
      samples, and absent elsewhere.
    - ``gns/clusters`` is the noise scale of samples that come in clusters, and
      ``gns/clusters_independent`` that of samples each of a cluster of its own.
      ``gns/clusters_correlation`` and ``gns/clusters_worth`` say how much the samples of a cluster
      have in common, and what one more of them is worth beside one of a new cluster. All four have
      ``_lo`` and ``_hi``.
    - ``gns/layer/<path>`` is the noise scale of a module, with ``gns/layer_lo/<path>`` and
      ``gns/layer_hi/<path>`` (no suffixes, because a path may end in ``_lo``).
    - ``gns/trace`` is tr Σ, ``gns/grad_sq`` is |G|², and ``gns/covered`` is the share of the
      trainable elements that ``gns/b_simple`` measures. ``gns/covered_norm`` is that of the squared
      gradient norms, of the samples that the model was learnt from.
    - ``gns/largest`` is the largest share that a sample has in the newest update, with
      ``keep_largest``.
    - ``gns/updates``, ``gns/skipped`` and ``gns/drift`` (0 or 1) describe the window, and
      ``batch/size`` is the mean number of samples in an update. One update in ``gns/every`` is
      measured, and ``gns/cost`` is the share of the time that this takes, with a ``budget``.
      ``gns/errors`` counts the updates that errors have dropped, with ``on_error="skip"``.
    - ``gns/unequal`` is there where micro-batches weigh tokens unequally: see
      ``NoiseScale.unequal``.

    What is not measured is left out.

    Args:
        tokens: the tokens that training has seen so far, logged as ``tokens``.
        batch_tokens: the tokens of an update, logged as ``batch/tokens``.
        per_module: also log the noise scale of every module, with its interval.

    >>> from gnsfast.integrations.trackers import metrics
    >>> gns = gnsfast.GradientNoiseScale(torch.nn.Linear(5, 2))
    >>> metrics(gns.compute(), tokens=4096)
    {'gns/updates': 0.0, 'gns/skipped': 0.0, 'gns/drift': 0.0, 'tokens': 4096.0}
    """
    found: dict[str, float | None] = {**_scale(SCALES["euclidean"], result)}
    if found:
        found |= {"gns/trace": result.trace, "gns/grad_sq": result.grad_sqnorm}
        if result.noise_from == "micro_batches":
            found["gns/b_simple_from_micro_batches"] = 1.0
    found |= _scale(PRESENT, result.present)
    found |= {
        "gns/updates": result.updates,
        "gns/skipped": result.skipped,
        "gns/drift": result.drift,
        "gns/covered": result.covered,
        "gns/covered_norm": result.covered_norm,
        "gns/largest": result.largest,
        "gns/every": result.every if result.cost == result.cost else None,
        "gns/cost": result.cost,
        "gns/errors": result.errors or None,
        "gns/unequal": result.unequal if result.unequal > UNEQUAL else None,
        "batch/size": result.samples / result.updates if result.updates else None,
        "tokens": tokens,
        "batch/tokens": batch_tokens,
    }
    for metric, scale in result.others.items():
        found |= _scale(SCALES[metric], scale)
    for name, group in result.per_group.items():
        found |= _scale(f"gns/group/{name}", group)
    if (clusters := result.clusters) is not None:
        found |= _scale("gns/clusters", clusters)
        found |= _scale("gns/clusters_independent", clusters.independent)
        for name in ("correlation", "worth"):
            ends = zip(("", "_lo", "_hi"), getattr(clusters, name))
            if clusters.updates:
                found |= {f"gns/clusters_{name}{end}": value for end, value in ends}
    if per_module:
        for path, m in result.per_module.items():
            names = f"gns/layer/{path}", f"gns/layer_lo/{path}", f"gns/layer_hi/{path}"
            found |= _interval(names, m)
    return _finite(found)


def largest_samples(samples: Iterable[LargestSample], step: int) -> dict[str, Any]:
    """What ``gns.largest()`` returned, as a line for ``JSONLTracker.record``: ``gnsfast report``
    lists the samples and draws them at this step. It shows a sample once, also where the window
    holds it at several steps.

    >>> from gnsfast.integrations.trackers import largest_samples
    >>> gns = gnsfast.GradientNoiseScale(torch.nn.Linear(5, 2), keep_largest=4)
    >>> largest_samples(gns.largest(), step=10)
    {'kind': 'largest samples', 'step': 10, 'samples': []}
    """
    return {"kind": LARGEST, "step": step, "samples": [each.record() for each in samples]}


class JSONLTracker:
    """Appends lines to ``path``, each a JSON object with ``step`` and the metrics.

    NaN and infinities, which JSON lacks, become ``null``. If a crash left half a line at the end of
    ``path``, the tracker removes it. ``gnsfast report`` draws the file.

    Args:
        path: the file. The tracker makes its folder.
        run: facts about the run, such as ``{"name": "small", "steps": 1000}``, for a first line of
            kind ``"run"``. ``close()`` then writes a last line of kind ``"end"``.

    >>> import tempfile
    >>> from gnsfast.integrations.trackers import JSONLTracker
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tracker = JSONLTracker(f"{folder}/run.jsonl", run={"name": "small"})
    ...     tracker.log({"gns/b_simple": 31.5, "loss": float("nan")}, step=10)
    ...     tracker.close()
    ...     print(open(f"{folder}/run.jsonl").read(), end="")
    {"kind": "run", "format": 1, "name": "small"}
    {"step": 10, "gns/b_simple": 31.5, "loss": null}
    {"kind": "end"}
    """

    def __init__(
        self, path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None
    ) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(Path(path))
        self._file = open(path, "a", buffering=1, encoding="utf-8")
        self._ends = run is not None
        if run is not None:
            self.record({"kind": "run", "format": FORMAT, **run})

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def record(self, record: Mapping[str, Any]) -> None:
        """Write a line other than metrics: a decision, a measurement, a header.

        Raises:
            ValueError: if it has no ``"kind"``.
        """
        if not isinstance(record.get("kind"), str):
            raise ValueError(f"a record needs a 'kind', which must be a string: {dict(record)!r}")
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_nulls(record), allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._ends and not self._file.closed:
            self.record({"kind": "end"})
        self._file.close()


class TensorBoardTracker:
    """Writes scalars to a TensorBoard event file in ``folder``, without NaN and infinities."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        with needed("TensorBoardTracker", "tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in _finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to a run of Weights & Biases, without NaN and infinities.

    The x-axis of ``gns/*`` and ``batch/*`` is ``tokens`` if the first metrics hold it, else
    ``step``. Both are logged as metrics and not as W&B's own step, so that other code can log to
    the same run.

    Args:
        run: an open run; ``close()`` leaves it open.
        project: opens a run of this project by ``wandb.init(project=project, **options)``, which
            ``close()`` finishes. ``mode="offline"`` needs no network.

    Raises:
        ImportError: without wandb.
        TypeError: for both a run and a project, or neither.
    """

    def __init__(self, run: Any = None, *, project: str | None = None, **options: Any) -> None:
        if (run is None) == (project is None) or (run is not None and options):
            raise TypeError(
                "WandbTracker takes either an open run, WandbTracker(wandb.init(...)), or a "
                "project with options of wandb.init, WandbTracker(project=...)"
            )
        self._own = run is None
        if run is None:
            with needed("WandbTracker", "wandb", "wandb"):
                import wandb
            run = wandb.init(project=project, **options)
        self.run: Any = run
        self._axis: str | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self._axis is None:
            self._axis = "tokens" if "tokens" in metrics else "step"
            self.run.define_metric(self._axis)
            for names in ("gns/*", "batch/*"):
                self.run.define_metric(names, step_metric=self._axis)
        self.run.log({**_finite(metrics), "step": step})

    def close(self) -> None:
        if self._own:
            self.run.finish()


def _scale(name: str, found: Estimate) -> dict[str, float]:
    return _interval((name, f"{name}_lo", f"{name}_hi"), found)


def _interval(names: tuple[str, str, str], found: Estimate) -> dict[str, float]:
    """A noise scale, its lower and its upper end, under these names: no value where it is not
    resolved, nothing where it was not measured.
    """
    value, lower, upper = names
    if math.isnan(found.noise_scale):
        return {}
    resolved = {value: found.noise_scale} if found.resolved else {}
    return _finite({**resolved, lower: found.lower, upper: found.upper})


def _nulls(value: Any) -> Any:
    """A copy with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _nulls(v) for k, v in value.items()}
    return [_nulls(v) for v in value] if isinstance(value, list | tuple) else value


def _end_last_line(path: Path) -> None:
    """Have the file end in a whole line: cut half a line off, or add a missing newline."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
            tail = whole[(start := whole.rfind(b"\n") + 1) :]
        if not tail:
            return
        if not tail.startswith(b"{"):
            raise ValueError(
                f"{path} does not end in a line of JSON, so it is no log: name another file"
            )
        try:
            json.loads(tail)
        except ValueError:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are known and finite."""
    known = {name: float(value) for name, value in metrics.items() if value is not None}
    return {name: value for name, value in known.items() if math.isfinite(value)}
