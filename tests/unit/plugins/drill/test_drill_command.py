"""The output and exit code of ``slurmtrain drill``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain import cli
from slurmtrain.cli import output as printing
from slurmtrain.model.run.run import Run
from slurmtrain.plugins.drill import drill_runs as module
from slurmtrain.plugins.drill.drill_runs import DrillOptions, DrillReport
from slurmtrain.plugins.drill.facts import Baseline, CheckpointComparison, DrillProblem, FaultVerdict, InjectedFault
from slurmtrain.plugins.drill.judge import Findings

REFERENCE = Run(id="REF", name="n", state="completed", reason="", executor="local", started_at=1.0, ended_at=13.0)
PASSED = FaultVerdict(
    fault="rank",
    run_id="ONE",
    injected=InjectedFault(fault="rank", at=1.0, attempt="7.0"),
    stopped_s=0.31,
    allowed_s=60.0,
    lost_steps=5,
    restarted_by="agents, in place",
    restarted_s=0.31,
    step_s=4.2,
    attempts=1,
    restarts=1,
    state="completed",
    comparison=CheckpointComparison(identical=True, method="hashes"),
)
MISSED = FaultVerdict(fault="save", run_id="SIX", state="completed", not_tried="it finished first")
FAILED = FaultVerdict(
    fault="all", run_id="TWO", state="failed", problems=[DrillProblem("it is gone", "look at it")], notes=["so"]
)


def call(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    report: DrillReport,
    *arguments: str,
    options: list[DrillOptions] | None = None,
) -> int:
    def drill(_workspace: Any, drill_options: DrillOptions, say: Any, _look: Any) -> DrillReport:
        say("reference: run REF")
        if options is not None:
            options.append(drill_options)
        return report

    monkeypatch.setattr(module, "run_drill", drill)
    # This process goes on afterwards, with other tests.
    monkeypatch.setattr(cli, "collect_rarely", lambda: None)
    monkeypatch.setattr(cli, "leave_quickly", lambda: None)
    monkeypatch.setenv("SLURMTRAIN_RUNS", str(tmp_path / "runs"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["drill", "spec.yaml", "--executor", "local", *arguments])
    return int(ended.value.code or 0)


def report(*verdicts: FaultVerdict, again: CheckpointComparison | None = None, script: Any = None) -> DrillReport:
    baseline = Baseline(run=REFERENCE)
    return DrillReport(
        executor="local", baseline=baseline, again=again, verdicts=verdicts, script=script or Findings()
    )  # fmt: skip


def lines(text: str) -> Sequence[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_table_shows_the_outcome_of_each_fault_and_then_the_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = CheckpointComparison(identical=True, method="hashes")
    script = Findings(notes=["its last checkpoint is ckpt-5.pt"])
    assert call(monkeypatch, tmp_path, report(PASSED, MISSED, FAILED, again=again, script=script)) == 1
    output = capsys.readouterr()
    first, own, second, _, passed, missed, failed, *rest = lines(output.out)
    assert first == "undisturbed: run REF completed after 12 s"
    assert own == "undisturbed: its last checkpoint is ckpt-5.pt"
    assert second == "undisturbed once more: its last checkpoint is bit-identical"
    assert passed == "rank ONE passed 0.3/60 s 5 yes in place 4.2 s"
    assert missed == "save SIX not tried - - - - -"
    assert failed == "all TWO FAILED - - - - -"
    assert rest == ["save: not tried: it finished first", "all: it is gone; look at it", "all: so"]
    assert output.err == "reference: run REF\n"


@pytest.mark.parametrize("drawn", [True, False])
def test_a_table_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], drawn: bool
) -> None:
    monkeypatch.setattr(printing, "is_terminal", lambda _: drawn)
    monkeypatch.setenv("COLUMNS", "80")
    wide = replace(
        PASSED, fault="preempt", run_id="6agst33ddq", stopped_s=115.8, allowed_s=140.0, lost_steps=1000, step_s=1234.5
    )  # fmt: skip
    call(monkeypatch, tmp_path, report(wide, replace(MISSED, run_id="6agst33ddq")))
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines()[1:])) <= 80
    # No cell is broken into two lines.
    for row in ("preempt 6agst33ddq passed 116/140 s 1000 yes in place 1234 s", "save 6agst33ddq not tried"):
        assert any(line.startswith(row) for line in lines(output))


def test_json_is_one_object_and_the_exit_code_is_0_where_all_runs_passed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: list[DrillOptions] = []
    arguments = ("params.steps=5", "--fault", "rank", "--fault", "all", "--twice", "--json")
    assert call(monkeypatch, tmp_path, report(PASSED), *arguments, options=options) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert (document["drill"]["passed"], document["drill"]["reference"]["seconds"]) == (True, 12.0)
    assert document["drill"]["script"] == {"format": None, "saves": 0, "last": None, "problems": [], "notes": []}
    [verdict] = document["drill"]["faults"]
    assert (verdict["result"], verdict["not_tried"], verdict["exit_codes"]) == ("passed", None, {})
    assert (verdict["fault"], verdict["stopped_s"], verdict["comparison"]["identical"]) == ("rank", 0.31, True)
    [received] = options
    assert (received.faults, received.overrides, received.twice) == (("rank", "all"), ("params.steps=5",), True)


def test_a_failed_undisturbed_run_ends_the_drill(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Run(id="REF", name="n", state="failed", reason="rank 0 exited with code 1", executor="local")
    assert call(monkeypatch, tmp_path, DrillReport(executor="local", baseline=Baseline(run=failed))) == 1
    output = capsys.readouterr().out
    assert "undisturbed: run REF failed: rank 0 exited with code 1" in output
    assert "'slurmtrain why REF'" in output


def test_an_unknown_fault_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, tmp_path, report(), "--fault", "flood") == 2
    assert "'preempt', 'timeout', 'rank', 'save', 'agent', 'all', 'hang'" in capsys.readouterr().err
