"""Histories: whatever became of them, what is read is what the metrics files hold."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain import history as cache
from slurmtrain.history import read_blocks
from slurmtrain.model.run.layout import RunDir, RunsRoot
from slurmtrain.system import journal_files as files_module
from slurmtrain.system.files import DIRECTORY_MODE
from slurmtrain.system.journal_files import journal_files, read_metric_lines
from slurmtrain.system.locks import locked

RUN_ID = "0123456789"
Line = tuple[int, dict[str, float]]


class Metrics:
    """A run's metrics files, and its history."""

    def __init__(self, root: Path) -> None:
        self.run: RunDir = RunsRoot(root).run(RUN_ID)
        self.history = RunsRoot(root).history(RUN_ID)
        self.lines: dict[str, list[Line]] = {}

    def log(self, attempt: str, *lines: Line) -> None:
        folder = self.run.attempts / attempt
        folder.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        self.lines.setdefault(attempt, []).extend(lines)
        handle = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "w") as file:
            for step, metrics in lines:
                file.write(json.dumps({"t": 1000.5 + step % 97, "step": step, "metrics": metrics}) + "\n")

    def read(self, *names: str, ended: bool = False) -> dict[str, list[Line]]:
        """The lines of the blocks that are read."""
        files = [file for file in journal_files(self.run) if file.metrics_of is not None]
        result: dict[str, list[Line]] = {}
        for attempt, blocks in read_blocks(self.history, files, names or None, ended=ended).items():
            lines: list[Line] = [(step, {}) for block in blocks for step in block.steps]
            row = 0
            for block in blocks:
                assert list(block.times) == [1000.5 + step % 97 for step in block.steps]
                for name, column in block.columns.items():
                    for place, value in zip(column.rows or range(len(block)), column.values, strict=True):
                        lines[row + place][1][name] = value
                row += len(block)
            result[attempt] = lines
        return result

    def check(self) -> None:
        assert repr(sorted_lines(self.read())) == repr(sorted_lines(self.lines))


def sorted_lines(lines: dict[str, list[Line]]) -> dict[str, list[tuple[int, list[tuple[str, float]]]]]:
    return {key: [(step, sorted(metrics.items())) for step, metrics in each] for key, each in sorted(lines.items())}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LEAST_BYTES", 1)
    monkeypatch.setattr(cache, "_PIECE_BYTES", 400)


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    return Metrics(tmp_path)


def no_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("metrics were parsed")

    monkeypatch.setattr(cache, "read_metric_lines", fail)


some_lines = st.lists(
    st.tuples(
        st.integers(0, 40) | st.integers(0, 2**53),
        st.dictionaries(st.sampled_from(["loss", "val", "lr:x", "größe"]), st.floats() | st.just(0.5), max_size=3),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["1.0", "1.1"]), some_lines), max_size=5), st.data())
def test_what_is_read_is_what_was_logged_whatever_became_of_the_history(
    written: list[tuple[str, list[Line]]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as root:
        metrics = Metrics(Path(root))
        for attempt, lines in written:
            metrics.log(attempt, *lines)
            metrics.check()
            damage = data.draw(st.sampled_from(["nothing", "cut", "flip", "append", "remove"]))
            if damage == "remove":
                metrics.history.unlink(missing_ok=True)
            elif damage != "nothing" and metrics.history.exists():
                content = bytearray(metrics.history.read_bytes())
                place = data.draw(st.integers(0, len(content) - 1))
                if damage == "flip":
                    content[place] ^= 1 << data.draw(st.integers(0, 7))
                content = content[:place] if damage == "cut" else content + b"x" * 20 if damage == "append" else content
                metrics.history.write_bytes(content)
        metrics.check()


def test_a_second_reading_parses_nothing_and_a_further_one_only_what_is_new(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.log("1.0", *((step, {"loss": step / 2, "val": math.nan}) for step in range(1, 40)))
    metrics.check()
    size = metrics.history.stat().st_size
    metrics.log("1.1", (41, {"loss": 0.1}))
    metrics.check()
    assert metrics.history.stat().st_size > size
    no_parsing(monkeypatch)
    metrics.check()
    assert [metrics_of for _, metrics_of in metrics.read("loss")["1.1"]] == [{"loss": 0.1}]


def test_few_new_lines_are_not_stored_until_there_are_more_or_the_run_has_ended(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_LEAST_BYTES", 10_000)
    monkeypatch.setattr(cache, "_LEAST_BYTES_ENDED", 100)
    metrics.log("1.0", *((step, {"loss": step / 2}) for step in range(9)))
    metrics.check()
    assert not metrics.history.exists()
    metrics.read(ended=True)
    no_parsing(monkeypatch)
    metrics.check()


def test_a_line_is_read_or_passed_over_whatever_its_reader_reads_at_once(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "LINE_LIMIT", 2000)
    many = {f"metric-{number}": 0.5 for number in range(40)}
    metrics.log("job.0", (1, {"loss": 1.0}), (2, many), (3, {"loss": 3.0}))
    metrics.check()
    kept = metrics.read()
    metrics.log("job.0", (4, {**many, **{f"more-{number}": 0.5 for number in range(80)}}), (5, {"loss": 5.0}))
    kept["job.0"].append((5, {"loss": 5.0}))
    assert metrics.read() == kept
    [file] = journal_files(metrics.run)
    assert [step for lines in read_metric_lines(file) for step in lines.block.steps] == [1, 2, 3, 5]


def test_metrics_that_were_replaced_by_others_of_any_size_are_read_anew(metrics: Metrics) -> None:
    metrics.log("1.0", *((step, {"loss": 0.5}) for step in range(10, 30)))
    metrics.check()
    path = metrics.run.attempts / "1.0" / "metrics.jsonl"
    for count in (20, 30, 5):
        path.unlink()
        metrics.lines.clear()
        metrics.log("1.0", *((step, {"loss": 0.7}) for step in range(10, 10 + count)))
        metrics.check()


def test_a_history_of_another_version_is_replaced(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics.log("1.0", (1, {"loss": 1.0}))
    metrics.history.parent.mkdir(mode=DIRECTORY_MODE)
    metrics.history.touch(0o600)
    metrics.history.write_bytes(b"slurmtrain history 1 little\n" + b"x" * 1000)
    metrics.check()
    monkeypatch.setattr(cache, "_VERSION", [3, "middle"])
    metrics.check()
    no_parsing(monkeypatch)
    metrics.check()


def test_only_one_process_appends_and_others_read_meanwhile(metrics: Metrics) -> None:
    metrics.log("1.0", (1, {"loss": 1.0}))
    metrics.check()
    size = metrics.history.stat().st_size
    metrics.log("1.0", (2, {"loss": 1.0}))
    with locked(metrics.history.with_name(".lock")):
        metrics.check()
    assert metrics.history.stat().st_size == size


def test_what_another_process_has_appended_since_is_not_appended_again(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.log("1.0", (1, {"loss": 1.0}))
    open_again = cache._open_for_writing

    def open_late(*arguments: object, **named: object) -> object:
        monkeypatch.setattr(cache, "_open_for_writing", open_again)
        metrics.check()  # the other process
        return open_again(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "_open_for_writing", open_late)
    metrics.check()
    with ZipFile(metrics.history) as archive:
        assert [name for name in archive.namelist() if name.endswith(".json")] == ["0.json"]


@pytest.mark.parametrize("grown", [False, True])
def test_at_whatever_byte_its_writer_is_killed_a_history_gives_what_was_logged_and_is_completed(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch, grown: bool
) -> None:
    """``grown``: there is a history already, which is written over from the list of its members on."""
    before = b""
    for first in (1, 21) if grown else (21,):
        metrics.log("1.0", *((step, {"loss": step / 3}) for step in range(first, first + 20)))
        if first == 1:
            metrics.check()
            before = metrics.history.read_bytes()
    metrics.check()
    after = metrics.history.read_bytes()
    same = next((place for place, each in enumerate(before) if each != after[place]), 0)
    for written in range(same + 1, len(after), 7):
        metrics.history.write_bytes(after[:written] + before[written:])
        metrics.check()
        with monkeypatch.context() as patch:
            no_parsing(patch)
            metrics.check()
