"""The key ``log``: the path of a link to each attempt's log, in the patterns of sbatch's ``--output``. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

# sbatch(1), filename pattern: a number before the letter is the width of a zero-padded number.
_PATTERN = re.compile(r"%(\d{0,2})(.?)", re.DOTALL)
LETTERS = "xjAauNnt"
_EXAMPLE = "logs/%x-%j.out"


def check_log(pattern: str) -> None:
    """Raise ValueError unless this is a path that no two jobs have in common, with what is known of a job."""
    if re.search(r"[\x00-\x1f\x7f]", pattern):
        raise ValueError("a control character cannot be used here")
    if "\\" in pattern:
        raise ValueError("Slurm takes what follows a backslash literally, and this does not: leave the backslash out")
    letters = {match[2] for match in _PATTERN.finditer(pattern)}
    strange = sorted(letters - {*LETTERS, "%"})
    if strange:
        letters_here = ", ".join(f"%{letter}" for letter in LETTERS)
        raise ValueError(f"%{strange[0]} stands for nothing here; these do: {letters_here}, and %% is a percent sign")
    if pattern.endswith("/"):
        raise ValueError(f"expected the path of a file, such as {_EXAMPLE}, found {pattern!r}")
    if "j" not in letters and not {"A", "a"} <= letters:
        stem, dot, suffix = pattern.rpartition(".")
        name = f"{stem}-%j.{suffix}" if dot and stem and "/" not in suffix else f"{pattern}-%j"
        raise ValueError(f"{pattern!r} is that of every run, since it lacks the job's id; write {name}")


def fill_log(pattern: str, facts: Mapping[str, str]) -> str:
    """The path that a ``pattern`` stands for; ``facts``: what its letters do."""

    def fill(match: re.Match[str]) -> str:
        fact = "%" if match[2] == "%" else facts[match[2]]
        return fact.zfill(int(match[1])) if match[1] and fact.isdecimal() else fact

    return _PATTERN.sub(fill, pattern)
