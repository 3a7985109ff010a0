# SPDX-License-Identifier: Apache-2.0
"""Random models: every norm that is given is right, and every refusal has a reason.
``python tests/random_models.py 2000`` tries more.
"""

import pytest
import random_models

SEEDS = [range(50), pytest.param(range(50, 150), marks=pytest.mark.slow)]


@pytest.mark.second
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_models_are_right_or_refused(seeds: range) -> None:
    found = [random_models.outcome(seed) for seed in seeds]
    covered = [fraction for what, fraction in found if what.startswith("right")]
    assert len(covered) > 0.7 * len(seeds) and sum(covered) / len(covered) > 0.9
