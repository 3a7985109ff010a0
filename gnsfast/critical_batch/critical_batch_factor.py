# SPDX-License-Identifier: Apache-2.0
"""The factor from a noise scale to a critical batch size, which a JSON file can hold."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_choice
from gnsfast.noise_scale import METRICS

KIND, FORMAT = "critical batch factor", 1


@dataclass(frozen=True)
class CriticalBatchFactor:
    """The critical batch size (CBS) divided by the noise scale, both measured at one checkpoint.

    Args:
        value: the ratio; ``lower`` to ``upper`` is its interval, and ``upper`` may be infinite.
        metric: of the noise scale: ``"euclidean"``, ``"adam"``, ``"sign"`` or ``"spectral"``
            (``NoiseScale.under``). A factor never multiplies a noise scale of another metric.
        source: one line that says where it was measured.

    Raises:
        ValueError: for a value that is not positive and finite, or lies outside its interval.

    >>> from gnsfast.critical_batch import CriticalBatchFactor
    >>> CriticalBatchFactor(8.0, 5.6, 11.3, "euclidean", "160M model at 2.1B tokens").value * 30
    240.0
    """

    value: float
    lower: float
    upper: float
    metric: str
    source: str

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        positive = math.isfinite(self.value) and self.value > 0
        if not (positive and 0 <= self.lower <= self.value <= self.upper):
            raise ValueError(
                f"a factor must be positive, finite and inside its interval, not {self.value!r} "
                f"with the interval {self.lower!r} to {self.upper!r}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, with null for an infinite ``upper``."""
        fields = {k: None if v == math.inf else v for k, v in asdict(self).items()}
        text = json.dumps({"kind": KIND, "format": FORMAT, **fields}, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "CriticalBatchFactor":
        """Read what ``save`` wrote.

        Raises:
            ValueError: for a file of another kind or format.
        """
        try:
            found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path} is not JSON: {e}") from e
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise ValueError(f"{path} is JSON, but not a {KIND}")
        if found.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {found.get('format')!r}, but this version of gnsfast reads "
                f"format {FORMAT}"
            )
        try:
            value, lower, upper = (found[k] for k in ("value", "lower", "upper"))
            ends = float(value), float(lower), math.inf if upper is None else float(upper)
            return CriticalBatchFactor(*ends, str(found["metric"]), str(found["source"]))
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{path} is damaged: {e}") from e
