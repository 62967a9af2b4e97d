"""The files by which the agents of another job and node 0 of an attempt find each other.

A newcomer writes its own file, and again every few seconds: the count in it shows node 0 that it lives. Node 0 does the
same with the file of admission, which also says who takes part in the newest stage. Only files of the run's user count,
and nobody else can enter the run's directory; what the agents then tell each other is authenticated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.interruption.growth import Newcomer, Stage
from slurmtrain.model.run.layout import AttemptDir
from slurmtrain.system.files import make_directory, read_json, write_json

_TYPES = {"count": "int"}


def announce(attempt: AttemptDir, newcomer: Newcomer, count: int) -> None:
    """Say that an agent could join an attempt. Raises PathError, OSError.

    Args:
        attempt: The attempt.
        newcomer: The agent.
        count: How often it has said so.
    """
    make_directory(attempt.newcomers)
    write_json(attempt.newcomer(newcomer.number), {**newcomer.to_dict(), "count": count})


def withdraw(attempt: AttemptDir, number: int) -> None:
    """Remove the file of the newcomer with this ``number`` from an ``attempt``."""
    with contextlib.suppress(OSError):
        attempt.newcomer(number).unlink(missing_ok=True)


def read_newcomers(attempt: AttemptDir) -> dict[int, tuple[Newcomer, int]]:
    """All newcomers of an ``attempt`` and how often each has announced itself, by their numbers."""
    announced: dict[int, tuple[Newcomer, int]] = {}
    with contextlib.suppress(OSError):
        for path in sorted(attempt.newcomers.glob("*.json")):
            # A file that is somebody else's, or damaged, announces nobody.
            with contextlib.suppress(PathError, KeyError, TypeError, ValueError):
                plain = read_json(path, types=_TYPES)
                if plain is not None and attempt.newcomer(int(plain["number"])) == path:
                    announced[int(plain["number"])] = Newcomer.from_dict(plain), int(plain["count"])
    return announced


def admit(attempt: AttemptDir, stage: Stage | None, count: int) -> None:
    """Say who takes part in an attempt. Raises PathError, OSError.

    Args:
        attempt: The attempt.
        stage: Its newest stage; None: the first one, which nobody was admitted to.
        count: How often node 0 has said so.
    """
    write_json(attempt.admission, {"count": count, "stage": None if stage is None else stage.to_dict()})


def read_admission(attempt: AttemptDir) -> tuple[Stage | None, int]:
    """The newest stage of an ``attempt``, None if nobody has joined it, and how often node 0 has said so; 0: never."""
    with contextlib.suppress(PathError, KeyError, TypeError, ValueError):
        plain: Mapping[str, Any] | None = read_json(attempt.admission, types=_TYPES)
        if plain is not None:
            stage = plain.get("stage")
            return None if stage is None else Stage.from_dict(stage), int(plain["count"])
    return None, 0
