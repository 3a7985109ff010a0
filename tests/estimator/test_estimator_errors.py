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
        with self.gns.update(N, **options):
            self.loss().backward()

    def accumulated(self) -> None:
        with self.gns.update():
            for _ in range(2):
                with self.gns.microbatch(N):
                    self.loss().backward()

    def goes_on(self, gns: gnsfast.GradientNoiseScale | None = None) -> None:
        gns = gns or self.gns
        self.model.zero_grad()
        gns.reset()
        with gns.update(N):
            self.loss().backward()
        assert gns.compute().updates == 1

    @pytest.mark.parametrize("again", ["backward", "pass"])
    def test_two_backward_passes(self, again: str) -> None:
        with pytest.raises(ObservationError, match=r"0\.weight: .*do not add up"):
            with self.gns.update(N):
                loss = self.loss()
                loss.backward(retain_graph=True)
                (self.loss() if again == "pass" else loss).backward()
            self.gns.compute()
        self.goes_on()

    def test_nested_passes(self) -> None:
        with pytest.raises(ObservationError, match="already open"):
            with self.gns.update(N), self.gns.microbatch(N):
                pass
        self.goes_on()

    def test_nested_updates(self) -> None:
        with pytest.raises(ObservationError, match=r"inside a gns\.update\(\) block"):
            with self.gns.update(N), self.gns.update(N):
                pass
        self.goes_on()

    def test_a_pass_without_an_update(self) -> None:
        with pytest.raises(ObservationError, match=r"with gns\.update\(\): around all passes"):
            with self.gns.microbatch(N):
                self.loss().backward()
        self.goes_on()

    def test_an_update_without_a_pass(self) -> None:
        with pytest.raises(ObservationError, match="without a micro-batch"):
            with self.gns.update():
                self.loss().backward()
        self.goes_on()

    def test_arguments_of_a_pass_without_its_samples(self) -> None:
        with pytest.raises(ValueError, match=r"update\(tokens=...\) .* lacks num_samples"):
            with self.gns.update(tokens=3):
                pass
        self.goes_on()

    @pytest.mark.parametrize("place", ["before", "after"])
    def test_a_pass_outside_of_its_block(self, place: str) -> None:
        """Where gradients point one way, their sum is more than the passes can give."""
        with self.gns.update():
            for k in range(3):
                if k == (0 if place == "before" else 2):
                    self.loss().backward()
                else:
                    with self.gns.microbatch(N):
                        self.loss().backward()
        match = "not zero when an update began" if place == "before" else r"outside of gns\.microb"
        with pytest.raises(ObservationError, match=match):
            self.gns.compute()
        self.goes_on()

    def test_a_gradient_that_nobody_reads_may_hold_more(self) -> None:
        """The probes have that of an only pass."""
        with self.gns.update(N):
            self.loss().backward()
            for p in self.model.parameters():
                p.grad.mul_(10.0)
        assert self.gns.compute().updates == 1

    def test_block_without_backward(self) -> None:
        with pytest.raises(ObservationError, match="No backward pass"):
            with self.gns.update(N):
                self.loss()
        self.goes_on()

    @pytest.mark.parametrize("clipped", [False, True])
    @pytest.mark.parametrize("name", ["0.weight", "2.bias", "3.weight"])
    def test_a_gradient_that_is_not_zeroed(self, name: str, clipped: bool) -> None:
        """As where an optimizer's ``zero_grad`` does not know the parameter."""
        self.accumulated()
        if clipped:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        for other, p in self.model.named_parameters():
            p.grad = p.grad if other == name else None
        self.accumulated()
        with pytest.raises(ObservationError, match=r"not zero when an update began.*zero_grad"):
            self.gns.compute()
        self.goes_on()

    def test_gradients_of_the_probes_may_add_up(self) -> None:
        """Each pass is an update of its own here, whose gradient nobody reads."""
        for _ in range(3):
            self.measured()
        assert self.gns.compute().updates == 3

    def test_gradients_zeroed_in_place(self) -> None:
        for _ in range(2):
            self.accumulated()
            self.model.zero_grad(set_to_none=False)
        assert self.gns.compute().updates == 2

    def test_gradients_that_are_gone(self) -> None:
        with pytest.raises(ObservationError, match=r"zero_grad\(\) after the\n?.*block"):
            with self.gns.update():
                for _ in range(2):
                    with self.gns.microbatch(N):
                        self.loss().backward()
                self.model.zero_grad()
        self.goes_on()

    def test_gradients_that_are_zeroed_in_the_block(self) -> None:
        with self.gns.update():
            for _ in range(2):
                with self.gns.microbatch(N):
                    self.loss().backward()
            self.model.zero_grad(set_to_none=False)
        with pytest.raises(ObservationError, match=r"All gradients are zero at the end"):
            self.gns.compute()
        self.goes_on()

    @pytest.mark.parametrize("inside", [False, True])
    def test_error_of_the_user_drops_the_update(self, inside: bool) -> None:
        with pytest.raises(KeyError):
            with self.gns.update():
                with self.gns.microbatch(N):
                    self.loss().backward()
                    if inside:
                        raise KeyError
                raise KeyError
        assert type(self.model[0].weight) is nn.Parameter
        self.model.zero_grad()
        self.accumulated()
        assert self.gns.compute().updates == 1

    def test_error_that_the_user_catches_drops_the_update(self) -> None:
        """The rest of the block is plain torch."""
        with self.gns.update():
            try:
                with self.gns.microbatch(N):
                    raise KeyError
            except KeyError:
                pass
            with self.gns.microbatch(N):
                assert type(self.model[0].weight) is nn.Parameter
                self.loss().backward()
        assert self.gns.compute().updates == 0
        self.goes_on()

    def test_local_with_one_sample(self) -> None:
        gns = gnsfast.GradientNoiseScale(self.model, source="local")
        with pytest.raises(ValueError, match="needs two samples"):
            with gns.update(1):
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
            with self.gns.update(**arguments):
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
        with pytest.raises(ObservationError, match="call it between updates"):
            with self.gns.update():
                with self.gns.microbatch(N):
                    self.loss().backward()
                self.gns.state_dict()
        self.goes_on()

    def test_frozen_after_the_first_update(self) -> None:
        self.measured()
        self.model.zero_grad()
        self.model[0].weight.requires_grad_(False)
        with pytest.raises(ObservationError, match=r"gns\.reset\(\)"):
            self.measured()
        self.goes_on()

    def test_tokens_for_some_passes(self) -> None:
        with pytest.raises(ValueError, match="all micro-batches or for none"):
            with self.gns.update():
                for tokens in (None, 10):
                    with self.gns.microbatch(N, tokens=tokens):
                        self.loss().backward()
        self.goes_on()

    def test_weight_used_as_a_tensor(self) -> None:
        """The first update compares what was measured with what arrives at ``.grad``."""
        with self.gns.update(N):
            (self.loss() + unseen.penalty(self.model[0].weight)).backward()
        with pytest.raises(ObservationError, match=r"0\.weight: .*the part that was measured"):
            self.gns.compute()

    def test_penalty_of_torch(self) -> None:
        with pytest.raises(ObservationError, match=r"0\.weight: .*belongs to no sample"):
            with self.gns.update(N):
                (self.loss() + self.model[0].weight.square().sum()).backward()
        self.goes_on()

    @pytest.mark.parametrize("passes", [1, 2])
    def test_weight_that_only_a_kernel_takes(self, passes: int) -> None:
        """By the audit of the first update, or where its gradient is read, in any."""
        gns = gnsfast.GradientNoiseScale(self.model, gnsfast.learn(self.model, self.x))
        for k in range(4):
            with gns.update():
                for _ in range(passes):
                    with gns.microbatch(N):
                        y, head = self.model[:3](self.x), self.model[3]
                        seen = k < 3 and passes > 1
                        y = head(y) if seen else unseen.linear(y, head.weight)
                        F.cross_entropy(y, self.y).backward()
            self.model.zero_grad()
        with pytest.raises(ObservationError, match=r"3\.weight got a gradient, but no function"):
            gns.compute()
