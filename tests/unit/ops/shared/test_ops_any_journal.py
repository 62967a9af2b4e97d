"""Whatever the journals of a run hold: the run is read, stored and shown, and so are all others."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.workspaces import make_workspace
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmtrain.cli.status_commands import print_run
from slurmtrain.model.run.events.base import encode, layout
from slurmtrain.model.run.journal_lines import payload_classes
from slurmtrain.model.run.layout import RunDir, run_id
from slurmtrain.model.run.run import RUN_STATES
from slurmtrain.ops.diagnose import diagnose
from slurmtrain.ops.shared.ledger_file import nodes_json
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.run_details import checkpoints_json, show_json
from slurmtrain.ops.shared.views import runs_json
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.ops.sync import sync
from slurmtrain.system.process import this_process

GONE = {**this_process().to_dict(), "start": 1}
GOLDEN = Path(__file__).resolve().parents[4] / "tests" / "golden" / "events.jsonl"
# A right record of each kind.
RECORDS: dict[str, dict[str, Any]] = {
    record["kind"]: record for record in map(json.loads, GOLDEN.read_text().splitlines())
}
# JSON text of which almost nothing can be used, and some that Python's parser cannot read, or only just.
ODD = (
    "null", "true", "-1", "0", "1e400", "-1e400", "NaN", "Infinity", "1e308", "1e18", "9007199254740993", "9" * 30,
    "9" * 4000,
    '""', '"x"', '"\\ud800"', '"\\u0000\\u001b[2J"', "[]", "{}", "[[]]", "[null]", '[{"rank": null}]', '{"a": NaN}',
    '{"xids": 5}', '{"xids": [{"code": 79}], "slurm": 5}', '{"-1": {}}', '[{"at": 1e18, "rank": -5}]',
    "[" * 200 + "]" * 200, '{"a":' * 900 + "1" + "}" * 900, "[" * 10_000 + "]" * 10_000,
)  # fmt: skip
_SOURCES = (
    "attempts/j.0/node-0.jsonl", "attempts/j.0/node-1.jsonl", "attempts/j.1/node-0.jsonl", "attempts/j.0/rank-0.jsonl",
    "attempts/j.0/rank-0.1.jsonl", "journal/a.jsonl", "journal/b.jsonl",
)  # fmt: skip


def line_of(kind: str, values: dict[str, str], time: float) -> bytes:
    """A line of a journal: the right record of this kind, except for these values, as JSON text."""
    record = {**RECORDS.get(kind, {}), "t": time, "kind": kind}
    texts = {key: json.dumps(value) for key, value in record.items()} | values
    return ("{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in texts.items()) + "}\n").encode()


@st.composite
def odd_lines(draw: st.DrawFn) -> tuple[str, bytes]:
    """A journal, and a line of it: an event of any kind with odd values for some of its keys."""
    kind = draw(st.sampled_from(sorted(payload_classes())))
    keys = [each.key for each in layout(payload_classes()[kind])] or ["x"]
    odd = draw(st.dictionaries(st.sampled_from([*keys, "of a newer version"]), st.sampled_from(ODD), max_size=2))
    return draw(st.sampled_from(_SOURCES)), line_of(kind, odd, draw(st.sampled_from((1.5, 7.0, 9.0, 2e9))))


@st.composite
def odd_metrics(draw: st.DrawFn) -> tuple[str, bytes]:
    """A line of metrics with odd values."""
    odd = draw(st.dictionaries(st.sampled_from(["t", "step", "metrics"]), st.sampled_from(ODD), min_size=1))
    return "attempts/j.0/metrics.jsonl", line_of("", {"t": "6", "step": "2", "metrics": '{"loss": 1}'} | odd, 6.0)


any_lines = (
    odd_lines() | odd_metrics() | st.tuples(st.sampled_from(_SOURCES), st.binary(max_size=9).map(lambda b: b + b"\n"))
)


def new_run(workspace: Workspace, name: str) -> RunDir:
    """A local run that has started, and whose processes are gone."""
    run = workspace.root.run(name)
    attempt = run.attempt("j", 0)
    for folder in (run.journals, attempt.path):
        folder.mkdir(parents=True)
    append(run, "journal/submit.jsonl", encode(1.0, "created", {"name": name, "executor": "local"}))
    started = {"submission": 1, "job_id": "j", "attempt": 1, "executor": "local", "host": GONE["host"], "requeue": {}}
    append(run, "journal/submit.jsonl", encode(2.0, "submitting", started))
    append(run, "journal/submit.jsonl", encode(3.0, "submitted", {"submission": 1, "job_id": "j", "process": GONE}))
    append(run, "attempts/j.0/node-0.jsonl", encode(4.0, "agent", {"host": "n0", "process": GONE, "attempt": 1}))
    append(run, "attempts/j.0/metrics.jsonl", b'{"t": 5, "step": 1, "metrics": {"loss": 2.5}}\n')
    return run


def append(run: RunDir, source: str, line: bytes) -> None:
    path = run.path / source
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        file.write(line)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A place in memory, since each example makes a runs root of its own."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield directory
    shutil.rmtree(directory)


def show_all(workspace: Workspace, run_ids: Sequence[str]) -> None:
    """Render the runs in every way: nothing is raised, and the JSON is what any parser reads."""
    observed = observe(workspace, thorough=True)
    assert observed.unreadable == {}
    assert {observed.runs[each].state for each in run_ids} <= set(RUN_STATES)
    facts = []
    for each in run_ids:
        loaded = workspace.store.load(each)
        assert loaded is not None
        facts.append(show_json(workspace, observed.runs[each], loaded))
        facts.append(checkpoints_json(workspace, loaded, deleted_too=True))
        facts.append(diagnose(workspace, each).to_dict())
        print_run(facts[-3], each_node=False)
    facts.append(runs_json(workspace, observed.runs))
    facts.append({"nodes": nodes_json(workspace, inactive_too=True)})
    for each in facts:
        json.dumps(each, allow_nan=False).encode()


@settings(max_examples=8)
@given(runs=st.lists(st.lists(any_lines, min_size=1, max_size=4), min_size=15, max_size=15))
def test_no_line_of_a_journal_keeps_any_run_from_being_read_and_shown(
    place: Path, runs: list[list[tuple[str, bytes]]]
) -> None:
    with tempfile.TemporaryDirectory(dir=place) as directory:
        workspace = make_workspace(Path(directory))
        run_ids = [run_id(1_700_000_000_000 + number, number) for number in range(len(runs) + 1)]
        for name, lines in zip(run_ids, [[], *runs], strict=True):
            run = new_run(workspace, name)
            for source, line in lines:
                append(run, source, line)
        synced = sync(workspace, track=False)
        assert synced.observed.runs[run_ids[0]].state == "requeued"
        show_all(workspace, run_ids)
        workspace.store.close()
