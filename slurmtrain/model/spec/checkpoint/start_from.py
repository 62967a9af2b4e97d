"""The section `start_from` of a spec: the checkpoint of another run that a run begins with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import Nullable, Scalar, Section, declare_key

WHOLE, WEIGHTS = "everything", "weights"
BEST = "best"
# A run, and which of its checkpoints.
_WORDS = re.compile(r"(?P<run>[^:\s]+)(?::(?P<step>[^:\s]+))?")


def _read_step(value: object) -> int | str:
    """A step, or the word for the best one. Raises ValueError."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value == BEST or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError("a step is a positive whole number, or `best`")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFromSpec:
    """The checkpoint of another run that a run begins with. `start_from: RUN:STEP` is short for its keys."""

    run: str = declare_key("", kinds.text("run"), "The run: its id, the beginning of it, or its name.", required=True)
    step: int | str | None = declare_key(
        None,
        Nullable(Scalar("step, or `best`", _read_step)),
        "The step of the checkpoint; `best`: the best one by the run's `checkpoint.keep.best`. null: the newest.",
    )
    load: str = declare_key(
        WHOLE,
        kinds.choice(WHOLE, WEIGHTS),
        "`everything`: the run goes on where the checkpoint is. `weights`: it begins at step 0, with the weights of "
        "the checkpoint's modules.",
    )

    def __str__(self) -> str:
        """The run and the step, as on a command line."""
        return self.run if self.step is None else f"{self.run}:{self.step}"


@dataclass(frozen=True, slots=True)
class StartFromSection(Section):
    """The section, which may be written as `RUN`, `RUN:STEP` or `RUN:best`, or be null."""

    cls: type = StartFromSpec

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return "`RUN`, `RUN:STEP`, `RUN:best`, section, or null"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> StartFromSpec | None:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str):
            match = _WORDS.fullmatch(value)
            if match is None:
                report(at, f"{value!r} is not RUN, RUN:STEP or RUN:best")
                return None
            value = match.groupdict()
        spec: StartFromSpec = Section.read(self, value, at, report)
        return spec

    def write(self, value: StartFromSpec | None) -> object:
        """As :meth:`Kind.write`."""
        return None if value is None else Section.write(self, value)
