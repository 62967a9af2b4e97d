"""What agents note of the sizes of logs."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

from slurmtrain.runtime.script_output.log_sizes import LogSizes


def read_notes(path: Path) -> list[dict[str, int]]:
    notes = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(abs(note["t"] - time.time()) < 60 for note in notes)
    return [note["sizes"] for note in notes]


def test_what_has_grown_is_noted(tmp_path: Path) -> None:
    logs = {f"rank-{rank}.log": tmp_path / f"rank-{rank}.log" for rank in range(3)}
    sizes = LogSizes(tmp_path / "sizes-0.jsonl", logs, every_s=0.0)
    for rank in range(2):
        logs[f"rank-{rank}.log"].write_text("a" * rank)
    sizes.note()
    sizes.note()
    logs["rank-0.log"].write_text("abc")
    sizes.note()
    assert read_notes(tmp_path / "sizes-0.jsonl") == [{"rank-1.log": 1}, {"rank-0.log": 3}]
    assert stat.S_IMODE((tmp_path / "sizes-0.jsonl").stat().st_mode) == 0o600


def test_nothing_is_noted_before_it_is_due_or_where_nothing_can_be_written(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("a")
    LogSizes(tmp_path / "sizes-0.jsonl", {log.name: log}).note()
    assert not (tmp_path / "sizes-0.jsonl").exists()
    LogSizes(tmp_path / "gone" / "sizes-0.jsonl", {log.name: log}, every_s=0.0).note()
    assert list(tmp_path.iterdir()) == [log]
