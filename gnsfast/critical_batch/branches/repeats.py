# SPDX-License-Identifier: Apache-2.0
"""``measure_repeatedly``: the same checkpoint, measured with other data each time, and averaged."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gnsfast.arguments import integer
from gnsfast.critical_batch.branches.averaging import averaged
from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_protocol import BranchRun
from gnsfast.critical_batch.branches.branches import measure_critical_batch, restored
from gnsfast.critical_batch.branches.measurement import CriticalBatch
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
