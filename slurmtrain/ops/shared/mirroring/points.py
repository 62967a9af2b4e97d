"""How far a tracker has the lines that a run has logged, as the registry has it."""

from __future__ import annotations

from dataclasses import replace

from slurmtrain.model.metrics.settled import Place
from slurmtrain.registry.sent import Sent
from slurmtrain.runtime.job.logged_lines import LoggedLines


def place_of(sent: Sent, logged: LoggedLines) -> Place:
    """How far a tracker has the lines of a run.

    Args:
        sent: The tracker's state of the run.
        logged: The lines.
    """
    numbers = {name: number for number, name in logged.names.items()}
    attempt, offset = sent.sending.get("from", (0, 0))
    return Place(
        {numbers[name]: end for name, end in sent.offsets.items() if name in numbers},
        sent.step,
        float(sent.sending.get("until", 0.0)),
        sent.sending.get("reach", sent.step),
        (int(attempt), int(offset)),
    )


def at_place(sent: Sent, logged: LoggedLines, place: Place) -> Sent:
    """The tracker's state of a run, if that reaches up to a place.

    Args:
        sent: The former state.
        logged: The lines of the run.
        place: The place.
    """
    offsets = {logged.names[number]: end for number, end in place.offsets.items()}
    sending = {"until": place.until, "reach": place.reach, "from": list(place.sending)}
    return replace(sent, offsets=offsets, step=place.step, sending=sending)
