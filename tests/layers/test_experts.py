# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers, by the block, per sample against single samples in
float64.
"""

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import transformers as hf
from experts import BLOCKS, EAGER, EXPERTS, ROUTER, F, H, config, loss_of_rows, make
from oracle import assert_norms, loop_sqnorms, sample_of
from tiny_models import B, loss_of, mixtral, scattered
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral_code
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

import gnsfast


def batch(B: int, T: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(B, T, H)
    x[..., 0] = 1.0
    x[..., 1] = 0.0
    x[:1, :, 1] = 1.0
    return x, torch.randn(B, T, H)


def loss(block: nn.Module, batch: Any) -> Tensor:
    x, r = batch
    y = block(x)
    return ((y[0] if isinstance(y, tuple) else y) * r).sum()


def chosen(block: nn.Module, name: str, x: Tensor) -> Tensor:
    """[B, E]: whether a sample sends a token to an expert."""
    index = block.get_submodule(ROUTER[name])(x.flatten(0, 1))[2].view(len(x), -1)
    return torch.stack([(index == e).any(1) for e in range(EXPERTS)], 1)


def assert_block(plain: nn.Module, data: Any, B: int, **options: Any) -> Any:
    """Closed: torch's bits. Open: outputs and gradients as before, and single samples' norms."""
    block = copy.deepcopy(plain)
    assert torch.equal(loss(block, data), loss(plain, data))
    with gnsfast.per_sample_sqnorms(block, B, audit="always") as norms:
        ours = loss(block, data)
        ours.backward()
    want = loss(plain, data)
    want.backward()
    torch.testing.assert_close(ours, want)
    for (n, p), q in zip(block.named_parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=n)
    judge = copy.deepcopy(plain)
    if hasattr(judge, "experts"):
        judge.experts.config._experts_implementation = "eager"  # grouped_mm has no float64
    batch_dim = options.get("batch_dim", 0)
    assert_norms(norms, loop_sqnorms(judge, loss, data, B, batch_dim=batch_dim))
    return block


@pytest.mark.parametrize("used", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", BLOCKS)
def test_implementations(name: str, used: str) -> None:
    block, data = make(name, 2, experts_implementation=used), batch(3, 7)
    found = chosen(block, name, data[0])
    assert not found[:, 3].any() and not found[0, 2] and found[1:, 2].all()
    converted = assert_block(block, data, 3)
    rows = {r.parameter: r for r in gnsfast.coverage(converted).rows}
    routes = {n.partition(".")[0]: r.route for n, r in rows.items()}
    assert routes == {ROUTER[name]: "router", "experts": "experts"}
    assert all(r.static and r.observed for r in rows.values())


@pytest.mark.parametrize(
    ("B", "T", "K"), [(1, 5, 2), (4, 1, 2), (3, 6, 1), (2, 2, 3)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("name", BLOCKS)
def test_shapes(name: str, B: int, T: int, K: int) -> None:
    assert_block(make(name, K), batch(B, T), B)


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("mixtral", "down_proj"),
        ("mixtral", "gate.weight"),
        ("gpt_oss", "gate_up_proj"),
        ("gpt_oss", "proj_bias"),
        ("gpt_oss", "router.bias"),
    ],
)
def test_frozen(name: str, trained: str) -> None:
    """Any part of the parameters may be trained alone; the rows of the probe are theirs."""
    block = make(name, 2)
    for n, p in block.named_parameters():
        p.requires_grad_(trained in n)
    assert_block(block, batch(3, 7), 3)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_sample(name: str) -> None:
    """An empty batch has gradients of zero, as transformers' grouped_mm gives."""
    block = make(name, 2)
    with gnsfast.per_sample_sqnorms(block, 0) as norms:
        loss(block, batch(0, 4)).backward()
    assert all(n.shape == (0,) for n in norms.values())
    assert not any(p.grad.any() for n, p in block.named_parameters() if "experts" in n)


def test_sequence_first() -> None:
    data = tuple(t.transpose(0, 1).contiguous() for t in batch(3, 7))
    assert_block(make("mixtral", 2), data, 3, batch_dim=1)
    assert_block(make("gpt_oss", 2), data, 3, batch_dim=1)


@pytest.mark.parametrize("used", ["eager", "grouped_mm"])
def test_autocast(used: str) -> None:
    """No further from float64 than twice torch itself, sample by sample, in the dtypes of the
    implementation that it replaces.
    """
    plain, data = make("mixtral", 2, experts_implementation=used), batch(3, 7)

    def cast_loss(block: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(block, batch)

    block = copy.deepcopy(plain)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        ours = cast_loss(block, data)
        ours.backward()
    torch.testing.assert_close(ours, cast_loss(plain, data), rtol=1e-2, atol=1e-2)
    plain_norms: dict[str, list[Tensor]] = {n: [] for n in norms}
    for b in range(3):
        grads = torch.autograd.grad(cast_loss(plain, sample_of(data, b)), [*plain.parameters()])
        for (n, _), g in zip(plain.named_parameters(), grads):
            plain_norms[n].append(g.double().square().sum())
    plain.experts.config._experts_implementation = "eager"
    for n, want in loop_sqnorms(plain, loss, data, 3).items():
        error = ((norms[n] - want).abs() / want).max()
        assert error <= 2 * ((torch.stack(plain_norms[n]) - want).abs() / want).max() + 1e-6, n
        assert block.get_parameter(n).grad.dtype == torch.float32


def test_bfloat16() -> None:
    block, data = make("gpt_oss", 2).bfloat16(), tuple(t.bfloat16() for t in batch(3, 7))
    plain = copy.deepcopy(block)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(block, data).backward()
    loop = loop_sqnorms(plain, loss, data, 3)
    assert_norms(norms, loop, rtol=0.05)
    assert all(p.grad.dtype == torch.bfloat16 for p in block.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    """The experts by themselves: what the router chooses is not a matter of rounding here."""
    plain = make(name, 2).experts.to("cuda", dtype)
    index = torch.randint(0, EXPERTS, (3, 40, 2), device="cuda")
    x, weights, r = (torch.randn(3, 40, n, device="cuda", dtype=dtype) for n in (H, 2, H))
    data = (x, index, weights, r)
    block = copy.deepcopy(plain)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss_of_rows(block, data).backward()
    loop = {n: t.cpu() for n, t in loop_sqnorms(plain, loss_of_rows, data, 3).items()}
    assert_norms(norms, loop, rtol=1e-4 if dtype == torch.float32 else 0.03)


def test_blocks_that_take_any_rows() -> None:
    """DeepSeek's router flattens its input itself; its experts' rows are said to be a batch's."""
    model = deepseek.DeepseekV3MoE(
        hf.DeepseekV3Config(
            hidden_size=H,
            moe_intermediate_size=F,
            n_routed_experts=EXPERTS,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            **EAGER,
        )
    )
    data = batch(3, 7)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    block = copy.deepcopy(model)
    with pytest.raises(gnsfast.SampleShapeError, match=r"\[21, 16\].*fold=\['experts'\]"):
        with gnsfast.per_sample_sqnorms(block, 3):
            loss(block, data)
    assert_block(model, data, 3, fold=["experts"])

    model.bfloat16()  # its router multiplies in float32
    data = tuple(t.bfloat16() for t in data)
    block.bfloat16()
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(block, data).backward()
    for b in range(3):
        (g,) = torch.autograd.grad(loss(model, sample_of(data, b)), model.gate.weight)
        torch.testing.assert_close(
            norms["gate.weight"][b], g.float().square().sum(), rtol=0.02, atol=0
        )


def test_experts_without_a_gate() -> None:
    sizes = hf.NemotronHConfig(
        hidden_size=H, moe_intermediate_size=F, n_routed_experts=EXPERTS, num_hidden_layers=1
    )
    sizes._experts_implementation = "eager"
    plain = nemotron.NemotronHExperts(sizes)
    for p in plain.parameters():
        nn.init.normal_(p, std=0.3)
    index = torch.randint(0, EXPERTS, (3, 4, 2))
    data = (torch.randn(3, 4, H), index, torch.rand(3, 4, 2), torch.randn(3, 4, H))
    block = copy.deepcopy(plain)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss_of_rows(block, data).backward()
    assert set(norms) == {"up_proj", "down_proj"}
    assert_norms(norms, loop_sqnorms(plain, loss_of_rows, data, 3))


def test_a_block_that_picks_rows() -> None:
    """Rows that are not all of the batch are not taken for it, even where their number fits."""

    class Picks(mixtral_code.MixtralSparseMoeBlock):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            _, _, width = hidden_states.shape
            rows = hidden_states.reshape(-1, width)[::2]
            _, weights, index = self.gate(rows)
            return self.experts(rows, index, weights)

    block = Picks(config(hf.MixtralConfig, 2))
    for num_samples in (4, 8):  # as many rows as samples, too
        with pytest.raises(
            gnsfast.SampleShapeError, match=r"^gate .*does not know whether the block"
        ):
            with gnsfast.per_sample_sqnorms(block, num_samples):
                block(torch.randn(8, 2, H))


def test_a_wrong_number_of_samples() -> None:
    block = make("mixtral", 2)
    with pytest.raises(gnsfast.SampleShapeError, match=r"gate .*expected 4 samples.*\[21, 16\]"):
        with gnsfast.per_sample_sqnorms(block, 4):
            loss(block, batch(3, 7))


def test_load_balancing_loss() -> None:
    """It ties the samples together, so the pass is refused; its output alone is not."""
    model, data = mixtral()
    model.config.output_router_logits = True
    scattered(model)
    with pytest.raises(gnsfast.ObservationError, match=r"mlp.experts .*load-balancing loss"):
        with gnsfast.per_sample_sqnorms(model, B):
            loss_of(model, data)
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.0
    with gnsfast.per_sample_sqnorms(model, B):
        loss_of(model, data).backward()


def test_other_kernels_are_refused() -> None:
    block = make("mixtral", 2)
    block.experts.config._experts_implementation = "sonicmoe"
    with pytest.raises(
        gnsfast.ObservationError, match="not with experts_implementation='sonicmoe'"
    ):
        with gnsfast.per_sample_sqnorms(block, 3):
            loss(block, batch(3, 7))


def test_experts_without_a_route() -> None:
    """What is not understood is left out, with its reason."""
    normed, odd = make("mixtral", 2), make("mixtral", 2)
    normed.experts.has_post_expert_norm = True
    odd.experts.scale = nn.Parameter(torch.ones(EXPERTS))
    for block, reason in ((normed, "a norm after each expert"), (odd, "parameters .*, scale")):
        rows = {r.parameter: r for r in gnsfast.coverage(block).rows}
        assert rows["gate.weight"].static
        assert not rows["experts.down_proj"].static
        assert re.search(reason, rows["experts.down_proj"].reason)


def test_a_router_that_uses_its_weight_otherwise() -> None:
    class Twice(mixtral_code.MixtralTopKRouter):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Any:
            more = torch.topk(nn.functional.linear(hidden_states, self.weight), 2)
            logits, scores, index = super().forward(hidden_states)
            return logits, scores + more.values, index

    Twice.__module__ = mixtral_code.__name__
    block = make("mixtral", 2)
    block.gate.__class__ = Twice
    with pytest.raises(gnsfast.ObservationError, match="gate .* 2 calls of F.linear"):
        with gnsfast.per_sample_sqnorms(block, 3):
            loss(block, batch(3, 7))


def test_copies() -> None:
    block, data = make("gpt_oss", 2), batch(3, 7)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), block):
        assert torch.equal(loss(twin, data), loss(block, data))
        with gnsfast.per_sample_sqnorms(twin, 3) as norms:
            loss(twin, data).backward()
        assert set(norms) == {n for n, _ in block.named_parameters()}


def test_compiled() -> None:
    """The graph breaks at the experts; the norms stay."""
    plain, data = make("mixtral", 2), batch(3, 7)
    block = copy.deepcopy(plain)
    compiled = torch.compile(block, backend="eager")
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(compiled, data).backward()
    assert_norms(norms, loop_sqnorms(plain, loss, data, 3))
