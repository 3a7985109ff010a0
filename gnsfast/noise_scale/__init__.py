# SPDX-License-Identifier: Apache-2.0
"""The mathematics of a noise scale: statistics, factors of the loss, the result, what it says of a
batch size, brute force.
"""

from gnsfast.counts import percent
from gnsfast.noise_scale import clusters, dual_norms, loss_factors, statistics
from gnsfast.noise_scale.brute_force import brute_force_noise_scale
from gnsfast.noise_scale.clusters import CLUSTER_NUMBERS, summarize_clusters
from gnsfast.noise_scale.dual_norms import NUMBERS, summarize_dual
from gnsfast.noise_scale.flag import (
    OVER,
    Factor,
    Flag,
    checked_factor,
    critical_batch_metrics,
    excess,
    flag,
    verdict_on,
)
from gnsfast.noise_scale.result import (
    METRICS,
    NOT_MEASURED,
    OTHERS,
    UNEQUAL,
    AdamNoiseScale,
    ClusterNoiseScale,
    DualNoiseScale,
    DualNormEstimate,
    Estimate,
    GroupNoiseScale,
    ModuleNoiseScale,
    NoiseScale,
)
from gnsfast.noise_scale.summaries import summarize, summarize_adam, summarize_group

__all__ = [
    "AdamNoiseScale",
    "CLUSTER_NUMBERS",
    "ClusterNoiseScale",
    "DualNoiseScale",
    "DualNormEstimate",
    "Estimate",
    "Factor",
    "Flag",
    "GroupNoiseScale",
    "METRICS",
    "ModuleNoiseScale",
    "NOT_MEASURED",
    "NUMBERS",
    "NoiseScale",
    "OTHERS",
    "OVER",
    "UNEQUAL",
    "brute_force_noise_scale",
    "checked_factor",
    "clusters",
    "critical_batch_metrics",
    "dual_norms",
    "excess",
    "flag",
    "loss_factors",
    "percent",
    "statistics",
    "summarize",
    "summarize_adam",
    "summarize_clusters",
    "summarize_dual",
    "summarize_group",
    "verdict_on",
]
