"""The mistakes of a spec and of the command line, each with its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurmtrain.errors import Mistake, SpecError
from slurmtrain.model.passwords import without_url_passwords
from slurmtrain.model.spec.sweep import Point
from slurmtrain.specfile.overrides import Override
from slurmtrain.system.yaml_file import YamlDocument

KeyPath = tuple[str, ...]


class Mistakes:
    """Collects mistakes, and finds the line or the argument of each."""

    def __init__(self, document: YamlDocument, overrides: Sequence[Override], swept: Sequence[Override] = ()) -> None:
        """Places are in ``document``, or in arguments: ``overrides``, and the keys to vary, ``swept``."""
        self._document = document
        self._mistakes = list(document.mistakes)
        self._overrides = overrides
        self._swept = {".".join(override.path): override for override in swept}
        self._point: Point = {}

    def __bool__(self) -> bool:
        return bool(self._mistakes)

    def set_point(self, point: Point) -> None:
        """Note what the sweep sets in this run: a mistake in such a value is reported where the sweep has it."""
        self._point = point

    def add(self, path: KeyPath, message: str) -> None:
        """Add a mistake at a key, unless another run of the sweep has it already, or its value cannot even be read."""
        where = self._locate(path)
        key = "" if where.startswith("command line") and path[:1] == ("sweep",) else ".".join(path)
        mistake = Mistake(where, key, without_url_passwords(message))
        unread = any((where, mistake.key) == (other.where, other.key) for other in self._document.mistakes)
        if not unread and mistake not in self._mistakes:
            self._mistakes.append(mistake)

    def add_from_command_line(self, mistakes: Iterable[Mistake]) -> None:
        """Add mistakes that already name their place."""
        self._mistakes.extend(mistakes)

    def raise_if_any(self) -> None:
        """Raise SpecError if there is any mistake, with all of them in the order of the file."""
        if self._mistakes:
            raise SpecError(self.sorted())

    def sorted(self) -> list[Mistake]:
        """All of them, in the order of the file."""
        return sorted(self._mistakes, key=self._order)

    def _order(self, mistake: Mistake) -> tuple[bool, bool, str, int]:
        """Mistakes in the spec's own file come first, then in files that it extends, then on the command line."""
        if mistake.where.startswith("command line"):
            return True, True, "", 0
        file, _, line = mistake.where.rpartition(":")
        return False, file != self._document.name, file, int(line)

    def _locate(self, path: KeyPath) -> str:
        if path == ("sweep",) and self._swept:
            return "command line (--sweep)"
        in_sweep = path[:1] == ("sweep",)
        for key, swept in self._point.items():
            if not in_sweep and _overlap(path, tuple(key.split("."))):
                path, in_sweep = ("sweep", *swept.at), True
        if in_sweep and path[1:2] and path[1] in self._swept:
            return f"command line ({self._swept[path[1]].text})"
        for override in () if in_sweep else self._overrides:
            if _overlap(path, override.path):
                return f"command line ({override.text})"
        return self._document.place_of(path)


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Whether two keys are the same, or one is in the section of the other."""
    length = min(len(path), len(other))
    return length > 0 and path[:length] == other[:length]
