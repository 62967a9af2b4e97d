"""Which of its own checkpoints a script continues from after a crash: pure.

A checkpoint may be damaged in a way that its format does not show. So one that ranks crashed from, before they had made
another, is passed over for the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from slurmtrain.model.interruption.policy import PriorEnd


def suspects(history: Sequence[PriorEnd]) -> Mapping[str, str]:
    """The fingerprints of checkpoints to pass over, each with the reason as a phrase.

    Suspected is what ranks started from and crashed, from within the program, without a new checkpoint; interruptions
    and hangs say nothing about it. If ranks crashed in the same way from two checkpoints, neither was the reason.

    ``history``: the ends of the run since a person last started it, who may have cured the problem.
    """
    crashes = [past for past in history if past.cause == "crash" and not past.foreign and _made_nothing(past)]
    by_failure: defaultdict[str, set[str]] = defaultdict(set)
    for past in crashes:
        if past.began_from is not None:
            by_failure[past.where].add(past.began_from)
    suspected: dict[str, str] = {}
    for where, begun_from in by_failure.items():
        if len(begun_from) == 1:
            signature = f" ({where})" if where else ""
            suspected |= dict.fromkeys(begun_from, f"its ranks crashed{signature} before they had made another")
    return suspected


def _made_nothing(past: PriorEnd) -> bool:
    """Whether there is no newer checkpoint than the one that its ranks started from."""
    return past.left is None or past.left == past.began_from
