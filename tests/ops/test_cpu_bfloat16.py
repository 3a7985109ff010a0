# SPDX-License-Identifier: Apache-2.0
"""What the CPU kernels for bfloat16 alone have. ``test_cpu.py`` runs them too; those for AMX on a
processor with AMX, or on the model of its instructions in ``csrc/cpu/amx_model.h``.
"""

import pytest
import torch
from cpu_cases import drawn, linear, single_samples

from gnsfast.ops import cpu

BF16 = torch.bfloat16


@pytest.mark.parametrize(("B", "T"), [(64, 1), (16, 16), (2, 600)])
def test_errors_are_torchs(B: int, T: int, kernel: str) -> None:
    """At most twice those of torch's own product, whose result is rounded to bfloat16 too."""
    x, dy = drawn(BF16, (B, T, 96), (B, T, 160))
    want = single_samples(linear(x, dy))[0].sum(0)
    error = lambda dw: (dw.double() - want).norm() / want.norm()
    ours = cpu.linear_wgrad(linear(x, dy)._replace(dtype=BF16))[0]
    assert error(ours) <= 2 * error(dy.flatten(0, 1).T @ x.flatten(0, 1))


def test_wrong_calls(kernel: str) -> None:
    x, dy = torch.randn(3, 5, 40), torch.randn(3, 5, 20)
    wgrad = cpu._Wgrad(dy, x, torch.empty(20, 40), None, torch.empty(1, 5))
    with pytest.raises(ValueError, match=f"no kernel {kernel}"):
        cpu._tiles(kernel, wgrad)
    with pytest.raises(ValueError, match="kernel avx512_bf16|amx needs"):
        cpu._gram_sqnorms(kernel, dy, x)
    sides = (dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride())
    with pytest.raises(ValueError, match="null pointer"):
        cpu._module().gram_sqnorms(kernel, *sides, True, (3, 5, 20, 40), 0, 0, 1)
