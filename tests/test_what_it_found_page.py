# SPDX-License-Identifier: Apache-2.0
"""The page "What it found": its scripts print its logs, and loops over single samples in float64
find the same numbers.
"""

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import gradients_of, noise_scale_of, widened
from test_docs_pages import DOCS, code

PAGE = DOCS / "how-to" / "what-it-found.md"
NUMBER = re.compile(r"(?<!\w)\d+(?:,\d{3})*(?:\.\d+)?")

pytestmark = pytest.mark.second


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, Any], list[str]]:
    """The names of the page's scripts, and what each of them prints."""
    scope: dict[str, Any] = {"__name__": "page"}
    printed = []
    for number, block in enumerate(code(PAGE, "python"), 1):
        scope[f"state_{number}"] = torch.get_rng_state()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block["code"], str(PAGE), "exec"), scope)
        printed.append(out.getvalue())
        scope[f"model_{number}"] = scope["model"]
    return scope, printed


def test_scripts_print_the_logs(found: tuple[dict[str, Any], list[str]]) -> None:
    """The same words, wherever lines are broken. Numbers within 0.1 % or half of their last digit,
    which is more than another processor's sums move them.
    """
    shown = [block["code"] for block in code(PAGE, "text")]
    assert len(shown) == len(found[1]) == 3
    for log, printed in zip(shown, found[1]):
        words = [NUMBER.sub("#", text).split() for text in (log, printed)]
        assert words[0] == words[1]
        for here, there in zip(NUMBER.findall(log), NUMBER.findall(printed), strict=True):
            digits = len(here.partition(".")[2])
            a, b = (float(number.replace(",", "")) for number in (here, there))
            assert a == pytest.approx(b, rel=1e-3, abs=0.51 * 10**-digits), (here, there)


def printed_by(printed: str) -> list[float]:
    """The noise scales of a log."""
    return [
        float(n.replace(",", "")) for n in re.findall(r"noise scale ([\d.,]+) samples", printed)
    ]


def test_tokens(found: tuple[dict[str, Any], list[str]]) -> None:
    page, [printed, *_] = found
    model, ids = widened(page["model_1"], page["ids"])
    lengths, labels = page["lengths"].double(), page["labels"]
    losses = [F.cross_entropy(model(ids[b : b + 1]).mT, labels[b : b + 1]) for b in range(512)]
    g_KnP = gradients_of(model, losses).view(8, 64, -1)
    truth = noise_scale_of(g_KnP, lengths.view(8, 64))
    assert printed_by(printed)[1] == pytest.approx(truth, rel=1e-3)

    rms = []  # of each sample's weight of a token over its mean over tokens, 1 / all tokens
    for batch in torch.arange(512).split(64):
        parts = lengths[batch].sort().values.split(16)
        relative = torch.stack([lengths[batch].sum() / (4 * part.sum()) for part in parts])
        rms.append(float(relative.square().mean().sqrt()))
    [said] = re.findall(r"token's weight is ([\d.]+) times", printed)
    assert float(said) == pytest.approx(sum(rms) / 8, abs=0.0051)


def test_broken_sample(found: tuple[dict[str, Any], list[str]]) -> None:
    """Its training again, of single samples."""
    page, [_, printed, _] = found
    torch.set_rng_state(page["state_2"])
    x, y = page["inputs"].double(), page["targets"].double()
    assert torch.equal(torch.randn(256, 8), page["inputs"])
    model = torch.nn.Linear(8, 1)
    order = torch.randperm(256)
    model = model.double()
    seen = []
    for number, rows in enumerate(order.split(32)):
        losses = [F.mse_loss(model(x[b : b + 1]), y[b : b + 1]) for b in rows]
        g_nP = gradients_of(model, losses)
        sqnorm_n = g_nP.square().sum(1)
        for b, sqnorm in zip(rows, sqnorm_n):
            share, times = sqnorm / sqnorm_n.sum(), sqnorm / sqnorm_n.median()
            seen.append((float(share), float(times), number, int(b)))
        with torch.no_grad():
            for p, step in zip(model.parameters(), g_nP.mean(0).split((8, 1))):
                p -= 0.05 * step.view_as(p)
    for (share, times, number, b), line in zip(sorted(seen)[:-3:-1], printed.splitlines()):
        assert [int(n) for n in NUMBER.findall(line)[::2]] == [b, number], line
        shown = [float(n.replace(",", "")) for n in NUMBER.findall(line)[1::2]]
        assert shown == pytest.approx([100 * share, times], rel=1e-3, abs=0.51)


def test_pairs(found: tuple[dict[str, Any], list[str]]) -> None:
    page, [*_, printed] = found
    model, batches = widened(page["model_3"], page["batches"])
    pairs, rows = [], []
    for x in batches:
        score = model(x)
        losses = -F.logsigmoid(score[:32] - score[32:])
        slope = torch.autograd.grad(losses.sum(), score, retain_graph=True)[0]
        rows.append(torch.cat([slope[:, None] * x, slope[:, None]], 1))
        pairs.append(rows[-1][:32] + rows[-1][32:])
    for at, g_KnP in enumerate((torch.stack(rows), torch.stack(pairs))):
        g_KnP = g_KnP.detach()
        truth = noise_scale_of(g_KnP)
        assert printed_by(printed)[2 * at] == pytest.approx(truth, rel=1e-3)
