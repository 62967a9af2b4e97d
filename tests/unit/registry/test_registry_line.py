"""What survives of a run's metrics, as it is read in pieces, rolled back, and read again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory

from helpers.metric_lines import Lines, lines
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.model.metrics.columns import MetricSummary
from slurmtrain.model.query.conditions import parse
from slurmtrain.model.query.measures import Measure
from slurmtrain.model.run.events.base import encode
from slurmtrain.model.run.layout import RunDir
from slurmtrain.model.run.run import Run
from slurmtrain.model.urls import DatabaseUrl
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.narrowing import best_candidates, candidates
from slurmtrain.registry.store import Store

RUN_ID = "0123456789"


class Written:
    """A run whose files grow line by line, and a registry that reads them now and then."""

    def __init__(self, root: Path, registry: Path | DatabaseUrl | None = None) -> None:
        self.run = RunDir(root / RUN_ID)
        self.run.journals.mkdir(parents=True)
        self.store = Store(registry or root / "registry.db")
        self.append(self.run.journals / "submit.jsonl", encode(1.0, "created", {"name": "n", "executor": "local"}))

    def append(self, path: Path, *lines: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.writelines(lines)

    def submit(self, number: int) -> None:
        submitting = encode(float(number), "submitting", {"job_id": f"j{number}", "restart": 0, "attempt": number})
        self.append(self.run.journals / "submit.jsonl", submitting)
        agent = encode(1000.0 * number, "agent", {"node": 0, "nodes": 1, "host": "n0", "attempt": number})
        self.append(self.run.attempts / f"j{number}.0" / "node-0.jsonl", agent)

    def resume(self, number: int, step: int) -> None:
        session = encode(1000.0 * number + 1, "session", {"step": step})
        self.append(self.run.attempts / f"j{number}.0" / "rank-0.jsonl", session)

    def log(self, number: int, step: int, **metrics: float) -> None:
        line = json.dumps({"t": 1000.0 * number + 2 + step, "step": step, "metrics": metrics}).encode() + b"\n"
        self.append(self.run.attempts / f"j{number}.0" / "metrics.jsonl", line)

    def read(self) -> Run:
        with self.store.begin() as transaction:
            assert not ingest(transaction, [self.run], dead=False).unreadable
        run = self.store.load(RUN_ID)
        assert run is not None
        return run

    def surviving(self) -> dict[str, MetricSummary]:
        return self.store.surviving_metrics().get(RUN_ID, {})

    def rebuild(self) -> Run:
        with self.store.begin() as transaction:
            transaction.clear()
        return self.read()


@settings(max_examples=12, deadline=None)
@given(lines(), st.data())
def test_reading_in_any_pieces_gives_what_a_rebuild_gives(story: Lines, data: st.DataObject) -> None:
    with TemporaryDirectory() as root:
        written = Written(Path(root))
        for start, points in story.attempts:
            written.submit(start.number)
            if start.step is not None:
                written.resume(start.number, start.step)
            for point in points:
                if data.draw(st.integers(0, 3)) == 0:
                    written.read()
                written.log(start.number, point.step, **point.metrics)
        piecewise, surviving = written.read(), written.surviving()
        rebuilt = written.rebuild()
        assert (repr(piecewise), surviving) == (repr(rebuilt), written.surviving())


def test_the_newest_value_of_a_metric_is_the_newest_that_survived(
    tmp_path: Path, registry_address: Path | DatabaseUrl
) -> None:
    written = Written(tmp_path, registry_address)
    written.submit(1)
    for step in range(1, 6):
        written.log(1, step, loss=1 / step, **({"val": 0.5} if step == 5 else {}))
    assert written.read().metrics == {"loss": 0.2, "val": 0.5}
    written.submit(2)
    written.resume(2, 3)
    run = written.read()
    assert run.metrics == written.store.listed()[RUN_ID].metrics == {"loss": 1 / 3}
    assert written.surviving() == {"loss": MetricSummary(3, 3, 1 / 3, 1 / 3, 3, 1.0, 1)}
    written.log(2, 4, loss=math.nan)
    assert repr(written.read().metrics) == "{'loss': nan}"
    assert written.surviving() == {"loss": MetricSummary(4, 4, None, 1 / 3, 3, 1.0, 1)}
    written.log(2, 5, loss=-math.inf)
    assert written.read().metrics == {"loss": -math.inf}
    assert written.surviving() == {"loss": MetricSummary(5, 5, -math.inf, 1 / 3, 3, 1.0, 1)}
    assert repr(written.rebuild().metrics) == "{'loss': -inf}"
    assert written.surviving() == {"loss": MetricSummary(5, 5, -math.inf, 1 / 3, 3, 1.0, 1)}


def test_a_metrics_file_that_was_replaced_by_a_shorter_one_is_summarised_anew(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.submit(1)
    for step in (1, 2, 3):
        written.log(1, step, loss=float(step))
    written.read()
    (written.run.attempts / "j1.0" / "metrics.jsonl").unlink()
    written.log(1, 1, loss=7.0)
    assert written.read().metrics == {"loss": 7.0}
    assert written.surviving() == {"loss": MetricSummary(1, 1, 7.0, 7.0, 1, 7.0, 1)}


def test_runs_are_chosen_and_ranked_by_their_summaries(tmp_path: Path, registry_address: Path | DatabaseUrl) -> None:
    written = Written(tmp_path, registry_address)
    written.submit(1)
    for step, loss in ((1, 3.0), (2, 1.5), (3, 2.0)):
        written.log(1, step, loss=loss)
    written.read()
    for text, holds in (("min:loss < 2", True), ("max:loss < 3", False), ("last:loss >= 2 and min:loss <= 1.5", True)):
        ids = written.store.ask(lambda db, of=text: candidates(db, [parse(of, 0.0)], put_away=False))
        assert ids == [RUN_ID] * holds
    assert written.store.ask(lambda db: best_candidates(db, Measure("min", "loss"), larger=False, limit=5)) == (
        [RUN_ID],
        0,
    )
    assert written.store.ask(lambda db: best_candidates(db, Measure("max", "acc"), larger=True, limit=5)) == ([], 1)
