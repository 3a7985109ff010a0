# SPDX-License-Identifier: Apache-2.0
"""Which passes are audited: few, but at all phases of all short periods."""

import pytest
import torch
import unseen
from torch import Tensor, nn

import gnsfast
from gnsfast.probing import gradient_watch
from gnsfast.probing.gradient_watch import WHOLE

D = 3
PERIODS = range(1, 8)


def audited(
    monkeypatch: pytest.MonkeyPatch, updates: int, A: int = 1, every: int = 0
) -> list[tuple[int, int]]:
    """The update and the micro-batch, of A, of each audit of a weight, while ``compute()`` is
    called in ``every`` so many updates.
    """
    found = []
    norm = gradient_watch.norm_on_cpu

    def counted(grad: Tensor) -> Tensor:
        found.append(now)
        return norm(grad)

    model = nn.Linear(D, D, bias=False)
    gns = gnsfast.GradientNoiseScale(model)
    with monkeypatch.context() as patch:
        patch.setattr(gradient_watch, "norm_on_cpu", counted)
        for update in range(updates):
            for k in range(A):
                now = update, k
                with gns.microbatch(4):
                    model(torch.randn(4, D)).square().mean().backward()
            gns.update()
            model.zero_grad()
            if every and update % every == every - 1:
                gns.compute()
    return found


@pytest.mark.parametrize("every", [0, 10])
@pytest.mark.parametrize("A", range(1, 9))
def test_each_micro_batch_at_each_phase(
    monkeypatch: pytest.MonkeyPatch, A: int, every: int
) -> None:
    """Also in one micro-batch of every seventh update only."""
    seen = audited(monkeypatch, 12, A, every)
    for period in PERIODS:
        met = {(update % period, k) for update, k in seen}
        assert met == {(phase, k) for phase in range(period) for k in range(A)}


def test_few_audits_while_the_numbers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes of a while, then a few; those of each hundred updates are others."""
    seen = [update + 1 for update, _ in audited(monkeypatch, 300)]
    late = [[u for u in seen if start + WHOLE < u <= start + 100] for start in (0, 100, 200)]
    assert len(seen) == 3 * WHOLE + sum(map(len, late))
    assert late == [[26, 34, 47, 60], [123], [225, 233, 238, 246]]  # known after 64, 128, 256


@pytest.mark.parametrize("every", [0, 10])
@pytest.mark.parametrize("A, period", [(3, 1), (1, 5), (2, 5), (6, 1)])
def test_a_misuse_in_the_last_micro_batch_raises(A: int, period: int, every: int) -> None:
    model = nn.Linear(D, D, bias=False)
    gns = gnsfast.GradientNoiseScale(model)

    def run() -> None:
        for update in range(1, 31):
            for k in range(A):
                x = torch.randn(4, D)
                with gns.microbatch(4):
                    y = model(x)
                    if k == A - 1 and update % period == 0:
                        y = y + unseen.linear(x, model.weight)
                    y.square().mean().backward()
            gns.update()
            model.zero_grad()
            if every and update % every == 0:
                gns.compute()
        gns.compute()

    with pytest.raises(gnsfast.ObservationError, match="weight: .*the part that was measured"):
        run()
