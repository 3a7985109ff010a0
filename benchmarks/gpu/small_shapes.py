# SPDX-License-Identifier: Apache-2.0
"""Every operator, and every kernel of the CUDA extension, once on small, odd shapes: what
compute-sanitizer watches.
"""

from typing import Any

import torch

from gnsfast.functional import attention
from gnsfast.ops import extension, operators
from gnsfast.signatures import OPERATORS


def run(name: str, *fields: Any, **more: Any) -> None:
    """One launch of an operator, of the fields of its signature."""
    getattr(operators, name)(OPERATORS[name](*fields, **more))


def main(device: str = "cuda") -> None:
    f32 = torch.float32
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, I, O in ((3, 70, 37, 21), (3, 70, 136, 200), (5, 9, 40, 24), (6, 1, 40, 24)):
            x = torch.randn(B, T, I, device=device, dtype=dtype)
            dy = torch.randn(B, T, O, device=device, dtype=dtype)
            run("linear_wgrad", x, dy, True, True, False, f32)
            run("linear_wgrad", x, dy, True, True, True, f32)
            ids = torch.randint(0, O, (B, T), device=device)
            run("linear_wgrad", x, dy, True, True, False, f32, ids_BS=ids)
            run("embedding_wgrad", x, ids, O, 3, f32)
            w = x[0, 0].clone()
            run("norm_backward", x, x, None, None, w, None, True, False, 1e-5, 1.0)
            starts = torch.tensor([0, T // 2, T, B * T], dtype=torch.int32, device=device)
            rows = x.flatten(0, 1), dy.flatten(0, 1)
            for experts in (0, 1):
                run("linear_wgrad", *rows, True, True, False, f32, starts, experts)
            run("embedding_wgrad", rows[0], ids.flatten(), O, 3, f32, starts)
            _, mean, rstd = torch.native_layer_norm(x, [I], w, w, 1e-5)
            run("norm_backward", x, x, mean, rstd, w, w, True, True)
            of_rows = (t.flatten(0, 1) for t in (x, x, mean, rstd))
            run("norm_backward", *of_rows, w, w, True, True, starts=starts)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (
            torch.randn(2, h, 70, 40, device=device, dtype=dtype).requires_grad_()
            for h in (4, 2, 2)
        )
        learned = {
            name: torch.randn(n, device=device).requires_grad_()
            for name, n in (("sinks", 4), ("logit_scale", 4), ("q_gain", 40), ("k_gain", 40))
        }
        probe = torch.zeros(4, 2 + 2, device=device, requires_grad=True)
        for options in (
            {"is_causal": True, "window": 9},
            {"attn_mask": q.new_zeros(70, 70).float()},
        ):
            attention(q, k, v, **learned, **options, probe=probe).sum().backward()
    x, dy = torch.randn(4, 6, 9, 9, device=device), torch.randn(4, 8, 7, 7, device=device)
    for groups in (1, 2):
        run("conv_wgrad", x, dy, 2, [3, 3], [1, 1], [0, 0], [1, 1], groups, True, True, f32)
    print("every operator ran")
    if device == "cuda":
        torch.cuda.synchronize()
        print(extension.missing() or f"{run_extension()} launches of the CUDA extension ran")


def run_extension() -> int:
    """Whole and split tiles, every kernel for this device; the number of launches."""
    from gnsfast import _C

    hopper = extension.kernel_for(torch.cuda.get_device_capability()) == "sm90"
    names = [name for name in _C.kernels() if hopper or name == "sm80"]
    launches = 0
    for B, T, I, O in ((3, 70, 136, 200), (16, 260, 200, 264), (1, 200, 264, 264)):
        x, dy = (torch.randn(B, T, n, device="cuda").bfloat16() for n in (I, O))
        for name in names:
            if B == 1 or not name.endswith("one sample"):
                rows = x.new_empty(2, B + 2, dtype=torch.float32)
                dw, db = x.new_empty(O, I), x.new_empty(O)
                extension.linear_wgrad(x, dy, dw, db, rows, False, name)
                launches += 2
        extension.token_sqnorms(x[:, 0], dy[:, 0])
    torch.cuda.synchronize()
    return launches


if __name__ == "__main__":
    main()
