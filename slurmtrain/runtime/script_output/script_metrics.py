"""Metrics of scripts that do not report them: starting and ending the process that reads them from their output."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slurmtrain.errors import RunUnreadable
from slurmtrain.model.run.layout import AttemptDir, RunDir
from slurmtrain.model.run.progress import points_of
from slurmtrain.model.spec.spec import Spec
from slurmtrain.model.spec.tracking import ScriptMetricsSpec
from slurmtrain.runtime.checkpoint.writer_process import IGNORED
from slurmtrain.runtime.environment.variables import environment_of_helper
from slurmtrain.runtime.script_output.reader_process import Orders
from slurmtrain.system.child_process import HelperProcess
from slurmtrain.system.journal_files import journal_files, read_pieces

_PROCESS = "slurmtrain.runtime.script_output.reader_process"
# How long what is left may be read for, once the ranks have ended: in a grace, the job still has to be requeued.
_LAST_S = 5.0
_LAST_IN_GRACE_S = 1.0
_PIECE_BYTES = 1 << 20


class ScriptMetrics:
    """The process that reads the metrics of one round on node 0, where rank 0 runs."""

    def __init__(self, metrics: ScriptMetricsSpec, path: Path, attempt: AttemptDir, counted: int) -> None:
        """Start it. ``metrics``: what to read, from this ``path``.

        ``attempt`` names the round. ``counted``: how many steps were finished before, if lines are counted.
        """
        orders = Orders.begin_now(metrics, attempt, path, counted)
        # Like the agent, it ignores signals to all processes of the job: the last metrics come after them.
        self._process = HelperProcess(_PROCESS, orders.to_line(), environment_of_helper(), IGNORED)

    def end(self, *, in_grace: bool) -> None:
        """Let it read what is left, after the ranks have ended. ``in_grace``: the job is about to be ended."""
        self._process.end(_LAST_IN_GRACE_S if in_grace else _LAST_S)


def read_script_metrics(spec: Spec, attempt: AttemptDir, resumed_at: float | None) -> ScriptMetrics | None:
    """Read the metrics of the ranks that are about to start on node 0; None if they report them themselves.

    Args:
        spec: The spec.
        attempt: The attempt, which names the round. Its ranks run in the current directory.
        resumed_at: When the checkpoint that they resume from was saved, in seconds since 1970; None: there is none.
    """
    metrics = spec.tracking.metrics
    if metrics is None:
        return None
    if metrics.file is None:
        path = attempt.node_log(0) if spec.per_node else attempt.rank_log(0)
    else:
        path = Path.cwd() / _fill(metrics.file, attempt.run)
    try:
        return ScriptMetrics(metrics, path, attempt, steps_at(attempt.run, resumed_at) if metrics.may_count else 0)
    except (OSError, RunUnreadable) as error:
        # Ranks train without it.
        print(f"slurmtrain: metrics of the script are not read: {error}", file=sys.stderr, flush=True)
        return None


def _fill(file: str, run: RunDir) -> str:
    filled = file.replace("{run_dir}", str(run.path)).replace("{checkpoint_dir}", str(run.checkpoints))
    return os.path.expanduser(filled)  # noqa: PTH111 (a home directory may be unknown)


def steps_at(run: RunDir, saved_at: float | None) -> int:
    """The steps that were finished when a checkpoint was saved, by the metrics of all attempts so far; 0 if unknown.

    Args:
        run: The run.
        saved_at: When it was saved, in seconds since 1970; None: there is no checkpoint.
    """
    if saved_at is None:
        return 0
    steps, latest = 0, 0.0
    for file in journal_files(run, []):
        for piece in read_pieces(file, length=_PIECE_BYTES) if file.metrics_of is not None else ():
            for point in points_of(record for _, record in piece.reading.records):
                if latest < point.time <= saved_at:
                    steps, latest = point.step, point.time
    return steps
