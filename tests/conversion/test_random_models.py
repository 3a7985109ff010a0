# SPDX-License-Identifier: Apache-2.0
"""Random models with an example: every norm that is given is right, and every refusal has a reason.
``python tests/random_models.py 10000`` tries more.
"""

import random_models


def test_random_models_are_right_or_refused() -> None:
    found = [random_models.outcome(seed) for seed in range(150)]
    covered = [fraction for what, fraction in found if what == "right"]
    assert len(covered) > 75 and sum(covered) / len(covered) > 0.8
