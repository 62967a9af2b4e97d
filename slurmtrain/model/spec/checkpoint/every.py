"""``checkpoint.every``: when a session saves."""

from __future__ import annotations

from dataclasses import dataclass

from slurmtrain.model.spec.kinds import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMoment:
    """What decides whether a checkpoint is due: the time of the last save, and the best interval."""

    step: int
    """Finished steps."""
    since_save_s: float
    """Seconds since the last save began, or since training did."""
    optimum_s: float
    """The interval in seconds between saves that loses the least time."""


@dataclass(frozen=True, slots=True)
class EveryAuto:
    """Save as often as is worthwhile: the cost of a save is weighed against the work at risk."""

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return "auto"

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.since_save_s >= now.optimum_s


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Save every ``minutes`` minutes."""

    minutes: float

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return {"minutes": self.minutes}

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.since_save_s >= self.minutes * 60


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Save every ``steps`` steps."""

    steps: int

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return {"steps": self.steps}

    def is_due(self, now: SaveMoment) -> bool:
        """Whether to save now."""
        return now.step > 0 and now.step % self.steps == 0

    def next_step(self, step: int) -> int:
        """The first step after ``step`` that is saved."""
        return step - step % self.steps + self.steps


Every = EveryAuto | EveryMinutes | EverySteps
"""When to save: ``checkpoint.every``."""


def read_every(value: object) -> Every:
    """``checkpoint.every``: ``auto``, ``{steps: N}`` or ``{minutes: N}``. Raises ValueError."""
    if value == "auto":
        return EveryAuto()
    if not isinstance(value, dict):
        raise ValueError(f"expected auto, {{steps: N}} or {{minutes: N}}, found {value!r}")
    if set(value) == {"steps", "minutes"}:
        raise ValueError("'steps' and 'minutes' exclude each other; keep one of them")
    if len(value) != 1 or next(iter(value)) not in ("steps", "minutes"):
        near = next((nearest(str(key), ("steps", "minutes")) for key in value), None)
        amount = next((each for each in value.values() if isinstance(each, int) and each > 0), 10)
        cure = f"; write {{{near}: {amount}}}" if near else ""
        raise ValueError(f"expected {{steps: N}} or {{minutes: N}}, found {value!r}{cure}")
    ((unit, amount),) = value.items()
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < float("inf"):
        raise ValueError(f"expected a number of {unit} above zero, found {amount!r}")
    if unit == "steps" and not isinstance(amount, int):
        raise ValueError(f"expected a whole number of steps, found {amount!r}")
    return EverySteps(amount) if isinstance(amount, int) and unit == "steps" else EveryMinutes(amount)
