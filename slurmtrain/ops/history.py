"""The histories of a run's metrics, read from the files of its attempts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from slurmtrain.history.cache import read_blocks
from slurmtrain.model.metrics.blocks import Block
from slurmtrain.model.metrics.curves import Curve, CurveBuilder
from slurmtrain.model.metrics.survival import Segment, SurvivingLine, start_of
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.root import RunsRoot
from slurmtrain.model.run.run import Run
from slurmtrain.system.journal_files import journal_files


@dataclass(frozen=True, slots=True)
class History:
    """What a run has logged, by metric. ``problems``: files that cannot be read, with the reasons."""

    curves: Mapping[str, Curve]
    problems: tuple[str, ...] = ()


def read_history(
    run: Run, directory: RunDir, names: Collection[str] | None = None, *, keep_superseded: bool = False
) -> History:
    """The curves of a run's metrics, without what was rolled back. Only what was logged since the last time is parsed.

    Args:
        run: The run, with its attempts.
        directory: Its directory.
        names: The metrics to read; None: all.
        keep_superseded: Keep what was rolled back too, beside the rest.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    problems: list[str] = []
    blocks = _blocks(run, directory, names, problems)
    builder = CurveBuilder(names, keep_superseded=keep_superseded)
    for attempt in run.attempts:
        builder.add_blocks(start_of(attempt), blocks.get(attempt.key, ()))
    return History(builder.curves, tuple(problems))


def read_rows(run: Run, directory: RunDir) -> list[Segment]:
    """When a run has finished its steps, without what was rolled back: rows that have no metrics.

    Args:
        run: The run, with its attempts.
        directory: Its directory.

    Raises:
        RunUnreadable: A metrics file is somebody else's, or cannot be read.
    """
    blocks = _blocks(run, directory, (), [])
    line = SurvivingLine()
    for attempt in run.attempts:
        line.add_attempt(start_of(attempt), blocks.get(attempt.key, ()))
    return line.kept


def _blocks(
    run: Run, directory: RunDir, names: Collection[str] | None, problems: list[str]
) -> Mapping[str, Sequence[Block]]:
    """What a run has logged, by the name of the attempt's directory; ``problems`` receives what cannot be read."""
    files = [file for file in journal_files(directory, problems) if file.metrics_of is not None]
    cache = RunsRoot(directory.path.parent).history(run.id)
    return read_blocks(cache, files, names, ended=run.ended)
