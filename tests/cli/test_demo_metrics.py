# SPDX-License-Identifier: Apache-2.0
"""The demo's optimizers, and other noise scales than the Euclidean one in its log and panel."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from gnsfast.cli import optimizers, panel, run, tiny_gpt
from gnsfast.cli.app import app
from gnsfast.cli.records import read_runs


def first(**options: Any) -> run.Progress:
    """After ten steps of four samples."""
    return next(run.Demo(run.Options(steps=20, samples=4, **options)).train())


@pytest.mark.second
def test_other_noise_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the lines that are printed, in the log and in the summary of the report."""
    monkeypatch.setattr(run, "CHECK_BATCHES", 10)
    monkeypatch.setattr(run, "CHECK_SAMPLES", 64)
    folder = tmp_path / "run"
    metrics = [each for name in ("sign", "spectral", "sign") for each in ("--metric", name)]
    command = ["demo", "--steps", "20", "--samples", "4", "--out", str(folder)]
    said = CliRunner().invoke(app, [*command, "--optimizer", "muon", *metrics])
    assert said.exit_code == 0
    for words in ("in sign descent's norm: ", "in spectral descent's (Muon's) norm: "):
        assert said.output.count(words) == 1
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["optimizer"] == "muon" and "gns/adam_lo" not in lines[2]
    assert said.output.count("norm, brute force") == 2
    [check] = [line for line in lines if line.get("kind") == "check"]
    assert list(check["others"]) == ["sign", "spectral"]
    assert lines[2]["gns/sign_lo"] >= 0 and lines[2]["gns/spectral_lo"] >= 0
    found = read_runs([folder])[0].summary()
    assert found["noise_scale_sign"]["lower"] == lines[2]["gns/sign_lo"]
    assert "Muon's) norm, samples" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--optimizer", "lion"], "--optimizer must be 'adamw', 'sgd', 'signum' or 'muon'"),
        (["--metric", "euclidean"], "--metric must be 'adam', 'sign' or 'spectral'"),
        (["--optimizer", "sgd", "--metric", "adam"], "--metric adam needs --optimizer adamw"),
    ],
)
def test_what_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == 2 and result.stderr.startswith(f"gnsfast: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.second
def test_spectral_noise_scale_is_that_of_muons_matrices() -> None:
    demo = run.Demo(run.Options(20, 2, optimizer="muon", metric=("spectral",)))
    found = next(demo.train()).scale
    names = {p: name for name, p in demo.model.named_parameters()}
    trained = {names[p].removesuffix(".weight") for p in demo.optimizer.param_groups[0]["params"]}
    assert list(found.others) == ["spectral"]
    assert {*found.spectral.per_module} == trained and len(trained) == 12


def test_adams_metric() -> None:
    found = first(metric=("adam", "sign")).scale
    assert list(found.others) == ["adam", "sign"] and found.adam.updates == 8  # one has no v


@pytest.mark.second
def test_panel_has_a_line_for_each() -> None:
    settings = run.Options(20, 2, optimizer="sgd", metric=("sign", "spectral"))
    demo, console = run.Demo(settings), Console(file=io.StringIO(), width=100)
    shown = panel.Panel(demo, console)
    plain = panel.Panel(run.Demo(run.Options(20, 2)), console)
    shown.now = first(optimizer="sgd", metric=("sign", "spectral"))
    plain.now = first()
    console.print(shown.draw())
    text = console.file.getvalue()
    console.print(plain.draw())
    sign = shown.now.scale.sign
    [line] = [each for each in text.splitlines() if "in sign descent's norm" in each]
    assert f"{panel.value(sign)}  {panel.span(sign)}" in line
    assert text.count("in spectral descent's (Muon's) norm") == 1
    assert "descent" not in console.file.getvalue()[len(text) :]


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_optimizers_train_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = tiny_gpt.TinyGPT(width=16, heads=2, layers=1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizers.make(name, model)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({*held}) == len(before)
    batch = torch.randint(256, (4, 9))
    losses = []
    for _ in range(8):
        loss = tiny_gpt.loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, was) for p, was in zip(model.parameters(), before))


def test_signum_takes_steps_of_one_size() -> None:
    """Along the signs of the momentum, not of the newest gradient."""
    w = nn.Parameter(torch.zeros(3))
    optimizer = optimizers.Signum([w], lr=0.5)
    for grad in ([4.0, -1e-6, 0.0], [-8.0, 1.0, 0.0]):
        w.grad = torch.tensor(grad)
        optimizer.step()
    assert w.tolist() == [-0.5 + 0.5, 0.5 - 0.5, 0.0]
    w.grad = torch.tensor([-0.1, 0.0, 1.0])
    optimizer.step()
    assert w.tolist() == [0.5, -0.5, -0.5]


def test_muon_and_adamw_are_torchs_own() -> None:
    """Each on its parameters, also after a state that was saved and loaded."""
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    both = optimizers.MuonAdamW(model, lr=0.1, adam_lr=0.01, weight_decay=0.1)
    assert both.param_groups[0]["params"] == [model[1].weight]
    apart = [
        torch.optim.Muon([twin[1].weight], lr=0.1, weight_decay=0.1),
        torch.optim.AdamW([twin[0].weight, twin[1].bias], lr=0.01, weight_decay=0.1),
    ]
    for k in range(6):
        if k == 3:
            saved = both.state_dict()
            both = optimizers.MuonAdamW(model, lr=0.3, adam_lr=0.3)
            both.load_state_dict(saved)
        for p, q in zip(model.parameters(), twin.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in (both, *apart):
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p, q)
