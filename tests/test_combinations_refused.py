# SPDX-License-Identifier: Apache-2.0
"""What the table of ``combinations`` refuses to plans made by hand, DTensors and the estimator."""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_combinations import MEMBERS, STARTS, B, D, T, floats
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import gnsfast
from gnsfast.combinations import (
    DOCUMENTS,
    GROUPS,
    METRIC,
    SIGN,
    SPECTRAL,
    TENSOR_PARALLEL,
    TIED,
    reason,
)
from gnsfast.functional import Grams, Groups, Plan, Squares


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
@pytest.mark.parametrize("feature", [DOCUMENTS, METRIC, SIGN, SPECTRAL, GROUPS, TIED])
def test_tensor_parallelism(mesh: Any, feature: str) -> None:
    """What goes with it is proven by ``test_model_parallel.py``; the rest is refused."""
    shared = lambda t: distribute_tensor(t.detach(), mesh, [Replicate()])
    w, probe = shared(torch.randn(5, D)).requires_grad_(), torch.zeros(1, B + 2)
    plans = {
        DOCUMENTS: Plan(starts=STARTS),
        METRIC: Plan(moments=(torch.rand(5, D),), constants_P2=torch.ones(1, 2)),
        SIGN: Plan(second=(Squares(lambda: [torch.zeros(5, D)]),)),
        SPECTRAL: Plan(second=(Grams(lambda: [torch.zeros(5, 5)]),)),
        GROUPS: Plan(groups=Groups.of(*MEMBERS)),
    }
    probe = torch.zeros(
        1 + (feature == METRIC), B + 2 + 2 * (feature == GROUPS), requires_grad=True
    )
    link = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, D), torch.zeros(B, T, D)
    x, links = shared(floats()), (link,) if feature == TIED else ()
    with pytest.raises(
        NotImplementedError, match=re.escape(reason([feature, TENSOR_PARALLEL], "linear"))
    ):
        gnsfast.functional.linear(x, w, None, probe, plans.get(feature, Plan()), links)


HAND = [pair for pair in combinations((DOCUMENTS, METRIC, GROUPS), 2) if reason(pair)]


@pytest.mark.parametrize("pair", HAND, ids=str)
def test_plans_by_hand(pair: tuple[str, str]) -> None:
    """A plan that asks for both would leave one of them without a gradient."""
    fields: dict[str, Any] = {
        DOCUMENTS: {"starts": torch.tensor([0, 3, 8])},
        METRIC: {"moments": (torch.rand(5, D),), "constants_P2": torch.ones(1, 2)},
        GROUPS: {"groups": Groups.of(torch.tensor([0]), torch.tensor([1]))},
    }
    plan = Plan(**{k: v for f in pair for k, v in fields[f].items()})
    w = torch.randn(5, D, requires_grad=True)
    probe = torch.zeros(1 + (METRIC in pair), 2 + 2 + 2 * (GROUPS in pair), requires_grad=True)
    calls = {
        "linear": lambda: gnsfast.functional.linear(torch.randn(8, D), w, None, probe, plan),
        "embedding": lambda: gnsfast.functional.embedding(torch.arange(8) % 5, w, probe, plan),
        "layer_norm": lambda: gnsfast.functional.layer_norm(
            torch.randn(8, D), (D,), w[0], None, probe, plan
        ),
        "rms_norm": lambda: gnsfast.functional.rms_norm(torch.randn(8, D), w[0], probe, plan),
    }
    assert len(HAND) == 2
    for layer, call in calls.items():
        with pytest.raises(NotImplementedError, match=re.escape(reason(pair, layer))):
            call()


def test_estimator() -> None:
    """What a model is asked for as a whole."""
    model = nn.Sequential(nn.Linear(D, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(NotImplementedError, match=re.escape(reason([METRIC, GROUPS]))):
        gnsfast.GradientNoiseScale(model, groups=["a"], metric="adam", optimizer=optimizer)
    gns = gnsfast.GradientNoiseScale(model, metric="adam", optimizer=optimizer)
    with pytest.raises(NotImplementedError, match=re.escape(reason([METRIC, DOCUMENTS]))):
        with gns.microbatch(3, tokens=torch.ones(3), cu_seqlens=STARTS):
            pass
