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
    **how: Any,
) -> CriticalBatch:
    """``averaged`` of several measurements of one checkpoint, each on data of its own.

    The first is that of ``measure_critical_batch`` in the same folder. Before each other one the
    run, at the weights of the checkpoint, skips the data that the branches before it trained; its
    branches are in ``repeat-1``, ``repeat-2`` and so on below the folder. The averaged result is
    the folder's own. To continue, or to add repeats, make the call again.

    Args:
        run: with a method ``skip(tokens)``, such as ``TorchRun``'s.
        repeats: measurements, at least 2. They cost as many times the branches.
        how: further arguments of ``measure_critical_batch``.

    Raises:
        ValueError: for a run that cannot skip data, and as ``measure_critical_batch``.
        BranchError: as there.
    """
    integer("repeats", repeats, 2)
    skip = getattr(run, "skip", None)
    if not callable(skip):
        raise ValueError(
            f"repeats need other data each time, and {type(run).__name__} has no skip(tokens), "
            "which would go on with later samples"
        )
    path, ks = Path(folder), tuple(k)
    how |= {"k": ks, "delta_tokens": delta_tokens}
    longest = delta_tokens + round(max(ks, default=1) * run.batch_size) * run.tokens_per_sample
    found = [measure_critical_batch(run, folder=path, noise_scale=noise_scale, **how)]
    files = BranchFolder(path)
    with restored(run, files):
        for number in range(1, repeats):
            skip(longest)
            below = path / f"repeat-{number}"
            found.append(measure_critical_batch(run, folder=below, noise_scale=False, **how))
    result = averaged(found)
    first(lambda: files.write_result(result.record()))
    return result
