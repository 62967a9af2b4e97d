"""How the tables of a study are written: for a terminal, as Markdown, and as a page; the chart of speed-ups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.cli import formatting
from slurmtrain.cli.drawing import Column
from slurmtrain.model.metrics.chart import Chart, Trace
from slurmtrain.model.query.comparison import count_states
from slurmtrain.plugins.report.pages import Facts, begin_facts
from slurmtrain.plugins.scale.scale_tables import LONELY, RULE, StudyTables
from slurmtrain.plugins.scale.scaling_law import describe_law, plural

_DAY_S = 86_400.0
Records = Sequence[Mapping[str, Any]]


def _hundredths(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _days(seconds: float | None) -> str:
    return formatting.duration(seconds) if seconds is None or seconds <= _DAY_S else f"{seconds / _DAY_S:.1f}d"


_ID = Column("ID", lambda run: run["id"], rank=5)
_STATE = Column("STATE", lambda run: run["state"])
_STRATEGY = Column("STRATEGY", lambda run: run["series"], 10)
_NODES = Column("NODES", lambda run: formatting.number(run["nodes"]), rank=3)
_PROCS = Column("PROCS", lambda run: formatting.number(run["processes"]), rank=1)
_GPUS = Column("GPUS", lambda run: str(run["gpus"]) if run["gpus"] else "-", rank=1)
_STEPS = Column("STEPS/S", lambda run: formatting.figures(run["steps_per_second"]), rank=3)
_SAMPLES = Column("SAMPLES/S", lambda run: formatting.figures(run["samples_per_second"]), rank=2)
_EPOCH = Column("S/EPOCH", lambda run: formatting.figures(run["epoch_seconds"]), rank=1)
_MEMORY = Column("MEMORY", lambda run: formatting.size(run["memory_bytes"]), rank=1)
_UTIL = Column("UTIL", lambda run: formatting.percent(run["utilization"]), rank=2)
_OF_STRATEGIES = (_ID, _STRATEGY, _STATE, _NODES, _PROCS, _GPUS, _MEMORY, _STEPS, _SAMPLES, _EPOCH, _UTIL)


class TableText:
    """The three tables as texts: for each that has rows its title, columns and records."""

    def __init__(self, tables: StudyTables) -> None:
        self._tables = tables
        # Without prices, money is GPU-hours.
        per = tables.currency or ("GPU-hours" if tables.unit == "GPU" else "process-hours")
        title = f"{per}/1000".upper() if tables.currency is None else f"{per}/1000"
        self._price = Column(title, lambda run: formatting.figures(run["price_per_1000_steps"]), rank=2)

    def parts(self) -> Iterator[tuple[str, Sequence[Column], Records]]:
        """The tables in order, none for which there is nothing to compare."""
        for title, columns, records in (
            ("Scaling", self._of_sizes(), [row.to_json() for row in self._tables.sizes]),
            ("Strategies", _OF_STRATEGIES, [row.to_json() for row in self._tables.strategies]),
            ("Hardware", self._of_hardware(), [row.to_json() for row in self._tables.hardware]),
        ):
            if records and (title != "Scaling" or self._tables.series or not self._tables.hardware):
                ended_well = all(run["state"] == "completed" for run in records)
                yield title, [each for each in columns if not (ended_well and each is _STATE)], records

    def _of_sizes(self) -> list[Column]:
        several = len({row.series for row in self._tables.sizes}) > 1
        return [
            _ID,
            *([_STRATEGY] if several else []),
            _STATE,
            _NODES,
            _PROCS,
            _GPUS,
            Column("BATCH", lambda run: formatting.number(run["batch"]), rank=1),
            _STEPS,
            _SAMPLES,
            _EPOCH,
            _MEMORY,
            Column("SPEED-UP", lambda run: _hundredths(run["speedup"])),
            Column("EFFICIENCY", lambda run: _hundredths(run["efficiency"])),
            Column("COMM", lambda run: formatting.as_percent(run["communication_share"]), rank=1),
            *([] if self._tables.currency is None else [self._price]),
        ]

    def _of_hardware(self) -> list[Column]:
        return [
            _ID,
            Column("HARDWARE", lambda run: run["hardware"]),
            _STATE,
            _NODES,
            _PROCS,
            _GPUS,
            _SAMPLES,
            _STEPS,
            Column("THROUGHPUT", lambda run: _hundredths(run["throughput"])),
            Column("TOTAL", lambda run: _days(run["total_seconds"]), rank=2),
            self._price,
            Column("COST EFFICIENCY", lambda run: _hundredths(run["cost_efficiency"]), short="COST EFF."),
        ]

    def sentences(self) -> list[str]:
        """What follows from the tables, and from which rule."""
        tables = self._tables
        if not tables.series:
            return [] if tables.strategies or tables.hardware else [f"{LONELY}: a study needs two at least"]
        lines = list(tables.sentences)
        laws = [[] if each.fit is None else describe_law(each.fit, each.unit) for each in tables.series]
        # What holds for all series comes once, at the end.
        common = [line for line in laws[0] if all(line in law for law in laws)]
        for series, law in zip(tables.series, laws, strict=True):
            begin = f"{series.name}: " if len(laws) > 1 else ""
            lines += [f"{begin}{line}" for line in law if line not in common]
        lines += common
        fitted = any(series.fit is not None for series in tables.series)
        return [*lines, f"rule: {RULE}"] if fitted else lines

    def markdown(self) -> Iterator[str]:
        """The lines of the tables in GitHub's Markdown, with what follows from them."""
        for title, columns, records in self.parts():
            cells = [[column.cell(record) for column in columns] for record in records]
            shown = [index for index in range(len(columns)) if any(row[index] not in ("", "-") for row in cells)]
            yield from (f"### {title}", "", _markdown_row(columns[index].title for index in shown))
            yield _markdown_row("---" for _ in shown)
            yield from (_markdown_row(row[index] for index in shown) for row in cells)
            yield ""
        yield from (f"- {_escape_markdown(each)}" for each in self.sentences())

    def facts(self, study: str) -> Facts:
        """The facts of a page: what ``--json`` prints, and sentences. ``study``: its id or name."""
        tables = self._tables
        states = [row.run.state for row in tables.rows]
        return {
            **begin_facts("scale", study, f"Scaling study {study}"),
            **tables.to_json(study),
            "sentences": self.sentences(),
            "progress": "" if tables.is_complete else f"not complete: {count_states(states)}",
        }

    def chart(self) -> Chart | None:
        """Speed-ups over sizes: as measured, by the law (faint), and the ideal; None if there is nothing to draw."""
        traces = []
        for series in self._tables.series:
            if series.fit is None:
                continue
            points = [(float(row.run.size.workers), row.speedup) for row in series.measured if row.speedup is not None]
            law = [(float(workers), speedup) for workers, speedup in series.fit.curve()]
            traces.append(Trace(series.name, [points], [law]))
        if not traces:
            return None
        first = min(line[0][0] for trace in traces for line in trace.lines)
        most = max(line[-1][0] for trace in traces for line in trace.faint)
        traces.append(Trace("ideal", [[(first, 1.0), (most, most / first)]]))
        return Chart("speed-up", plural(self._tables.unit), traces, [], log=False)


def _markdown_row(cells: Iterator[str] | Any) -> str:
    return f"| {' | '.join(map(_escape_markdown, cells))} |"


def _escape_markdown(text: str) -> str:
    """A text without what Markdown would read as a column, a link or an element."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
