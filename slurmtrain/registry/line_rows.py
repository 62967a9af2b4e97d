"""The summaries of metrics' surviving lines: how they are stored, and how they grow with what is read of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import sqlalchemy as sa

from slurmtrain.model.metrics.columns import Block
from slurmtrain.model.metrics.curves import start_of
from slurmtrain.model.metrics.summary import AttemptLines, LineSummary, MetricSummary, extend
from slurmtrain.model.run.run import Run
from slurmtrain.registry import queries, schema
from slurmtrain.registry.rows import Row, RowFormat
from slurmtrain.system.journal_files import JournalFile, read_metric_lines

METRICS = RowFormat(schema.metric, MetricSummary, "run_id", "name")
# Lines take many times the memory of their columns.
_PIECE_BYTES = 1 << 20


def metric_rows(run_id: str, metrics: Mapping[str, MetricSummary]) -> Iterator[Row]:
    """The rows of a run's ``metrics``, by name."""
    return (METRICS.row(summary, run_id, name) for name, summary in metrics.items())


def read_metrics(
    connection: sa.Connection, run_ids: Collection[str] | None, names: Collection[str] | None = None
) -> dict[str, dict[str, MetricSummary]]:
    """The summaries of these runs' metrics, by run and name.

    Args:
        connection: The connection to query.
        run_ids: The runs; None for all.
        names: The metrics; None for all.
    """
    where = () if names is None else (schema.metric.c.name.in_(sorted(names)),)
    by_run: dict[str, dict[str, MetricSummary]] = defaultdict(dict)
    for row in queries.rows(connection, schema.metric, run_ids, *where):
        by_run[row["run_id"]][row["name"]] = METRICS.read(row)
    return by_run


def read_lines(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, LineSummary]:
    """The summaries of these runs' surviving lines, by run, with the record of the lines that they summarise."""
    metrics = read_metrics(connection, run_ids)
    return {
        row["run_id"]: LineSummary.from_json(json.loads(row["made_of"]), metrics.get(row["run_id"], {}))
        for row in queries.rows(connection, schema.line, run_ids)
    }


def summarise_line(
    before: LineSummary,
    run: Run,
    files: Sequence[JournalFile],
    begins: Mapping[str, int],
    blocks: Mapping[str, Sequence[Block]],
) -> LineSummary:
    """The summary of a run's surviving line after further lines.

    Args:
        before: The summary before them.
        run: The run, with its attempts.
        files: Its files; of each, the size is what has been read of it, in bytes.
        begins: Where the further lines of each began, in bytes, by its name.
        blocks: The further lines, by the name of the attempt's directory.

    Raises:
        RunUnreadable: A rollback has taken away what was summarised, and a file cannot be read again.
    """
    by_key = {file.metrics_of: file for file in files if file.metrics_of is not None}

    def lines(key: str) -> tuple[int, int, Sequence[Block]]:
        file = by_key.get(key)
        return (0, 0, ()) if file is None else (begins.get(file.name, 0), file.size, blocks.get(key, ()))

    starts = [(attempt.key, start_of(attempt)) for attempt in run.attempts]
    extended = extend(before, [AttemptLines(key, start, *lines(key)) for key, start in starts])
    if extended is None:
        again = [AttemptLines(key, start, 0, lines(key)[1], _read_again(by_key.get(key))) for key, start in starts]
        extended = extend(LineSummary(), again)
        assert extended is not None
    return extended


def _read_again(file: JournalFile | None) -> list[Block]:
    if file is None:
        return []
    return [lines.block for lines in read_metric_lines(file, length=_PIECE_BYTES)]
