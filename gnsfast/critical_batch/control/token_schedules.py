# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as functions of the tokens trained so far, for any batch size.

A shape is the factor of the optimizer's own learning rate. It rises from 0 to 1 over ``warm_up``
tokens and ends at ``final``, where it stays if training continues. An optimizer step has the
learning rate of the tokens trained *before* it, so with a warm-up the first step has 0, as in
PyTorch's and transformers' schedules.
"""

import math
from collections.abc import Callable

from gnsfast.arguments import real_number, whole_number

Shape = Callable[[float], float]


def constant(*, warm_up: int = 0) -> Shape:
    """1 after the warm-up.

    >>> from gnsfast.critical_batch.control import constant
    >>> [constant(warm_up=1000)(tokens) for tokens in (0, 500, 2000)]
    [0.0, 0.5, 1.0]
    """
    return _shape(whole_number("warm_up", warm_up, 0), lambda tokens: 1.0)


def linear(total_tokens: int, *, warm_up: int = 0, final: float = 0.0) -> Shape:
    """A straight line from 1 after the warm-up to ``final`` at ``total_tokens``.

    >>> from gnsfast.critical_batch.control import linear
    >>> [linear(10_000, final=0.1)(tokens) for tokens in (0, 5000, 20_000)]
    [1.0, 0.55, 0.1]
    """
    warm_up, span, final = _checked(total_tokens, warm_up, final)
    return _shape(warm_up, lambda tokens: _line(tokens - warm_up, span, final))


def cosine(total_tokens: int, *, warm_up: int = 0, final: float = 0.0) -> Shape:
    """Half a cosine from 1 after the warm-up to ``final`` at ``total_tokens``.

    >>> from gnsfast.critical_batch.control import cosine
    >>> [round(cosine(10_000, final=0.1)(tokens), 4) for tokens in (0, 5000, 10_000)]
    [1.0, 0.55, 0.1]
    """
    warm_up, span, final = _checked(total_tokens, warm_up, final)

    def falling(tokens: float) -> float:
        turn = math.pi * min(1.0, (tokens - warm_up) / span)
        return final + (1.0 - final) * (1.0 + math.cos(turn)) / 2

    return _shape(warm_up, falling)


def wsd(total_tokens: int, *, decay: int, warm_up: int = 0, final: float = 0.0) -> Shape:
    """Warm-up, stable at 1, then a line to ``final`` over the last ``decay`` tokens.

    >>> from gnsfast.critical_batch.control import wsd
    >>> [wsd(10_000, decay=2000)(tokens) for tokens in (0, 8000, 9000, 10_000)]
    [1.0, 1.0, 0.5, 0.0]
    """
    warm_up, span, final = _checked(total_tokens, warm_up, final)
    if (decay := whole_number("decay", decay)) > span:
        raise ValueError(
            f"warm_up={warm_up:,} and decay={decay:,} together exceed total_tokens={total_tokens:,}"
        )
    start = warm_up + span - decay
    return _shape(warm_up, lambda tokens: _line(max(0.0, tokens - start), decay, final))


def by_tokens(shape: Shape, tokens: Callable[[], float]) -> Callable[[int], float]:
    """``shape`` for ``torch.optim.lr_scheduler.LambdaLR``, whose step number is ignored.

    Args:
        tokens: returns the tokens trained so far. The loop counts the tokens of an optimizer step
            before it calls ``scheduler.step()``, and restores the count before a resumed run
            continues: the state of a ``LambdaLR`` does not hold it.

    >>> from gnsfast.critical_batch.control import by_tokens, linear
    >>> tokens = 0
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    >>> rate = by_tokens(linear(10_000), lambda: tokens)
    >>> scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    >>> tokens += 2500
    >>> optimizer.step(); scheduler.step()
    >>> scheduler.get_last_lr()
    [0.375]
    """
    # A function, not an object: LambdaLR.state_dict would copy an object's attributes.
    return lambda step: shape(tokens())


def _checked(total_tokens: int, warm_up: int, final: float) -> tuple[int, int, float]:
    """The checked warm-up, the number of tokens after it, and the checked ``final``."""
    total_tokens = whole_number("total_tokens", total_tokens)
    if (warm_up := whole_number("warm_up", warm_up, 0)) >= total_tokens:
        raise ValueError(f"warm_up={warm_up:,} must be less than total_tokens={total_tokens:,}")
    return warm_up, total_tokens - warm_up, real_number("final", final, 0.0, 1.0)


def _line(done: float, span: int, final: float) -> float:
    return final + (1.0 - final) * (1.0 - min(1.0, done / span))


def _shape(warm_up: int, after: Shape) -> Shape:
    def shape(tokens: float) -> float:
        if not tokens >= 0:
            raise ValueError(
                f"the tokens trained so far must be a number of at least 0, not {tokens!r}"
            )
        return tokens / warm_up if tokens < warm_up else after(tokens)

    return shape
