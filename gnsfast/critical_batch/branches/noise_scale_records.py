# SPDX-License-Identifier: Apache-2.0
"""The noise scales at a checkpoint as JSON objects, and back."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gnsfast.arguments import finite_or_none
from gnsfast.noise_scale import (
    OTHERS,
    DualNormEstimate,
    Estimate,
    ModuleNoiseScale,
    NoiseScale,
)


def noise_scale_records(found: NoiseScale | None) -> dict[str, Any]:
    """A JSON object of the noise scale in each metric, or None where it was not measured."""
    others = {} if found is None else found.others
    return {
        "noise_scale": noise_scale_record(found),
        **{metric: noise_scale_record(others.get(metric)) for metric in OTHERS},
    }


def noise_scale_record(scale: Estimate | None) -> dict[str, Any] | None:
    """A JSON object of a noise scale, or None where it was not measured."""
    if scale is None or math.isnan(scale.noise_scale):
        return None
    kind = DualNormEstimate if isinstance(scale, DualNormEstimate) else ModuleNoiseScale
    numbers = {f.name: finite_or_none(getattr(scale, f.name)) for f in fields(kind)}
    return numbers | {"resolved": scale.resolved}


def noise_scales_from_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``CriticalBatch`` that such objects hold. Older records lack some of them."""
    return {
        name: _noise_scale(record.get(name), kind)
        for name, kind in (
            ("noise_scale", ModuleNoiseScale),
            ("adam", ModuleNoiseScale),
            ("sign", DualNormEstimate),
            ("spectral", DualNormEstimate),
        )
    }


def _noise_scale(
    record: Mapping[str, Any] | None, kind: type[ModuleNoiseScale] | type[DualNormEstimate]
) -> Estimate | None:
    """The noise scale of an object, in which null stands for infinity."""
    if record is None:
        return None
    return kind(*(math.inf if record[f.name] is None else record[f.name] for f in fields(kind)))
