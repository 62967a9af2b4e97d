"""The Python interface, and what all its calls have in common: a workspace, private files, warnings, our errors."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from slurmtrain.config import Config
from slurmtrain.errors import PathError, SlurmtrainWarning, SpecError
from slurmtrain.ops.shared.observe import Observed
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.system.files import describe_os_error_at
from slurmtrain.system.inherited import private_umask, public_umask
from slurmtrain.system.locks import notices_to

# Modules whose frames lie between a warning and the line of the user's program that it is about.
_BETWEEN = ("slurmtrain", "contextlib")


@dataclass(slots=True)
class Call:
    """One call: the workspace that it works on, and what its caller should know afterwards.

    A workspace is used by a single call, so that calls of several threads share nothing.
    """

    workspace: Workspace
    notes: list[str] = field(default_factory=list)

    def note_all(self, observed: Observed) -> None:
        """Note what was odd about an observation of the runs."""
        self.notes += observed.warnings()


@contextlib.contextmanager
def calling(config: Config, *, again: bool = False) -> Iterator[Call]:
    """Make a call. New files are private meanwhile; at its end, its notes become warnings of Python's.

    Args:
        config: Where the runs are.
        again: Slurm may be asked as rarely as by a command that polls, every ``slurm_interval``: for calls that only
            look, which a program may repeat as often as it likes.

    Raises:
        PathError: In place of any OSError.
    """
    notes: list[str] = []
    call = Call(Workspace(config, looks_again=again, warn=notes.append), notes)
    try:
        with private_umask(), notices_to(notes.append), our_errors():
            yield call
    finally:
        call.workspace.close()
    # After the private umask, with the workspace closed: filters and hooks of the user's own run here, and may raise.
    issue_warnings(notes)


@contextlib.contextmanager
def our_errors() -> Iterator[None]:
    """Turn any OSError into a PathError, and name the places of mistakes as a program knows them."""
    try:
        yield
    except SpecError as error:
        # Overrides are on no command line here.
        prefix = "command line"
        named = (each.where.removeprefix(prefix) for each in error.mistakes)
        places = zip(error.mistakes, named, strict=True)
        raise SpecError(
            [replace(each, where=each.where if each.where == rest else f"the call{rest}") for each, rest in places]
        ) from None
    except OSError as error:
        raise PathError(describe_os_error_at(error)) from error


def issue_warnings(notes: Iterable[str]) -> None:
    """Issue warnings, each once, at the line of the program that called slurmtrain."""
    # warnings.warn() can pass over files by itself (skip_file_prefixes), but only since Python 3.12.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    for note in dict.fromkeys(notes):
        warnings.warn(note, SlurmtrainWarning, stacklevel=level)


class TimeLimit:
    """Ends a wait after a while. While it sleeps, new files of this process have the modes that its user chose."""

    def __init__(self, seconds: float | None) -> None:
        """``seconds``: how long from now on; None: for ever."""
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self.is_over = False
        """Whether it has ended a wait."""

    def wait(self, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the limit; returns whether it is reached."""
        left = seconds if self._ends_at is None else self._ends_at - time.monotonic()
        with public_umask():
            time.sleep(max(0.0, min(seconds, left)))
        self.is_over = left <= seconds and self._ends_at is not None
        return self.is_over
