# SPDX-License-Identifier: Apache-2.0
"""The end of an operator: partial squared norms become its probe row, without a kernel of its own.

A finishing kernel has many programs, and what all of them found must be added once more. The last
program to arrive does that. Programs count themselves by a ticket, an int32 that an earlier kernel
has set to zero; whoever is last, the numbers are added in the same order, so two runs give the same
bits.
"""

import triton
import triton.language as tl


@triton.jit
def arrives_last(ticket_ptr, programs):
    """Whether this is the last of ``programs`` to come here. What all of them have stored before is
    then visible to it.
    """
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
def clear_tickets(tickets_ptr, tickets):
    """Set them to zero, by all programs of a kernel before the one that takes them."""
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    program = program * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    for block in range(program, tl.cdiv(tickets, 128), programs):
        offs = block * 128 + tl.arange(0, 128)
        tl.store(tickets_ptr + offs, 0, mask=offs < tickets)
