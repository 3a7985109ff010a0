# SPDX-License-Identifier: Apache-2.0
"""A schedule in trainers that change the batch size only where a step of either size would end.

OLMo-core and our ``BatchSizeCallback``s do so, because they find their place in the data by
counting batches. A change may then come late, and one that still waits when the next is due is left
out.
"""

import math
from dataclasses import dataclass

from gnsfast.critical_batch.laws.schedule import BatchSizeSchedule


@dataclass(frozen=True)
class AlignedChange:
    """What becomes of a threshold.

    Args:
        threshold, new: of the schedule.
        old: samples of a step before it.
        samples: trained at the change, or None where there is none: the next threshold or the end
            of the run comes first, or ``old`` is ``new``.
        late: steps of ``old`` samples from the threshold to the change.
    """

    threshold: int
    old: int
    new: int
    samples: int | None
    late: int


def aligned_changes(schedule: BatchSizeSchedule) -> list[AlignedChange]:
    """Every threshold but the first, in an epoch that holds the whole run.

    >>> from gnsfast.critical_batch import BatchSizeSchedule
    >>> from gnsfast.critical_batch.laws.aligned import aligned_changes
    >>> schedule = BatchSizeSchedule([(0, 4), (90, 16)], 2000, tokens_per_sample=10)
    >>> aligned_changes(schedule)  # due after 12 samples, and made after 16
    [AlignedChange(threshold=90, old=4, new=16, samples=16, late=1)]
    """
    thresholds, length = schedule.thresholds, schedule.tokens_per_sample
    ends = [*(int(tokens) for tokens, _ in thresholds[2:]), math.inf]
    found, old = [], thresholds[0][1]
    for (tokens, new), end in zip(thresholds[1:], ends):
        due = _next_multiple(-(-int(tokens) // length), old)
        at = _next_multiple(due, math.lcm(old, new))
        made = old != new and at * length < min(end, schedule.total_tokens)
        late = (at - due) // old
        found.append(AlignedChange(int(tokens), old, new, at if made else None, late))
        old = new if made else old
    return found


def _next_multiple(samples: int, of: int) -> int:
    return -(-samples // of) * of
