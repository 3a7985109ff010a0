# SPDX-License-Identifier: Apache-2.0
"""The factor from a noise scale to a critical batch size, which a JSON file can hold."""

import json
import math
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gnsfast.arguments import check_choice
from gnsfast.critical_batch.run_identity import RunIdentity
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
        run: the run that it was measured in, as far as that is known. A run that differs refuses
            it: ``for_other_run()`` lifts that.
        tokens: trained before each checkpoint that it was measured at.

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
    run: RunIdentity = RunIdentity()
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, METRICS)
        positive = math.isfinite(self.value) and self.value > 0
        if not (positive and 0 <= self.lower <= self.value <= self.upper):
            raise ValueError(
                f"a factor must be positive, finite and inside its interval, not {self.value!r} "
                f"with the interval {self.lower!r} to {self.upper!r}"
            )

    def check_run(self, run: RunIdentity) -> None:
        """Raise ValueError where ``run`` differs from the run that this was measured in. What is
        unknown of one of them is not compared.
        """
        if other := self.run.differences(run):
            raise ValueError(
                f"The factor was measured in another run, with {', '.join(other)} ({self.source}). "
                "Measure it in this run (gnsfast branch --factor), or say that you want it: "
                "factor=CriticalBatchFactor.load(...).for_other_run()"
            )

    def for_other_run(self) -> "CriticalBatchFactor":
        """The same factor for a run that differs; ``source`` says which run it is of."""
        return replace(self, run=RunIdentity(), source=f"{self.source}; of another run: {self.run}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, with null for an infinite ``upper``."""
        fields = {k: None if v == math.inf else v for k, v in asdict(self).items()}
        text = json.dumps({"kind": KIND, "format": FORMAT, **fields}, indent=1, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "CriticalBatchFactor":
        """Read what ``save`` wrote. Where a file does not say which run it is of, a warning does.

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
        if "run" not in found:
            warnings.warn(
                f"{path} does not say which run its factor was measured in, because an older "
                "version wrote it. So nothing refuses it in a run that differs.",
                stacklevel=2,
            )
        try:
            value, lower, upper = (found[k] for k in ("value", "lower", "upper"))
            ends = float(value), float(lower), math.inf if upper is None else float(upper)
            run = RunIdentity.from_record(found.get("run"))
            tokens = tuple(int(t) for t in found.get("tokens", ()))
            text = str(found["metric"]), str(found["source"])
            return CriticalBatchFactor(*ends, *text, run, tokens)
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{path} is damaged: {e}") from e
