"""Writing journals."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

from slurmtrain.model.run.events.agent_events import NodeEnded
from slurmtrain.model.run.events.base import UnknownEvent
from slurmtrain.model.run.events.command_events import RunCreated
from slurmtrain.model.run.journal_lines import events_of, read_lines
from slurmtrain.system.journal import Journal, command_journal


def kinds(path: Path) -> tuple[list[str], list[bytes]]:
    """The kinds of a journal's events, and its garbage."""
    events, garbage = events_of(read_lines(path.read_bytes(), 0, "j"), "j")
    return [event.kind for event in events], [bad.line for bad in garbage]


def test_events_are_whole_lines_that_read_back(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        time = journal.write(RunCreated(name="ü\n"))
        journal.write(NodeEnded(cause="completed"))
    first, second = path.read_text().splitlines()
    created = json.loads(first)
    assert (created["t"], created["kind"], created["name"]) == (round(time, 6), "created", "ü\n")
    assert json.loads(second)["kind"] == "end"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_to_say_leaves_nothing_behind(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.jsonl"):
        pass
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "no" / "j.jsonl").write(UnknownEvent(name="a"))
    assert list(tmp_path.iterdir()) == []


def test_an_event_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write

    def noted(handle: int, data: bytes) -> int:
        written.append(bytes(data))
        return write(handle, data)

    monkeypatch.setattr(os, "write", noted)
    with Journal(tmp_path / "j.jsonl") as journal:
        journal.write(RunCreated(name="x" * 10_000))
    assert len(written) == 1
    assert (tmp_path / "j.jsonl").read_bytes() == written[0]


@pytest.mark.parametrize("durable", [True, False])
def test_an_event_is_synced_to_disk_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Journal(tmp_path / "j.jsonl", durable=durable) as journal:
        journal.write(UnknownEvent(name="a"))
        journal.write(UnknownEvent(name="b"))
    assert len(synced) == (2 if durable else 0)


def test_a_line_that_a_killed_writer_left_torn_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.write(UnknownEvent(name="a"))
    path.write_bytes(path.read_bytes() + b'{"t": 1, "ki')
    with Journal(path) as journal:
        journal.write(UnknownEvent(name="b"))
    # A later writer goes on after what is there.
    with Journal(path) as journal:
        journal.write(UnknownEvent(name="c"))
    assert kinds(path) == (["a", "b", "c"], [b'{"t": 1, "ki'])


def test_each_command_has_a_journal_of_its_own(tmp_path: Path) -> None:
    paths = {command_journal(tmp_path, "cancel").path for _ in range(50)}
    assert len(paths) == 50
    assert all(re.fullmatch(rf"cancel-[0-9a-z]{{9}}-{os.getpid()}-[0-9a-f]{{8}}\.jsonl", path.name) for path in paths)
