# SPDX-License-Identifier: Apache-2.0
"""Opens, reads and checks the probes of a model."""

from gnsfast.probing import checks
from gnsfast.probing.audit import Arrivals, ArrivedNorms, Audit, is_audited
from gnsfast.probing.sample_norms import SampleNorms, per_sample_sqnorms
from gnsfast.probing.slab import ProbeSlab, calls_of
from gnsfast.probing.verification import Verification, VerifiedParameter, verify

__all__ = [
    "ArrivedNorms",
    "Arrivals",
    "Audit",
    "ProbeSlab",
    "SampleNorms",
    "Verification",
    "VerifiedParameter",
    "calls_of",
    "checks",
    "is_audited",
    "per_sample_sqnorms",
    "verify",
]
