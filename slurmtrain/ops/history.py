"""The histories of a run's metrics, read from the files of its attempts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurmtrain.history.cache import read_blocks
from slurmtrain.model.metrics.curves import Curve, CurveBuilder
from slurmtrain.model.metrics.survival import start_of
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
    files = [file for file in journal_files(directory, problems) if file.metrics_of is not None]
    cache = RunsRoot(directory.path.parent).history(run.id)
    blocks = read_blocks(cache, files, names, ended=run.ended)
    builder = CurveBuilder(names, keep_superseded=keep_superseded)
    for attempt in run.attempts:
        builder.add_blocks(start_of(attempt), blocks.get(attempt.key, ()))
    return History(builder.curves, tuple(problems))
