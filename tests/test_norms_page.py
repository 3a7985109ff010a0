# SPDX-License-Identifier: Apache-2.0
"""What the page on the uses of norms shows is so."""

from typing import Any

import torch
import torch.nn.functional as F
from test_docs_pages import DOCS, code
from test_questions_page import same

PAGE = DOCS / "how-to" / "per-sample-norms.md"


def gradient(page: dict[str, Any], b: int) -> torch.Tensor:
    """The gradient of sample b's own loss."""
    loss = F.cross_entropy(page["model"](page["x"][b : b + 1]), page["y"][b : b + 1])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, page["model"].parameters())])


def test_uses_of_norms(capsys: Any) -> None:
    page: dict[str, Any] = {}
    for block in code(PAGE, "python"):
        exec(block["code"], page)
    printed = capsys.readouterr().out
    shown = "".join(block["code"] for block in code(PAGE, "text"))
    assert all(same(*lines) for lines in zip(shown.splitlines(), printed.splitlines(), strict=True))

    gradients_BP = torch.stack([gradient(page, b) for b in range(32)])
    norm_B = gradients_BP.norm(dim=1)
    torch.testing.assert_close(page["norm_B"], norm_B, rtol=1e-4, atol=1e-6)
    assert {*norm_B.topk(2).indices.tolist()} == {5, 11}

    clipped_P = (gradients_BP / norm_B[:, None].clamp(min=page["limit"]) * page["limit"]).sum(0)
    found_P = torch.cat([p.grad.flatten() for p in page["model"].parameters()])
    torch.testing.assert_close(found_P, clipped_P, rtol=1e-4, atol=1e-5)
