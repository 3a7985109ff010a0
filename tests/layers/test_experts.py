# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers, by the block, per sample against single samples in
float64.
"""

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from experts import BLOCKS, EAGER, EXPERTS, ROUTER, F, H, OfRows, config, loss_of_rows, make
from layers import assert_as_loop
from oracle import assert_norms, loop_sqnorms, sample_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral_code
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

import gnsfast


def batch(B: int, T: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(B, T, H)
    x[..., 0] = 1.0
    x[..., 1] = 0.0
    x[:1, :, 1] = 1.0
    x.requires_grad_()  # as behind an embedding: autograd's graph shows which rows are chosen
    return x, torch.randn(B, T, H)


def loss(block: nn.Module, batch: Any) -> Tensor:
    x, r = batch
    y = block(x)
    return ((y[0] if isinstance(y, tuple) else y) * r).sum()


def chosen(block: nn.Module, name: str, x: Tensor) -> Tensor:
    """[B, E]: whether a sample sends a token to an expert."""
    index = block.get_submodule(ROUTER[name])(x.flatten(0, 1))[2].view(len(x), -1)
    return torch.stack([(index == e).any(1) for e in range(EXPERTS)], 1)


def assert_block(plain: nn.Module, data: Any, B: int, *, missing: str = " ") -> nn.Module:
    """Outputs and gradients as before, and single samples' norms. Those of parameters whose names
    have ``missing`` are left out.
    """
    block = copy.deepcopy(plain)
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
    loop = loop_sqnorms(judge, loss, data, B)
    assert_norms(norms, {n: own for n, own in loop.items() if missing not in n})
    return block


@pytest.mark.parametrize("used", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", BLOCKS)
def test_implementations(name: str, used: str) -> None:
    """gpt-oss looks its biases up at the ids of sorted rows, before any of them shows a sample."""
    block, data = make(name, 2, experts_implementation=used), batch(3, 7)
    found = chosen(block, name, data[0])
    assert not found[:, 3].any() and not found[0, 2] and found[1:, 2].all()
    measured = assert_block(block, data, 3)
    assert all(row.static and row.observed for row in gnsfast.coverage(measured).rows)


@pytest.mark.parametrize(
    ("B", "T", "K"), [(1, 5, 2), (4, 1, 2), (3, 6, 1), (2, 2, 3)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("name", BLOCKS)
def test_shapes(name: str, B: int, T: int, K: int) -> None:
    block, data = make(name, K), batch(B, T)
    if K == 1 and name != "qwen3_moe":  # the one weight is 1: the router has no gradient
        block.get_submodule("gate" if name == "mixtral" else "router").requires_grad_(False)
    assert_block(block, data, B)


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
    block = make(name, 2, experts_implementation="grouped_mm")
    with gnsfast.per_sample_sqnorms(block, 0) as norms:
        loss(block, batch(0, 4)).backward()
    assert all(n.shape == (0,) for n in norms.values())
    assert not any(p.grad.any() for n, p in block.named_parameters() if "experts" in n)


def test_sequence_first() -> None:
    """Rows of all samples alternate."""
    for name in ("mixtral", "gpt_oss"):
        block, data = make(name, 2), batch(3, 7)
        data = tuple(t.detach().transpose(0, 1).contiguous() for t in data)
        data[0].requires_grad_()
        with gnsfast.per_sample_sqnorms(block, 3) as norms:
            loss(block, data).backward()
        loop = loop_sqnorms(block, loss, data, 3, batch_dim=1)
        assert_norms(norms, {n: loop[n] for n in norms})
        assert any("gate" in n or "router" in n for n in norms)


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
    block, data = make("gpt_oss", 2).bfloat16(), tuple(t.detach().bfloat16() for t in batch(3, 7))
    plain = copy.deepcopy(block)
    data[0].requires_grad_()
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(block, data).backward()
    loop = loop_sqnorms(plain, loss, data, 3)
    assert_norms(norms, loop, rtol=0.05)
    assert all(p.grad.dtype == torch.bfloat16 for p in block.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_on_gpu(name: str, dtype: torch.dtype) -> None:
    model = OfRows(make(name, 2).experts).to("cuda", dtype)
    index = torch.randint(0, EXPERTS, (3, 40, 2), device="cuda")
    x, weights, r = (torch.randn(3, 40, n, device="cuda", dtype=dtype) for n in (H, 2, H))
    data = (x.requires_grad_(), index, weights, r)
    plain = copy.deepcopy(model)
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        loss_of_rows(model, data).backward()
    loop = {n: t.cpu() for n, t in loop_sqnorms(plain, loss_of_rows, data, 3).items()}
    assert_norms(norms, loop, rtol=1e-4 if dtype == torch.float32 else 0.03)


def test_blocks_that_take_any_rows() -> None:
    """DeepSeek's router flattens its input itself."""
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
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    assert_block(model, batch(3, 7), 3)


def test_experts_without_a_gate() -> None:
    sizes = hf.NemotronHConfig(
        hidden_size=H, moe_intermediate_size=F, n_routed_experts=EXPERTS, num_hidden_layers=1
    )
    sizes._experts_implementation = "eager"
    model = OfRows(nemotron.NemotronHExperts(sizes))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    index, x = torch.randint(0, EXPERTS, (3, 4, 2)), torch.randn(3, 4, H, requires_grad=True)
    data = (x, index, torch.rand(3, 4, 2), torch.randn(3, 4, H))
    with gnsfast.per_sample_sqnorms(model, 3) as norms:
        loss_of_rows(model, data).backward()
    assert set(norms) == {"experts.up_proj", "experts.down_proj"}
    assert_norms(norms, loop_sqnorms(model, loss_of_rows, data, 3))


def test_a_block_that_picks_rows() -> None:
    """Every second row: each sample keeps its own."""

    class Picks(mixtral_code.MixtralSparseMoeBlock):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            _, T, width = hidden_states.shape
            rows = hidden_states.reshape(-1, width)[::2]
            _, weights, index = self.gate(rows)
            return self.experts(rows, index, weights).view(-1, T // 2, width)

    block = Picks(config(hf.MixtralConfig, 2))
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    x, r = torch.randn(8, 2, H, requires_grad=True), torch.randn(8, 1, H)
    assert_as_loop(block, (x, r), 8, loss=loss)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant: bool) -> None:
    """Its graph holds no index before backward, where it runs again."""
    block, data = make("mixtral", 2), batch(3, 7)
    loop = loop_sqnorms(block, loss, data, 3)
    forward = block.experts.forward
    block.experts.forward = lambda *a: checkpoint(forward, *a, use_reentrant=reentrant)
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(block, data).backward()
    assert_norms(norms, loop)


@pytest.mark.parametrize("kept", [torch.ops.aten.mm.default, torch.ops.aten.index.Tensor])
def test_in_a_selective_checkpoint(kept: Any) -> None:
    """It keeps results of forward, which does not know the samples, so experts are left out."""
    block, data = make("mixtral", 2), batch(3, 7)
    loop = loop_sqnorms(block, loss, data, 3)
    loss(block, data).backward()
    grads = [p.grad for p in block.parameters()]
    block.zero_grad()
    forward, contexts = block.experts.forward, create_selective_checkpoint_contexts
    block.experts.forward = lambda *a: checkpoint(
        forward, *a, use_reentrant=False, context_fn=lambda: contexts([kept])
    )
    with gnsfast.per_sample_sqnorms(block, 3) as norms:
        loss(block, data).backward()
    assert_norms(norms, {"gate.weight": loop["gate.weight"]})
    for p, g in zip(block.parameters(), grads):
        torch.testing.assert_close(p.grad, g)


def test_compiled() -> None:
    """The graph breaks at the experts; the norms stay."""
    plain, data = make("mixtral", 2), batch(3, 7)
    block = copy.deepcopy(plain)
    compiled = torch.compile(block, backend="eager")
    assert_as_loop(block, data, 3, loss, twin=plain, run=compiled)
