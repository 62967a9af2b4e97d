"""The key ``after``: the runs that must end before a run starts, in the words of sbatch's ``--dependency``."""

from __future__ import annotations

from dataclasses import dataclass

from slurmtrain.model.spec.kinds import Items, Report, Scalar, suggestion, type_name
from slurmtrain.model.spec.names import check_name

AFTER_OK = "afterok"
AFTER_ANY = "afterany"
_CONDITIONS = (AFTER_OK, AFTER_ANY)


@dataclass(frozen=True, slots=True)
class Dependency:
    """A run that must end first. ``name``: a run's name or id, or the id of a sweep. ``any``: however it ends."""

    name: str
    any: bool = False

    def __str__(self) -> str:
        """As in a spec."""
        return f"{AFTER_ANY}:{self.name}" if self.any else self.name


def parse_dependency(text: str) -> Dependency:
    """The dependency that an entry of ``after`` stands for, such as ``pretrain`` or ``afterany:pretrain``.

    Raises ValueError for any other text.
    """
    condition, colon, name = text.rpartition(":")
    if colon and condition not in _CONDITIONS:
        near = suggestion(condition, _CONDITIONS)
        raise ValueError(f"{condition!r} is no condition: write 'afterok:{name}' or 'afterany:{name}'{near}")
    check_name(name)
    return Dependency(name, any=condition == AFTER_ANY)


def _read_entry(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected the name or id of a run, found {type_name(value)} ({value!r}); put it in quotes")
    return str(parse_dependency(value.strip()))


@dataclass(frozen=True, slots=True)
class _Dependencies(Items):
    """A list of runs; one alone may be written without brackets."""

    def read(self, value: object, at: tuple[str, ...], report: Report) -> tuple[str, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        entries = Items.read(self, [value] if isinstance(value, str) else value, at, report)
        entries_before = set()
        for index, entry in enumerate(entries):
            if entry is not None and entry in entries_before:
                report((*at, str(index)), f"{entry!r} is there twice")
            entries_before.add(entry)
        return entries


DEPENDENCIES = _Dependencies(Scalar("run", _read_entry, is_text=True), "list of runs")
