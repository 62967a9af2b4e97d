"""What ``show`` prints for a person."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.cli import show
from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.model.run.run import Attempt
from slurmtrain.ops.shared.run_details import attempt_json


def state(rank: int, idle_s: float, letter: str = "S") -> dict[str, Any]:
    return RankState(rank=rank, node=0, step=5, phase=Phase.TRAINING, idle_s=idle_s, state=letter).to_dict()


def printed(capsys: pytest.CaptureFixture[str], **fields: Any) -> list[str]:
    attempt = Attempt(number=1, job_id="7", restart=0, state="failed", cause="hang", **fields)
    show._print_attempt(attempt_json(attempt), newest=True, each_node=False)
    return capsys.readouterr().out.splitlines()


def test_an_attempt_that_was_held_up_says_by_what(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        spent={"queue": 12.0, "train": 61.0},
        restarts=[{"at": 1.0, "cause": "crash", "reached": 5, "why": "rank 0 exited with 3"}],
        hangs=[{"at": 2.0, "ranks": [state(0, 65.0), state(1, 60.0, "T")]}],
        stragglers=[{"at": 3.0, "rank": 2, "host": "n1", "ratio": 2.0, "own_s": 0.2, "median_s": 0.1, "step": 9}],
        evidence={"xids": [79]},
    )
    assert lines[2:] == [
        "  time      queue 12s, train 1m01s",
        "  in place  crash after step 5: rank 0 exited with 3",
        "  hang      rank 1 (node 0) is stopped by a signal (process state T) after step 5 (no progress for 1m00s)",
        "  slow      rank 2 on n1 was 2 times as slow as others at step 9: 200 ms of its own per step, the median "
        "is 100 ms",
        "  evidence  xids 79",
    ]


def test_a_failure_without_lines_of_its_log_and_a_revision_without_more_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(capsys)[2:] == printed(capsys, failures=[{"rank": 0}])[2:] == []
    assert show._git({"commit": "0123456789abcdef"}) == "0123456789ab"
