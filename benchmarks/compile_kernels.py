# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel in every configuration for a GPU that need not be there, and reads
the machine code: ``python -m benchmarks.compile_kernels 90`` prints a JSON row for each; so does
``gfx942``, for an AMD device.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from benchmarks import no_gpu
from benchmarks.compile_cases import (
    DTYPES,
    Case,
    attention_cases,
    embedding_cases,
    norm_cases,
    sums_cases,
)
from benchmarks.compile_reading import cut_off, read_amdgcn, read_cubin
from benchmarks.no_gpu import Device
from gnsfast.triton_kernels import (
    configs,
    gram,
    linear_finish,
    linear_plan,
    linear_wgrad,
    segments,
    sums,
    tiles,
)
from gnsfast.triton_kernels.launch import known

ALIGNED = {"I", "O", "D", "N", "x_stride", "dy_stride"} | {
    f"{t}_stride_{dim}" for t in ("x", "dy") for dim in "bt"
}


OUTPUTS = {"none": "norms"}
"""Where dW goes -> how the kernel that is launched so is called."""
NO_DW: tuple[dict[str, Any], ...] = ({}, {"dw_ptr": None})


def cases(device: Device) -> Iterator[Case]:
    """What is launched on a device that this process pretends to have."""
    with tf32(True):
        has_tf32 = tiles.tf32_allowed()
    for case in linear_cases(device):
        if has_tf32 or case.constants.get("PRECISION") != "tf32":
            yield case
    yield from attention_cases()
    yield from norm_cases()
    yield from sums_cases()
    yield from embedding_cases()
    for dtype in ("bf16", "fp32"):
        fp32 = {"product_ptr": "*fp32", "dy_sqnorm_ptr": "*fp32"}
        yield Case(
            "token_sqnorms",
            gram.token_sqnorms_kernel,
            dtype,
            dict(BLOCK=gram.ROW_BLOCK),
            4,
            pointers=fp32 | {"tickets_ptr": "*i32"},
        )


def linear_cases(device: Device) -> Iterator[Case]:
    for kind, found in configs.CANDIDATES.items():
        for config in configs.runnable(found):
            yield from wgrad_cases(kind, config, device.tma)
    yield wgrad("fp16", configs.candidates(torch.float16, True)[0], tma=device.tma)
    for config in configs.runnable(configs.HALF)[-2:]:  # they share a multiprocessor
        yield wgrad("bf16", config, tma=device.tma, dw="fp64")
    yield from finish_cases()
    yield from segments_cases()
    for dtype, precision in (("bf16", "ieee"), ("fp32", "tf32")):
        for block_t, aligned in product((16, 32, 64, gram.MAX_TOKENS), (True, False)):
            if block_t == gram.MAX_TOKENS and not aligned:
                continue  # such rows are widened first
            options = gram.config(block_t, DTYPES[dtype])
            yield Case(
                f"gram {block_t}{'' if aligned else ' unaligned'}",
                gram.gram_kernel,
                dtype,
                dict(
                    BLOCK_T=block_t,
                    BLOCK_K=options["BLOCK_K"],
                    TILE=gram.TILE,
                    CANCELLED=gram.CANCELLED,
                    PRECISION=precision,
                ),
                options["num_warps"],
                options["num_stages"],
                {"sqnorm_ptr": "*fp32", "tickets_ptr": "*i32"},
                tensor_cores=True,
                aligned=aligned,
            )


def wgrad_cases(kind: str, config: configs.Config, has_tma: bool) -> Iterator[Case]:
    """Everything that a tile of ``configs.CANDIDATES`` is launched as: dW in the inputs' dtype or
    in float32 (under autocast), or added to, or norms alone; tiles whole, shared by programs, or
    both; by descriptors and by pointers; of float32 on the ordinary cores also with unaligned rows.
    """
    sharing = [dict(), dict(WHOLE=False, SHARED=True), dict(SHARED=True)]
    dtype = "bf16" if kind.startswith("half") else "fp32"
    options: dict[str, Any] = dict(PRECISION="tf32") if kind.startswith("tf32") else {}
    if kind == "float32":
        ways = [dict(aligned=True), dict(aligned=False)]
    elif "unaligned" in kind:  # a descriptor reads rows of 1000 bfloat16
        ways = [dict(tma=tma, aligned=False) for tma in ((False, True) if has_tma else (False,))]
    else:
        ways = [dict(tma=False), dict(tma=True)] if has_tma else [dict(tma=False)]
    for way, of_tiles in product(ways, sharing):
        constants = way | of_tiles | options
        for dw in dict.fromkeys((dtype, "fp32")) if of_tiles.get("WHOLE", True) else ("fp32",):
            yield wgrad(dtype, config, dw=dw, **constants)
        if of_tiles.get("WHOLE", True):
            yield wgrad(dtype, config, dw="fp32", ADD=True, **constants)
            yield wgrad(dtype, config, dw="none", **constants)


def finish_cases() -> Iterator[Case]:
    """The kernel that finishes linear layers: each tile's pieces, or those of a plain product, and
    a bias of several samples a step or of chunks of tokens; alone and together.
    """
    shapes = {
        (config.block_o, config.block_i): config
        for candidates in configs.CANDIDATES.values()
        for config in candidates
    }
    balance = configs.balance(16, 9, 12)
    weights = [linear_plan.Squares(512, 512, config, balance) for config in shapes.values()]
    balances = configs.balance(2, 64, 24), configs.balance(1, 999, 132)  # many parts of a tile
    weights += [linear_plan.Squares(512, 512, configs.HALF[0], each) for each in balances]
    plain = linear_plan.Squares(512, 512)
    runs = product(
        ("bf16", "fp32"),
        (None, plain, *weights),
        ((False, 1), (True, 2), (True, 256), (True, 4096)),
        ("",),
    )
    short = ((True, 8), (True, 16))
    kinds_of_bias = ((False, 1), (True, 2), *short, (True, 256))
    for dtype, weight, (bias, tokens), how in (  # dW rounded from a float32 product, norms alone
        *runs,
        *product(("bf16", "fp32"), (plain, weights[0]), short, ("",)),
        ("bf16", plain, (False, 1), "rounded"),
        *product(("bf16",), (None, weights[0]), kinds_of_bias, ("norms",)),
    ):
        if weight is None and not bias:
            continue
        of_bias = (768, 768 * tokens, 768) if bias else None
        plan = linear_plan.plan((4, tokens), weight, of_bias, processors=132)
        values = plan.launch.values[len(linear_plan.FIXED) :]
        constants = dict(zip(linear_plan.CONSTANTS, values))
        absent = ([] if weight else ["dw_ptr"]) + ([] if bias else ["dy_ptr", "db_ptr"])
        absent += ["dw_ptr", "db_ptr"] if how == "norms" else []
        floats = ("work_ptr", "product_ptr", "rows_ptr")
        kind = "no weight" if weight is None else "plain" if weight.config is None else ""
        if weight and weight.config:
            height = constants["HEIGHT"]
            few = f" by {height}" if height < linear_finish.HEIGHTS[0] else ""
            kind = f"{weight.config.block_o}x{weight.config.block_i}{few}"
        words = [f"bias {constants['CHUNKS']}"] * bias + [how] * (how != "")
        words += [f"of {tokens} tokens"] * ((bias, tokens) in short)
        absent += [] if how == "rounded" else ["product_ptr"]
        yield Case(
            " ".join(["linear_finish", kind, *words]),
            linear_finish.linear_finish_kernel,
            dtype,
            constants | dict.fromkeys(absent),
            linear_finish.WARPS,
            maxnreg=plan.launch.options.get("maxnreg"),
            pointers=dict.fromkeys(floats, "*fp32") | {"tickets_ptr": "*i32"},
        )


def segments_cases() -> Iterator[Case]:
    outputs = ("bf16", "fp32", "none")
    half = [("bf16", "ieee", aligned, dw) for aligned in (True, False) for dw in outputs]
    single = [
        ("fp32", p, aligned, dw)
        for p in ("ieee", "tf32")
        for aligned in (True, False)
        for dw in ("fp32", "none")
    ]
    for dtype, precision, aligned, dw in half + single:
        with tf32(precision == "tf32"):
            config = segments.fixed_config(DTYPES[dtype], aligned)
        words = [precision] * (dtype == "fp32") + ["unaligned"] * (not aligned)
        words += [OUTPUTS.get(dw, f"to {dw}")] * (dw != dtype)
        yield Case(
            " ".join(["linear_wgrad_segments", str(config), *words]),
            segments.linear_wgrad_segments_kernel,
            dtype,
            blocks(config) | dict(PRECISION=precision) | NO_DW[dw == "none"],
            config.num_warps,
            config.num_stages,
            {"partial_ptr": "*fp32", "dw_ptr": f"*{dw}"}
            | {"starts_ptr": "*i32", "ticket_ptr": "*i32"},
            tensor_cores=precision == "tf32" or dtype != "fp32",
            aligned=aligned,
            maxnreg=segments.most_registers_of(config),
        )
    yield Case(
        "segment_sums",
        segments.segment_sums_kernel,
        "bf16",
        {name: size for name, size in segments.SUMS.items() if name.isupper()},
        segments.SUMS["num_warps"],
        pointers={"sums_ptr": "*fp32", "starts_ptr": "*i32", "tickets_ptr": "*i32"},
    )
    options = sums.plan(8, (1,), (768,)).options
    for weight, bias in ((True, False), (False, True), (True, True)):
        absent = [] if weight else ["partial_ptr"]
        absent += [] if bias else ["sums_ptr"]
        names = ("rows_ptr", "partial_ptr", "sums_ptr", "scratch_ptr")
        yield Case(
            f"segments_finish{' weight' * weight}{' bias' * bias}",
            segments.segments_finish_kernel,
            "bf16",
            {name: size for name, size in options.items() if name.startswith("BLOCK")}
            | dict(WEIGHT=weight, BIAS=bias, BLOCK_W=32)
            | dict.fromkeys(absent),
            options["num_warps"],
            pointers=dict.fromkeys(names, "*fp32") | {"tickets_ptr": "*i32"},
            maxnreg=options["maxnreg"],
        )


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """torch's own switch, inside of the block."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def blocks(config: configs.Config) -> dict[str, Any]:
    return {name: size for name, size in config.options().items() if name.isupper()}


def wgrad(
    dtype: str,
    config: configs.Config,
    tma: bool = False,
    aligned: bool = True,
    dw: str = "",
    PRECISION: str = "ieee",
    **options: bool,
) -> Case:
    dw = dw or dtype
    flags = dict(ADD=False, WHOLE=True, SHARED=False) | options
    constants = blocks(config) | flags | dict(TMA=tma, PRECISION=PRECISION) | NO_DW[dw == "none"]
    pointers = {"work_ptr": "*fp32", "tickets_ptr": "*i32", "dw_ptr": f"*{dw}"}
    if tma:
        pointers["x"] = f"tensordesc<{dtype}[1, {config.block_t}, {config.block_i}]>"
        pointers["dy"] = f"tensordesc<{dtype}[1, {config.block_t}, {config.block_o}]>"
    else:
        pointers |= {"x": f"*{dtype}", "dy": f"*{dtype}"}
    mixed = flags["WHOLE"] and flags["SHARED"]
    roomy = flags["ADD"] or dw == "fp64" or (mixed and not tma)
    words = ["add"] * flags["ADD"] + ["TMA"] * tma
    words += [("shared", "mixed")[flags["WHOLE"]]] * flags["SHARED"]
    words += [PRECISION] * (dtype == "fp32") + ["unaligned"] * (not aligned)
    words += [OUTPUTS.get(dw, f"to {dw}")] * (dw != dtype and not flags["ADD"])
    return Case(
        " ".join(["linear_wgrad", str(config), *words]),
        linear_wgrad.linear_wgrad_kernel,
        dtype,
        constants,
        config.num_warps,
        config.num_stages,
        pointers,
        tensor_cores=PRECISION == "tf32" or dtype != "fp32",
        aligned=aligned,
        maxnreg=config.registers(roomy),
    )


def attention_stride(name: str) -> bool:
    """Rows of q, k, v and their gradients begin at multiples of 16 bytes."""
    tensor, _, dim = name.partition("_stride_")
    return tensor in ("q", "k", "v", "o", "do", "dq", "dk", "dv") and dim in ("b", "h", "t")


def compile_case(case: Case, device: Device) -> dict[str, Any]:
    signature, attributes = {}, {}
    for i, name in enumerate(case.fn.arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
        elif name in case.pointers or name.endswith("_ptr"):
            kind = signature[name] = case.pointers.get(name, f"*{case.dtype}")
            paths = [(i, k) for k in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
            if name != "pieces" and (case.aligned or name != "widths"):
                attributes |= {path: [["tt.divisibility", 16]] for path in paths}
        else:
            signature[name] = "fp32" if name in ("eps", "offset", "scale") else "i32"
            if case.aligned and (name in ALIGNED or attention_stride(name)):
                attributes[(i,)] = [["tt.divisibility", 16]]
    attributes = {
        k: v for k, v in attributes.items() if "desc" not in list(signature.values())[k[0]]
    }
    source = ASTSource(case.fn, signature, constexprs=case.constants, attrs=attributes)
    options = known(
        dict(num_warps=case.num_warps, num_stages=case.num_stages, maxnreg=case.maxnreg)
    )
    compiled = triton.compile(source, target=device.target, options=options)
    return {
        "kernel": case.name,
        "dtype": case.dtype,
        "tensor_cores": case.tensor_cores,
        "warps": case.num_warps,
        "shared": compiled.metadata.shared,
        "cut off": case.constants.get("PRECISION") == "tf32" and cut_off(compiled.asm["ttir"]),
        **(read_cubin if device.cuda else read_amdgcn)(compiled, device),
    }


if __name__ == "__main__":
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is set: nothing would be compiled"
    device = no_gpu.pretend(sys.argv[1])
    for case in cases(device):
        print(json.dumps(compile_case(case, device)), flush=True)
