"""When to save, and when ranks talk to each other: pure decisions.

Interval: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
the time between saves that loses least is sqrt(2 * d * M), for a save that stalls training for d seconds and a mean
time M between interruptions that come unannounced.
"""

from __future__ import annotations

import math

from slurmtrain.model.spec import Every

# Mean time between unannounced interruptions of one node where nothing is known: six hours.
PRIOR_MTBF_S = 6 * 3600.0
# The first save of an attempt comes this early: it measures what a save costs, and shows that saving works.
FIRST_SAVE_S = 30.0
SHORTEST_S = 10.0
LONGEST_S = 3600.0
# How often ranks agree on whether to stop or save. A stop request waits at most this long plus one step.
AGREE_S = 0.25


def auto_interval(stall_s: float | None, nodes: int) -> float:
    """Seconds between saves: Young's optimum, within bounds; ``stall_s`` is None before the first save."""
    if stall_s is None:
        return FIRST_SAVE_S
    return min(LONGEST_S, max(SHORTEST_S, math.sqrt(2 * stall_s * PRIOR_MTBF_S / nodes)))


def is_due(every: Every, *, since_save_s: float, stall_s: float | None, nodes: int) -> bool:
    """Whether to save now, ``since_save_s`` seconds after the last save: for intervals of time, not of steps."""
    seconds = every.amount * 60 if every.unit == "minutes" else auto_interval(stall_s, nodes)
    return since_save_s >= seconds


def steps_to_agreement(step_s: float, previous: int) -> int:
    """After how many more steps ranks agree again: about AGREE_S seconds, growing at most twofold a time."""
    wanted = int(AGREE_S / step_s) if step_s > 0 else previous * 2
    return max(1, min(wanted, previous * 2))
