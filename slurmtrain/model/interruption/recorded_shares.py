"""How ranks divided the batches of steps that are repeated: these have the shares again that they had before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmtrain.model.run.events.rank_events import SharesChosen
from slurmtrain.model.run.run import Attempt


@dataclass(frozen=True, slots=True)
class RecordedShares:
    """What ranks chose in the steps after a checkpoint."""

    choices: Mapping[int, SharesChosen] = field(default_factory=dict)
    """By the number of finished steps."""
    until: int = 0
    """How many steps were finished with them; after these nothing is recorded."""


def recorded_shares(attempts: Sequence[Attempt], step: int, ranks: int) -> RecordedShares:
    """The shares of the steps after ``step``, as computed before by this number of ``ranks``.

    Args:
        attempts: The run's attempts. Each repeats the records of the attempts before it, so that the newest choice at a
            step counts. Attempts before one that started from scratch do not count, nor do attempts before one with
            another number of ranks.
        step: The number of finished steps from which training goes on.
        ranks: The present number of ranks.
    """
    choices: dict[int, SharesChosen] = {}
    until = 0
    for attempt in attempts:
        if attempt.from_start:
            choices, until = {}, 0
        for record in attempt.shares:
            chosen = SharesChosen.from_json({key: value for key, value in record.items() if key != "at"})
            if chosen is None or chosen.step is None or min(chosen.shares, default=0) < 1:
                continue
            if len(chosen.shares) != ranks:
                choices, until = {}, 0
                continue
            choices[chosen.step] = chosen
            until = max(until, chosen.step)
        if attempt.shares and len(attempt.shares[-1]["shares"]) == ranks:
            until = max(until, attempt.last_step or 0)
    return RecordedShares({at: chosen for at, chosen in choices.items() if at > step}, until)
