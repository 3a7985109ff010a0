# SPDX-License-Identifier: Apache-2.0
"""What the table of ``combinations`` refuses to plans made by hand, DTensors and the estimator."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_combinations import MEMBERS, STARTS, B, D, T, floats
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import gnsfast
from gnsfast.combinations import (
    DOCUMENTS,
    GROUPS,
    TENSOR_PARALLEL,
    TIED,
    reason,
)
from gnsfast.functional import Groups, Plan


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_groups_of_documents_in_a_shared_weight() -> None:
    """No link has the sums of groups of documents. A model that is followed joins these uses."""
    plan = Plan(starts=torch.tensor([0, 3, 8]), groups=Groups.of(torch.tensor([1, 0])))
    w, probe = torch.randn(5, D, requires_grad=True), torch.zeros(1, 5, requires_grad=True)
    wanted = re.escape(reason([DOCUMENTS, GROUPS, TIED], "embedding"))
    with pytest.raises(NotImplementedError, match=wanted):
        gnsfast.functional.embedding(torch.arange(8) % 5, w, probe, plan, tied=True)
    assert reason([DOCUMENTS, GROUPS, TIED], "linear") and not reason([DOCUMENTS, GROUPS], "linear")


@pytest.mark.dist
@pytest.mark.parametrize("feature", [DOCUMENTS, GROUPS, TIED])
def test_tensor_parallelism(mesh: Any, feature: str) -> None:
    """What goes with it is proven by ``test_model_parallel.py``; the rest is refused."""
    shared = lambda t: distribute_tensor(t.detach(), mesh, [Replicate()])
    w, probe = shared(torch.randn(5, D)).requires_grad_(), torch.zeros(1, B + 2)
    plans = {
        DOCUMENTS: Plan(starts=STARTS),
        GROUPS: Plan(groups=Groups.of(*MEMBERS)),
    }
    probe = torch.zeros(1, B + 2 + 2 * (feature == GROUPS), requires_grad=True)
    link = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, D), torch.zeros(B, T, D)
    x, links = shared(floats()), (link,) if feature == TIED else ()
    with pytest.raises(
        NotImplementedError, match=re.escape(reason([feature, TENSOR_PARALLEL], "linear"))
    ):
        gnsfast.functional.linear(x, w, None, probe, plans.get(feature, Plan()), links)
