# SPDX-License-Identifier: Apache-2.0
"""Trains the branches of a folder on any executor, and waits for those that others train."""

import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from gnsfast.critical_batch.branches.branch_folder import BranchFolder
from gnsfast.critical_batch.branches.branch_process import Job, reason_of, train_job
from gnsfast.critical_batch.branches.measurement import Branch
from gnsfast.parallel import first, process_count

POLL = 0.02, 2.0
"""Seconds between two checks of the running branches. They grow from the first to the second."""


class Call(Protocol):
    """What an executor returns for a call: a future of any kind."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...

    def cancel(self) -> Any: ...


class Submits(Protocol):
    """Any executor: one of ``concurrent.futures``, submitit's, ``dask_client.get_executor()``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Call: ...


class Made:
    """A call that has ended."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        return self._value

    def cancel(self) -> bool:
        return False


class Here:
    """An executor that calls at once, in this process. Exceptions reach the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Made:
        return Made(fn(*args))


def told(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What ``work`` returns, or its exception as text, which every executor can pass on."""
    try:
        return {"value": work(*args)}
    except Exception as error:
        if process_count() > 1:  # the others wait for this process: it has to end
            raise
        return {"error": reason_of(error)}


class Work:
    """A branch to train, by a call of this process or by another process that has begun it.

    A call that ends without a result was lost, for example with its machine. Its process may go on
    without the caller, or a cluster may have moved it. So the branch has failed only once its last
    process is over.

    Args:
        submit: has ``told`` call its arguments, on an executor.
    """

    def __init__(self, submit: Callable[..., Call], folder: BranchFolder, job: Job) -> None:
        self.submit, self.folder, self.job = submit, folder, job
        self.attempts = folder.attempts(job.k)
        self.call: Call | None = None
        self.failure = ""

    def look(self) -> Branch | None:
        """Begin the branch where nobody has; return it once it has ended."""
        if self.call is None:
            branch, over = first(self._elsewhere)
            if branch is not None or over is None:
                return branch
            if self.failure:
                return self.job.failed(self.failure)
            self.folder.forget_failure(self.job.k)
            self.call = self.submit(train_job, self.job, over)
        if not self.call.done():
            return None
        call, self.call = self.call, None
        try:
            said = call.result()
        except Exception as error:
            said = {"error": reason_of(error)}
        if said.get("value") is not None:
            return Branch.from_record(said["value"])
        self.failure = said.get("error") or "the process that trained it was lost"
        return None

    def _elsewhere(self) -> tuple[Branch | None, int | None]:
        """The branch, where it is finished, and the attempt that is over, where one may begin."""
        over = self.attempts.over()
        return (None if over is None else self.folder.branch(self.job.k)), over


def train_branches(left: list[Work]) -> Generator[Branch, None, None]:
    """Train branches; yield them as they end. Closing it cancels the calls that wait."""
    left, pause = [*left], POLL[0]
    try:
        while left:
            ended = False
            for work in [*left]:
                if (branch := work.look()) is not None:
                    left.remove(work)
                    ended = True
                    yield branch
            pause = POLL[0] if ended else min(1.5 * pause, POLL[1])
            if left and not ended:
                time.sleep(pause)
    finally:
        for work in left:
            if work.call is not None:
                work.call.cancel()
