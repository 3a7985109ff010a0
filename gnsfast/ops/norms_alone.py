# SPDX-License-Identifier: Apache-2.0
"""Operators whose sums over the samples nobody wants: torch's own functions give the gradients."""

from typing import Any

from torch import Tensor

from gnsfast.ops import dtensor, operators
from gnsfast.signatures import OPERATORS, RESULTS, EmbeddingWgrad, empty_rows, schema
from gnsfast.tensors import is_dtensor


def norms_alone(operator: Any, a: Any) -> tuple[Tensor, ...]:
    """The results of an operator, whose sums may be empty: of linear layers, embeddings and
    convolutions a back-end gives the probe rows alone.
    """
    name = _NAMES.get(operator)
    linked = getattr(a, "ids_BS", None) is not None  # the links of a tied head take rows of dW
    if name is None or linked or any(map(is_dtensor, a[:2])):
        found: tuple[Tensor, ...] = operator(a)
        return found
    rows, none = _ROWS_OF[name](a), a[0].new_empty(0)
    return tuple(rows if kind == "rows" else none for kind in RESULTS[name])


_NAMES = {
    dtensor.linear_wgrad: "linear_wgrad",
    operators.embedding_wgrad: "embedding_wgrad",
    operators.conv_wgrad: "conv_wgrad",
}


def _empty_rows(a: Any) -> Tensor:
    parameters = 1 if isinstance(a, EmbeddingWgrad) else a.weight + a.bias
    return empty_rows(a[0], parameters, a.samples)


def _registered(of: str) -> operators.Operator:
    name = of.replace("wgrad", "norms")
    arguments = schema(of).split(" -> ")[0].replace(of, name)
    return operators.registered(name, OPERATORS[of], f"{arguments} -> Tensor", _empty_rows)


_ROWS_OF = {name: _registered(name) for name in _NAMES.values()}
