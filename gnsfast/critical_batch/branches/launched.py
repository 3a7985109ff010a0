# SPDX-License-Identifier: Apache-2.0
"""The module that each process of ``launch`` runs. Its only argument is the work."""

import base64
import gc
import os
import pickle
import sys
from typing import Any

import torch.distributed as dist

from gnsfast.critical_batch.branches.branch_executors import noted
from gnsfast.errors import BranchError
from gnsfast.parallel import process_count

SRUN = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "MASTER_ADDR": "SLURM_LAUNCH_NODE_IPADDR",
}
"""The variables that ``init_process_group`` reads, and what ``srun`` calls them."""


def main() -> None:
    """Run the work in a launched process."""
    if "RANK" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ.update({name: os.environ[slurm] for name, slurm in SRUN.items()})
        step = int(os.environ["SLURM_JOB_ID"]) * 31 + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(20_000 + step % 10_000))
    sys.path, job = pickle.loads(base64.b64decode(sys.argv[1]))
    folder, name, work, make_run, *args = pickle.loads(job)

    def make() -> Any:
        run, started = make_run(), int(os.environ.get("WORLD_SIZE", 1))
        if process_count() != started:
            raise BranchError(
                f"{started} processes were launched, but make_run returned a run of "
                f"{process_count()}: call torch.distributed.init_process_group() in make_run"
            )
        return run

    noted(folder, name, work, make, *args)
    gc.collect()  # a model in a cycle holds process groups, whose threads may abort the exit
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
