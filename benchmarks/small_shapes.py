# SPDX-License-Identifier: Apache-2.0
"""Every Triton operator once on small, odd shapes: what compute-sanitizer watches."""

import torch

import gnsfast  # noqa: F401  (registers the operators)


def main(device: str = "cuda") -> None:
    ops, f32 = torch.ops.gnsfast, torch.float32
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, I, O in ((3, 70, 37, 21), (3, 70, 136, 200), (5, 9, 40, 24), (6, 1, 40, 24)):
            x = torch.randn(B, T, I, device=device, dtype=dtype)
            dy = torch.randn(B, T, O, device=device, dtype=dtype)
            ops.linear_wgrad(x, dy, True, True, False, f32)
            ops.linear_wgrad(x, dy, True, True, True, f32)
            ids = torch.randint(0, O, (B, T), device=device)
            ops.linear_wgrad_tied(x, dy, ids, True, f32)
            ops.embedding_wgrad(x, ids, O, 3, f32)
            ops.rms_norm_backward(x, x, x[0, 0].clone(), 1e-5, 1.0)
            w = x[0, 0].clone()
            _, mean, rstd = torch.native_layer_norm(x, [I], w, w, 1e-5)
            ops.layer_norm_backward(x, x, mean, rstd, w, w, True, True)
    x, dy = torch.randn(4, 6, 9, 9, device=device), torch.randn(4, 8, 7, 7, device=device)
    for groups in (1, 2):
        ops.conv_wgrad(x, dy, 2, [3, 3], [1, 1], [0, 0], [1, 1], groups, True, True, f32)
    if device == "cuda":
        torch.cuda.synchronize()
    print("every operator ran")


if __name__ == "__main__":
    main()
