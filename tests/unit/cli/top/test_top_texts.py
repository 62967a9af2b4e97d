"""What the pane says about a run, what the last line says about keys, and how lines are broken."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from slurmtrain.cli.top.details import facts, label, lines
from slurmtrain.cli.top.keys import LOG_KEYS, PAGE_KEYS, help_lines, line
from slurmtrain.cli.top.report import wrapped

RUN = {
    "id": "0123456789", "name": "cnn", "state": "running", "reason": "cannot save", "step": 3, "total_steps": 10,
    "steps_per_second": 0.1, "eta_seconds": 70.0, "metrics": {"loss": 0.5}, "lost_steps": 4, "goodput": 0.9,
    "checkpoint": {"step": 2, "saved_at": "2020-01-01T12:00:00Z", "bytes": 2048}, "job_id": "7", "executor": "slurm",
    "dir": "/runs/0123456789", "params": {}, "tags": [], "note": "", "sweep": None,
}  # fmt: skip


def attempt(number: int, **fields: Any) -> dict[str, Any]:
    return {"number": number, "state": "failed", "cause": "crash", "reason": "rank 0 failed", "first_step": 0,
            "last_step": 3, "lost_steps": 1, "seconds": {"train": 60.0}, "nodes": ["n1", "n2", "n3"], "checks": {},
            **fields}  # fmt: skip


def test_facts_come_by_worth_and_attempts_newest_first() -> None:
    pairs = facts(RUN, [attempt(1), attempt(2, cause=None, state="running", last_step=None, lost_steps=0, reason="")])
    assert [name for name, _ in pairs] == [
        "state", "step", "metrics", "checkpoint", "attempt", "attempt", "nodes", "job", "directory"
    ]  # fmt: skip
    texts = [text for _, text in pairs]
    assert texts[:2] == ["running: cannot save", "3/10, 0.1/s, 1m10s to go, lost 4 steps, goodput 90 %"]
    assert texts[3] == "step 2, 2020-01-01 12:00, 2.0 KiB"
    assert texts[4].startswith("2 running")
    assert texts[5].startswith("1 crash; steps 0 to 3; lost 1; ")
    assert texts[6] == "n[1-3]"


def test_what_people_have_set_and_written_is_there_and_of_a_run_without_attempts_what_is_known() -> None:
    pairs = dict(facts({**RUN, "params": {"lr": 0.1}, "tags": ["good", "v2"], "note": "try again", "sweep": "s"}, []))
    assert [pairs[name] for name in ("params", "tags", "note", "sweep")] == ["lr=0.1", "good v2", "try again", "s"]
    bare = {**RUN, "state": "created", "reason": "", "step": None, "steps_per_second": None, "eta_seconds": None,
            "metrics": {}, "lost_steps": None, "goodput": None, "checkpoint": None, "job_id": None}  # fmt: skip
    assert facts(bare, []) == [("state", "created"), ("directory", "/runs/0123456789")]


def test_gpus_are_those_that_the_preflight_saw() -> None:
    gpu_check = {"check": "gpu", "status": "pass", "summary": "8 GPUs, H100"}
    same = facts(RUN, [attempt(1, checks={"n1": [gpu_check], "n2": [gpu_check, {"check": "disk", "summary": "fine"}]})])
    assert dict(same)["gpus"] == "8 GPUs, H100"
    other = facts(RUN, [attempt(1, checks={"n1": [gpu_check], "n2": [{**gpu_check, "summary": "7 of 8 GPUs"}]})])
    assert dict(other)["gpus"] == "n1: 8 GPUs, H100; n2: 7 of 8 GPUs"
    assert "gpus" not in dict(facts(RUN, [attempt(1)]))


def test_facts_are_printable() -> None:
    evil = facts({**RUN, "reason": "\x1b[2J\n", "dir": "/\x07"}, [attempt(1, reason="\x9b", nodes=["\x1bc"])])
    assert all(text.isprintable() for _, text in evil)


def test_long_facts_go_on_below_their_beginning() -> None:
    broken = lines([("state", "failed: " + "word " * 20), ("job", "7")], 40)
    assert [name for name, _ in broken] == ["state", "", "", "", "job"]
    assert all(cell_len(label(name) + text) <= 40 for name, text in broken)


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("keys", [PAGE_KEYS, LOG_KEYS])
def test_the_keys_that_are_named_fit_on_a_line(keys: Any, width: int) -> None:
    fitting = line(keys, width)
    assert fitting[0] == keys[0][:2]
    assert sum(len(key) + len(word) + 3 for key, word in fitting) - 2 <= width
    assert len(fitting) == len(keys) or width < 200


def test_help_names_every_key_and_fits_on_a_narrow_screen() -> None:
    texts = help_lines(60)
    assert all(any(text.startswith(key) for text in texts) for key, _, _ in PAGE_KEYS)
    assert max(map(len, texts)) <= 60


def test_only_long_lines_of_a_report_are_broken() -> None:
    table = "STEP  " + "x" * 30
    assert list(wrapped([table, "state       failed: " + "word " * 10], 45)) == [
        table, "state       failed: word word word word word", "            word word word word word"
    ]  # fmt: skip
