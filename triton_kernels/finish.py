# SPDX-License-Identifier: Apache-2.0
"""The end of an operator: partial squared norms become its probe row, without a kernel of its own.

A finishing kernel has many programs, and what all of them found must be added once more. The last
program to arrive does that. Programs count themselves by a ticket, an int32 that an earlier kernel
has set to zero; whoever is last, the numbers are added in the same order, so two runs give the same
bits.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def barrier_waits_for_no_store():
    """On AMD's CDNA devices (gfx90a, gfx942) the release of an arrival waits for the stores of its
    own warp alone, and the barrier before it for none: LLVM takes the cache that the warps of a
    block share to be enough. For GFX10 it was not (LLVM's pull request 160501).
    """
    target = tl.target_info.current_target()
    return target is not None and str(target.arch).startswith("gfx9")


@triton.jit
def arrives_last(ticket_ptr, programs):
    """Whether this is the last of ``programs`` to come here. What all of them have stored before is
    then visible to it.
    """
    if barrier_waits_for_no_store():
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [0], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()  # the stores of all threads of this program come before its arrival
    return tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1


@triton.jit
def column_sums(partial_ptr, pieces, stride, offs, mask, BLOCK_P: tl.constexpr):
    """Σ over ``pieces`` rows of ``partial_ptr[piece * stride + offs]`` in float64, in their order
    up to blocks of ``BLOCK_P``.
    """
    total = tl.zeros((offs.shape[0],), tl.float64)
    for first in range(0, pieces, BLOCK_P):
        piece = first + tl.arange(0, BLOCK_P)
        at = partial_ptr + piece.to(tl.int64)[:, None] * stride + offs[None, :]
        found = tl.load(at, mask=(piece < pieces)[:, None] & mask[None, :], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit
def clear_tickets(tickets_ptr, tickets, MANY: tl.constexpr = False):
    """Set them to zero, in the first program of a kernel before the one that takes them; where
    there are ``MANY``, in all along the grid's first axis. For the few of other kernels that would
    cost up to 63 registers a thread.
    """
    if MANY:
        for block in range(tl.program_id(0), tl.cdiv(tickets, 128), tl.num_programs(0)):
            offs = block * 128 + tl.arange(0, 128)
            tl.store(tickets_ptr + offs, 0, mask=offs < tickets)
    elif tl.program_id(0) == 0:
        for first in range(0, tickets, 128):
            offs = first + tl.arange(0, 128)
            tl.store(tickets_ptr + offs, 0, mask=offs < tickets)
