"""Reading the specs that a submission names."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmtrain.errors import Mistake, SpecError, UserError
from slurmtrain.model.experiment.kinds import MAX_RUNS
from slurmtrain.ops.submit.command_script import missing_script
from slurmtrain.slurm.slurm_commands import read_options
from slurmtrain.specfile import SiteRules, SpecFile, load_spec
from slurmtrain.system.inherited import current_directory

_SUFFIXES = frozenset({".yaml", ".yml"})


def split_words(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The specs and the overrides among the words behind the first spec of a command line."""
    specs = [word for word in words if _is_spec(word)]
    return [Path(word) for word in specs], [word for word in words if word not in specs]


def _is_spec(word: str) -> bool:
    return "=" not in word and (Path(word).suffix in _SUFFIXES or Path(word).is_file())


def load(
    spec: Path | Mapping[str, Any],
    overrides: Sequence[str],
    sweep: Sequence[str],
    *,
    max_runs: int = MAX_RUNS,
    after: Sequence[str] = (),
) -> SpecFile:
    """Read a spec, using this working directory and the ``python`` on this PATH.

    Args:
        spec: its file, or what would be in it, as plain data.
        overrides: ``KEY=VALUE`` for all runs.
        sweep: ``KEY=VALUE,VALUE``: a run for each value.
        max_runs: how many runs the sweep may have.
        after: runs to start after, in addition to those that the spec names.

    Raises:
        SpecError: the spec is invalid.
        PathError: it cannot be read.
    """
    site = SiteRules(read_options, max_runs, missing_script)
    cwd, python = current_directory(), which_python()
    loaded = load_spec(spec, overrides, sweep, cwd=cwd, python=python, site=site)
    if not after:
        return loaded
    entries = dict.fromkeys([*loaded.runs[0].plan.spec.after, *after])
    # Quoted, since an id may look like a number.
    more = [*overrides, f"after={json.dumps(list(entries))}"]
    return load_spec(spec, more, sweep, cwd=cwd, python=python, site=site)


def which_python() -> str:
    """The interpreter that ``python`` refers to: the one on PATH, else the one that runs this."""
    return shutil.which("python") or sys.executable


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
    """All runs of some specs, as if one spec had them."""
    if len(specs) == 1:
        return specs[0]
    runs = tuple(run for spec in specs for run in spec.runs)
    return SpecFile(text="", runs=runs, warnings=tuple(each for spec in specs for each in spec.warnings))
