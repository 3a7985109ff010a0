# SPDX-License-Identifier: Apache-2.0
"""The options of a model: what is left out, and an example of a batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from gnsfast.following import Followed, set_excluded
from gnsfast.probing import ProbeSlab, unwrapped
from gnsfast.tensors import tensors_of


def configure(
    model: nn.Module,
    *,
    exclude: Iterable[str] = (),
    example: Any = None,
    run: Callable[..., Any] | None = None,
    num_samples: int | None = None,
) -> nn.Module:
    """Set what is left out of ``model``, or show where its samples are before the first block.
    Returns ``model``, which stays as it is. Most models need neither.

    Args:
        exclude: patterns (``fnmatch``) of parameters, and of modules with all their parameters,
            that get no norms.
        example: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword
            arguments. A batch that is a tuple itself is ``example=(batch,)``. It is needed only
            where the model is not called as a whole, or to read ``coverage`` before training.
        run: what is called with the example in place of the model, such as a ``training_step`` that
            calls its parts. What it returns for each sample, such as logits, is what the norms are
            proven on; of a loss alone nothing can be proven.
        num_samples: the number of samples in ``example``, by default the size of dimension 0 of its
            first tensor.

    A second call replaces the options of the first.

    Raises:
        ValueError: for a pattern that matches nothing, and for an example with one sample.
        ObservationError: for an example, if a batch norm uses the statistics of its batch.

    What the model, or ``run``, raises for the example is raised here too.

    >>> model = gnsfast.configure(torch.nn.Linear(5, 2), exclude=["bias"])
    >>> [row.static for row in gnsfast.coverage(model).rows]
    [True, False]
    """
    inner = unwrapped(model)
    set_excluded(inner, exclude)
    Followed.forget(inner)
    if example is not None:
        _show(model, example, run, num_samples)
    return model


def _show(
    model: nn.Module, example: Any, run: Callable[..., Any] | None, num_samples: int | None
) -> None:
    slab = ProbeSlab(model)
    slab.refuse_batch_statistics()
    followed, structure = slab.followed, slab.followed.structure
    if num_samples is None:
        num_samples = next((t.shape[0] for t in tensors_of(example) if t.ndim), 0)
    if num_samples < 2:
        raise ValueError(
            f"The example has {num_samples} samples. It takes two or more to tell a sample from a "
            "batch, and three are best."
        )
    args = () if isinstance(example, Mapping) else (example,)
    args = example if isinstance(example, tuple) else args
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    followed.open(model, num_samples)
    try:
        followed.batches.show(args, kwargs, run)
    finally:
        followed.close()
    if followed.batches.proof.reason and not structure.groups:
        structure.given = args, kwargs
        try:
            with structure.as_it_was():  # its own error says most
                (run or structure.model)(*args, **kwargs)
        finally:
            structure.given = ()
