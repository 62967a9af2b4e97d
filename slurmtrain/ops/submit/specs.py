"""The specs of one submission: those that a command line names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, SpecError, UserError
from slurmtrain.ops.submit.submission import load
from slurmtrain.specfile import SpecFile

_SUFFIXES = frozenset({".yaml", ".yml"})


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The specs and the overrides among the words behind the first spec of a command line."""
    specs = [word for word in words if _is_spec(word)]
    return [Path(word) for word in specs], [word for word in words if word not in specs]


def _is_spec(word: str) -> bool:
    return "=" not in word and (Path(word).suffix in _SUFFIXES or Path(word).is_file())


def load_all(
    sources: Sequence[Path | Mapping[str, Any]],
    overrides: Sequence[str],
    sweep: Sequence[str],
    after: Sequence[str],
    *,
    max_runs: int,
) -> list[SpecFile]:
    """Read specs that are submitted together.

    Args:
        sources: their files, or what would be in them, as plain data.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value; with a single spec only.
        after: runs to start after, in addition to those that a spec names.
        max_runs: how many runs the sweep of each may have.

    Raises:
        UserError: they cannot be submitted together.
        SpecError: lists all mistakes in all of them.
        PathError: one cannot be read.
    """
    if len(sources) > 1 and sweep:
        raise UserError("--sweep: with several specs, write the section 'sweep' into the one that it is for")
    paths = [source for source in sources if isinstance(source, Path)]
    twice = next((path for index, path in enumerate(paths) if path.resolve() in map(Path.resolve, paths[:index])), None)
    if twice is not None:
        raise UserError(f"{twice} is there twice; to submit it twice, call 'submit' twice")
    specs: list[SpecFile] = []
    mistakes: list[Mistake] = []
    for source in sources:
        try:
            specs.append(load(source, overrides, sweep, max_runs=max_runs, after=after))
        except SpecError as error:
            # A mistake on the command line is one in each of them.
            mistakes += [mistake for mistake in error.mistakes if mistake not in mistakes]
    if mistakes:
        raise SpecError(mistakes)
    return specs


def merge_specs(specs: Sequence[SpecFile]) -> SpecFile:
    """All runs of some specs, as if they were those of one."""
    if len(specs) == 1:
        return specs[0]
    runs = tuple(run for spec in specs for run in spec.runs)
    return SpecFile(text="", runs=runs, warnings=tuple(each for spec in specs for each in spec.warnings))
