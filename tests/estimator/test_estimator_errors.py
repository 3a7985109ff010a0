# SPDX-License-Identifier: Apache-2.0
"""What ``GradientNoiseScale`` refuses, each by one clear error, and that it works on afterwards."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import unseen
from noise_cases import I, N, draw, make
from torch import Tensor, nn

import gnsfast

ObservationError = gnsfast.ObservationError


class TestErrors:
    """One clear error each; the estimator works on afterwards."""

    model: nn.Module
    gns: gnsfast.GradientNoiseScale

    @pytest.fixture(autouse=True)
    def start(self) -> None:
        self.model = make()
        self.gns = gnsfast.GradientNoiseScale(self.model)
        self.x, self.y = draw(1)[0]

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def measured(self, **options: Any) -> None:
        with self.gns.microbatch(N, **options):
            self.loss().backward()

    def goes_on(self, gns: gnsfast.GradientNoiseScale | None = None) -> None:
        gns = gns or self.gns
        self.model.zero_grad()
        gns.reset()
        with gns.microbatch(N):
            self.loss().backward()
        gns.update()
        assert gns.compute().updates == 1

    @pytest.mark.parametrize("again", ["backward", "pass"])
    def test_two_backward_passes(self, again: str) -> None:
        with pytest.raises(ObservationError, match=r"0\.weight: .*do not add up"):
            with self.gns.microbatch(N):
                loss = self.loss()
                loss.backward(retain_graph=True)
                (self.loss() if again == "pass" else loss).backward()
            self.gns.update()
            self.gns.compute()
        self.goes_on()

    def test_nested_blocks(self) -> None:
        with pytest.raises(ObservationError, match="already open"):
            with self.gns.microbatch(N), self.gns.microbatch(N):
                pass
        self.goes_on()

    def test_backward_outside_of_a_block(self) -> None:
        self.loss().backward()
        with pytest.raises(ObservationError, match="without a micro-batch"):
            self.gns.update()
        self.goes_on()

    def test_backward_between_two_blocks(self) -> None:
        self.measured()
        self.loss().backward()
        with pytest.raises(ObservationError, match="changed between"):
            self.measured()
        self.goes_on()

    def test_block_without_backward(self) -> None:
        with pytest.raises(ObservationError, match="No backward pass"):
            with self.gns.microbatch(N):
                self.loss()
        self.goes_on()

    def test_gradients_not_zeroed(self) -> None:
        self.measured()
        self.gns.update()
        with pytest.raises(ObservationError, match=r"0\.weight still has.*zero_grad"):
            self.measured()
        self.goes_on()

    def test_gradients_not_zeroed_but_clipped(self) -> None:
        """Clipping rewrites the old gradients, so only their values tell."""
        self.accumulate()
        self.gns.update()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        self.accumulate()
        self.gns.update()
        with pytest.raises(ObservationError, match="not zero before the first"):
            self.gns.compute()
        self.goes_on()

    def test_gradients_zeroed_in_place(self) -> None:
        for _ in range(2):
            self.accumulate()
            self.gns.update()
            self.model.zero_grad(set_to_none=False)
        assert self.gns.compute().updates == 2

    def accumulate(self) -> None:
        for _ in range(2):
            self.measured()

    def test_update_after_clipping(self) -> None:
        self.accumulate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        with pytest.raises(ObservationError, match="clipping"):
            self.gns.update()
        self.goes_on()

    def test_update_after_zero_grad(self) -> None:
        self.accumulate()
        self.model.zero_grad()
        with pytest.raises(ObservationError, match="before optimizer.zero_grad"):
            self.gns.update()
        self.goes_on()

    def test_error_inside_of_the_block_drops_the_update(self) -> None:
        self.accumulate()
        with pytest.raises(KeyError):
            with self.gns.microbatch(N):
                self.loss().backward()
                raise KeyError
        assert type(self.model[0].weight) is nn.Parameter
        with pytest.raises(ObservationError, match="without a micro-batch"):
            self.gns.update()
        self.goes_on()

    def test_local_with_one_sample(self) -> None:
        gns = gnsfast.GradientNoiseScale(self.model, source="local")
        with pytest.raises(ValueError, match="needs two samples"):
            with gns.microbatch(1):
                pass
        self.goes_on(gns)

    @pytest.mark.parametrize("arguments", [
        dict(num_samples=0), dict(num_samples=-2), dict(num_samples=2.0), dict(num_samples=True),
        dict(num_samples=4, tokens=0), dict(num_samples=4, tokens=-1),
        dict(num_samples=4, tokens=torch.ones(3)), dict(num_samples=4, scale=0.0),
        dict(num_samples=4, scale=-1.0), dict(num_samples=4, scale=math.nan),
    ])  # fmt: skip
    def test_counts_and_scales(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="must be"):
            with self.gns.microbatch(**arguments):
                pass
        self.goes_on()

    @pytest.mark.parametrize(
        "settings",
        [dict(source="both"), dict(window=0), dict(every=0), dict(decay=1.5), dict(decay=0.0),
         dict(loss_reduction="none")],
    )  # fmt: skip
    def test_settings(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(settings))):
            gnsfast.GradientNoiseScale(self.model, **settings)

    def test_state_of_another_model(self) -> None:
        other = nn.Sequential(nn.Linear(I, 2))
        state = gnsfast.GradientNoiseScale(other).state_dict()
        with pytest.raises(ValueError, match=r"another model.*3\.weight"):
            self.gns.load_state_dict(state)
        wider = gnsfast.GradientNoiseScale(self.model, window=8).state_dict()
        with pytest.raises(ValueError, match=r"window=8.*window=64"):
            self.gns.load_state_dict(wider)
        self.goes_on()

    def test_state_in_the_middle_of_an_update(self) -> None:
        self.accumulate()
        with pytest.raises(ObservationError, match="middle of an update"):
            self.gns.state_dict()

    def test_frozen_after_the_first_microbatch(self) -> None:
        self.measured()
        self.gns.update()
        self.model.zero_grad()
        self.model[0].weight.requires_grad_(False)
        with pytest.raises(ObservationError, match=r"gns\.reset\(\)"):
            self.measured()
        self.goes_on()

    def test_grad_norm_of_more_than_is_covered(self) -> None:
        model = gnsfast.configure(nn.Sequential(nn.Linear(I, 4), nn.LayerNorm(4)), exclude=["1"])
        gns = gnsfast.GradientNoiseScale(model)
        with gns.microbatch(N):
            model(self.x).sum().backward()
        with pytest.raises(ValueError, match=r"no per-sample norms: 1\.weight, 1\.bias"):
            gns.update(grad_norm=1.0)

    def test_tokens_for_some_microbatches(self) -> None:
        self.measured()
        with pytest.raises(ValueError, match="all micro-batches or for none"):
            self.measured(tokens=10)
        self.goes_on()

    def test_weight_used_as_a_tensor(self) -> None:
        """The first micro-batch compares what was measured with what arrives at ``.grad``."""
        with self.gns.microbatch(N):
            (self.loss() + unseen.penalty(self.model[0].weight)).backward()
        self.gns.update()
        with pytest.raises(ObservationError, match=r"0\.weight: .*the part that was measured"):
            self.gns.compute()

    def test_penalty_of_torch(self) -> None:
        with pytest.raises(ObservationError, match=r"0\.weight: .*belongs to no sample"):
            with self.gns.microbatch(N):
                (self.loss() + self.model[0].weight.square().sum()).backward()
        self.goes_on()

    @pytest.mark.parametrize("later", [False, True])
    def test_weight_that_only_a_kernel_takes(self, later: bool) -> None:
        """The counter is compared in every micro-batch, not in the first alone."""
        self.gns = gnsfast.GradientNoiseScale(self.model, gnsfast.learn(self.model, self.x))
        if later:
            self.accumulate()
        with self.gns.microbatch(N):
            hidden = self.model[:3](self.x)
            F.cross_entropy(unseen.linear(hidden, self.model[3].weight), self.y).backward()
        self.gns.update()
        with pytest.raises(ObservationError, match=r"3\.weight got a gradient, but no function"):
            self.gns.compute()
