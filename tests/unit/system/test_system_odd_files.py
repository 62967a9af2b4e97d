"""Files that are not what was written, or no files at all: errors in a sentence, and nothing that waits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.simulated_run import make_test_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmtrain.errors import CheckpointError, PathError, RunUnreadable
from slurmtrain.model.run.layout import MANIFEST, RunDir
from slurmtrain.runtime.checkpoint.checkpoint_files import Manifest, read_manifest
from slurmtrain.runtime.environment.node import Launch, read_launch, read_plan
from slurmtrain.runtime.job import lease
from slurmtrain.system.files import read_json
from slurmtrain.system.journal_files import journal_files, read_pieces
from slurmtrain.system.owned_files import open_readable

ODD = (
    "null", "[]", "5", "{}", "not json", "", '"\\ud800"', "1e400", "NaN", "9" * 5000, "[" * 100_000,
    '{"a":' * 200 + "1" + "}" * 200,
)  # fmt: skip
MANIFEST_OF_5 = Manifest(
    step=5, world_size=1, saved_at=1.0, seconds=1.0, stall_s=0.0, plan_hash="", attempt="j.0", why="steps", files={}
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "0123456789")
    for folder in (directory.journals, directory.submission(1).path, directory.checkpoints / "step-5"):
        folder.mkdir(parents=True)
    return directory


READERS: dict[str, tuple[Callable[[RunDir], Path], Callable[[RunDir], object], str]] = {
    "plan": (lambda run: run.plan, lambda run: read_plan(run.plan), json.dumps(make_test_plan().to_json())),
    "launch": (
        lambda run: run.submission(1).launch,
        lambda run: read_launch(run.submission(1)),
        json.dumps(Launch(attempt=1).to_dict()),
    ),
    "lease": (lambda run: run.lease, lambda run: lease.granted_to(run), '{"submission": 1, "attempt": "j.0"}'),
    "manifest": (
        lambda run: run.checkpoints / "step-5" / MANIFEST,
        lambda run: read_manifest(run.checkpoints / "step-5"),
        json.dumps(MANIFEST_OF_5.to_json()),
    ),
}
EVERY_FILE = pytest.mark.parametrize("name", sorted(READERS))


@EVERY_FILE
def test_what_was_written_is_read(run: RunDir, name: str) -> None:
    place, read, content = READERS[name]
    place(run).write_text(content)
    assert read(run)


@EVERY_FILE
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_odd_value_of_any_key_is_read_or_an_error_in_a_sentence(run: RunDir, name: str, data: st.DataObject) -> None:
    place, read, content = READERS[name]
    texts = {key: json.dumps(value) for key, value in json.loads(content).items()}
    texts[data.draw(st.sampled_from(sorted(texts)))] = data.draw(st.sampled_from(ODD))
    record = "{" + ",".join(f'"{key}": {text}' for key, text in texts.items()) + "}"
    place(run).write_text(data.draw(st.sampled_from([record, record, data.draw(st.sampled_from(ODD))])))
    with contextlib.suppress(PathError, CheckpointError):
        read(run)


@EVERY_FILE
def test_a_fifo_instead_of_a_file_is_an_error_and_nothing_waits_for_it(run: RunDir, name: str) -> None:
    place, read, _ = READERS[name]
    os.mkfifo(place(run))
    with pytest.raises((PathError, CheckpointError), match="is a FIFO, not a regular file"):
        read(run)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_log_that_is_no_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rank-0.log"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        open_readable(path)


def test_an_error_in_a_file_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{\n "a": 1,\n "b" 2}')
    with pytest.raises(PathError, match=r"plan\.json is not the JSON that slurmtrain wrote there \(.*line 3 column 6"):
        read_json(path)


def test_a_line_of_a_hundred_megabytes_is_skipped_in_pieces_and_the_next_is_read(run: RunDir) -> None:
    journal = run.journals / "submit.jsonl"
    with journal.open("wb") as file:
        file.truncate(100 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"t": 1, "kind": "created"}\n')
    readings = [piece.reading for file in journal_files(run) for piece in read_pieces(file)]
    assert [record["kind"] for reading in readings for _, record in reading.records] == ["created"]
    garbage = [bad for reading in readings for bad in reading.garbage]
    assert all(len(bad.line) <= 1024 for bad in garbage)
    assert garbage[0].why == "it is longer than 16777216 bytes"


def test_a_journal_that_is_no_file_is_an_error_unless_problems_are_collected(run: RunDir) -> None:
    (run.journals / "x.jsonl").mkdir()
    (run.journals / "good.jsonl").write_bytes(b"")
    with pytest.raises(RunUnreadable, match=r"journal/x\.jsonl is a directory"):
        journal_files(run)
    problems: list[str] = []
    assert [file.name for file in journal_files(run, problems)] == ["journal/good.jsonl"]
    assert problems == ["journal/x.jsonl is a directory, not a regular file"]
