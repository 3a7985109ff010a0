# SPDX-License-Identifier: Apache-2.0
"""``measure_repeatedly``: the same checkpoint, measured with other data each time, and averaged."""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnsfast.arguments import integer
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branches import measure_critical_batch, restored
from gnsfast.critical_batch.branches.measurement import SETTINGS, Branch, CriticalBatch
from gnsfast.parallel import first


def measure_repeatedly(
    run: BranchRun,
    *,
    folder: str | os.PathLike[str],
    repeats: int,
    delta_tokens: int,
    k: Iterable[float] = (0.5, 1, 2, 4, 8),
    noise_scale: bool = True,
    factor: str | None = None,
    **how: Any,
) -> CriticalBatch:
    """Measure one checkpoint several times, each time on other data, and return ``averaged``.

    The first measurement is that of ``measure_critical_batch`` in the same folder. Before each
    further one the run goes back to the weights of the checkpoint and skips the data that earlier
    branches trained on. Its branches are in ``repeat-1``, ``repeat-2`` and so on below the folder,
    and the folder itself gets the averaged result. To continue, or to add repeats, call again.

    Args:
        run: a run with a method ``skip(tokens)``, such as ``TorchRun``.
        repeats: the number of measurements, at least 2. Each costs as much as a single one.
        how: further arguments of ``measure_critical_batch``.

    Raises:
        ValueError: for a run that cannot skip data, and where ``measure_critical_batch`` raises it.
        BranchError: where ``measure_critical_batch`` raises it.
    """
    integer("repeats", repeats, 2)
    skip = getattr(run, "skip", None)
    if not callable(skip):
        raise ValueError(
            f"each repeat trains on other data, and {type(run).__name__} has no skip(tokens) to "
            "reach it: add that method (gnsfast.critical_batch.BranchRun), or measure once"
        )
    path, ks = Path(folder), tuple(k)
    how |= {"k": ks, "delta_tokens": delta_tokens}
    longest = delta_tokens + round(max(ks, default=1) * run.batch_size) * run.tokens_per_sample
    measured: dict[str, Any] = {"noise_scale": noise_scale, "factor": factor}
    found = [measure_critical_batch(run, folder=path, **measured, **how)]
    files = BranchFolder(path)
    with restored(run, files):
        for number in range(1, repeats):
            skip(longest)
            below = path / f"repeat-{number}"
            found.append(measure_critical_batch(run, folder=below, noise_scale=False, **how))
    result = averaged(found)
    first(lambda: files.write_result(result.record()))
    return result


def averaged(measurements: Sequence[CriticalBatch]) -> CriticalBatch:
    """Apply the rule to the mean losses of several measurements.

    Each measurement starts from the same checkpoint and trains on other data: restore the same
    folder, take a stream of another seed, and measure into a new folder. ``loss_std`` of the result
    is the standard error of the mean, ``statistics.stdev(losses) / sqrt(len(losses))``. It includes
    what a single measurement cannot know: how much the weights depend on the data that a branch
    trained on. The result has each k that all measurements trained. A branch that diverged in one
    of them counts as diverged.

    Args:
        measurements: at least two, with the same checkpoint and settings.

    Raises:
        ValueError: for fewer than two measurements, or where a setting differs (the message names
            it).
        BranchError: where one of them lacks k = 1.

    >>> import math
    >>> from dataclasses import replace
    >>> from gnsfast.critical_batch import Branch, CriticalBatch
    >>> from gnsfast.critical_batch import averaged
    >>> one = CriticalBatch(
    ...     5000, 32, 10, 9000, 0.01, 0.5, "sqrt", "evaluate",
    ...     branches=(Branch(1.0, 32, 1.0, 2.0, math.nan, 28, 9000),
    ...               Branch(2.0, 64, 1.4, 2.1, math.nan, 14, 9000)),
    ... )
    >>> other = replace(one, branches=tuple(replace(b, loss=b.loss + 0.004) for b in one.branches))
    >>> [f"{b.loss:.3f} ± {b.loss_std:.3f}" for b in averaged([one, other]).branches]
    ['2.002 ± 0.002', '2.102 ± 0.002']
    """
    if len(measurements) < 2:
        raise ValueError(
            f"averaged() needs at least two measurements of one checkpoint, not {len(measurements)}"
        )
    first = measurements[0]
    for other in measurements[1:]:
        for name in SETTINGS:
            if (theirs := getattr(other, name)) != (ours := getattr(first, name)):
                raise ValueError(
                    f"the measurements differ in {name}: {ours!r} and {theirs!r}. An average needs "
                    "measurements of one checkpoint with the same settings"
                )
    by_k = [{b.k: b for b in m.branches} for m in measurements]
    shared = [k for k in by_k[0] if all(k in each for each in by_k)]
    missing = {k: "not trained in every measurement" for each in by_k for k in each}
    return replace(
        first,
        branches=tuple(_mean([each[k] for each in by_k]) for k in shared),
        missing={k: why for k, why in sorted(missing.items()) if k not in shared},
    )


def _mean(branches: Sequence[Branch]) -> Branch:
    losses = [b.loss for b in branches]
    if not all(map(math.isfinite, losses)):
        return replace(branches[0], loss=math.inf, loss_std=math.nan, state="diverged")
    error = statistics.stdev(losses) / math.sqrt(len(losses))
    return replace(branches[0], loss=statistics.fmean(losses), loss_std=error)
