# SPDX-License-Identifier: Apache-2.0
"""``--executor``: the engine that runs branches as jobs."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gnsfast.critical_batch.branches import LOGS, reason_of


@contextmanager
def opened(name: str | None, options: Sequence[str], folder: Path) -> Iterator[Any]:
    """Open the executor with this name; without a name, yield None.

    Args:
        options: ``NAME=VALUE``, where VALUE is JSON or plain text.
        folder: the folder of the branches, in which the engine writes its logs.

    Raises:
        ValueError: for an engine that is unknown or not installed, or an unknown option.
    """
    if name is None:
        if options:
            raise ValueError(
                f"--executor-option {options[0]} needs an executor: add --executor "
                f"{' or --executor '.join(ENGINES)}"
            )
        yield None
        return
    if name not in ENGINES:
        raise ValueError(f"--executor must be {' or '.join(ENGINES)}, not {name!r}")
    values = dict(map(_option, options))
    with ExitStack() as stack:
        try:
            engine = ENGINES[name](values, folder, stack)
        except ImportError as error:
            raise ValueError(
                f"--executor {name} is not installed ({error}): pip install 'gnsfast[{name}]'"
            ) from error
        except Exception as error:  # an engine raises what it likes for a bad option
            raise ValueError(f"--executor {name}: {reason_of(error)}") from error
        yield engine


def _option(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if not name or not given:
        raise ValueError(f"--executor-option {text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _submitit(options: dict[str, Any], folder: Path, stack: ExitStack) -> Any:
    import submitit

    if not options.keys() & {"timeout_min", "slurm_time"}:
        raise ValueError(
            "submitit ends a job after 5 minutes by default: add --executor-option "
            "timeout_min=MINUTES"
        )
    cluster = options.pop("cluster", None)
    executor = submitit.AutoExecutor(folder / LOGS, cluster=cluster)
    if slurm := [name for name in options if name.startswith("slurm_")]:
        if cluster is None and executor.cluster != "slurm":
            raise ValueError(
                f"{slurm[0]} is an option of Slurm, and this machine has no srun: run the command "
                "on a machine with srun, or add --executor-option cluster=local, which starts all "
                "branches at once on this machine"
            )
    executor.update_parameters(**options)
    return executor


def _dask(options: dict[str, Any], folder: Path, stack: ExitStack) -> Any:
    import distributed

    return stack.enter_context(distributed.Client(**options)).get_executor(pure=False)  # type: ignore[no-untyped-call]


ENGINES: dict[str, Callable[[dict[str, Any], Path, ExitStack], Any]] = {
    "submitit": _submitit,
    "dask": _dask,
}
