"""The link of the user's own to the log of each attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.model.experiment.sweep import Pack
from slurmtrain.model.run.layout import RunDir
from slurmtrain.ops.tree_removal import unlink_logs
from slurmtrain.runtime.agent.node_start import link_log, log_facts, own_cores


def plan(workdir: Path, log: str | None) -> Plan:
    data: dict[str, Any] = {"name": "x", "command": "python train.py", "log": log}
    spec = read_spec(data, lambda at, message: pytest.fail(f"{at}: {message}"))
    return make_plan(spec, workdir=str(workdir), python="/usr/bin/python3", template=data)[0]


def test_the_link_leads_to_the_newest_attempt_and_nothing_of_others_is_replaced(tmp_path: Path) -> None:
    run, other, own = RunDir(tmp_path / "runs" / "A"), RunDir(tmp_path / "runs" / "B"), plan(tmp_path, "a/b/%x-%j.out")
    link = tmp_path / "a" / "b" / "x-7.out"
    for restart in range(2):
        attempt = run.attempt("7", restart)
        attempt.path.mkdir(parents=True)
        log = attempt.rank_log(0)
        assert link_log(own, attempt, "7", log) == ""
        assert link.readlink() == log
    assert "of another run" in link_log(own, other.attempt("7", 0), "7", other.path / "log")
    assert link.readlink() == log
    file = link.with_name("x-8.out")
    file.write_text("mine")
    assert "exists already" in link_log(own, attempt, "8", log)
    assert file.read_text() == "mine"
    assert sorted(path.name for path in link.parent.iterdir()) == ["x-7.out", "x-8.out"]
    assert "log: /dev/null/%j" in link_log(plan(tmp_path, "/dev/null/%j"), attempt, "7", log)
    assert link_log(plan(tmp_path, None), attempt, "7", log) == ""
    unlink_logs(other)
    assert link.is_symlink()
    unlink_logs(run)
    assert [path.name for path in link.parent.iterdir()] == ["x-8.out"]


def test_an_element_has_the_numbers_of_its_array_and_its_own() -> None:
    facts = log_facts("x", "12_3", {"SLURM_JOB_ID": "15"})
    assert (facts["x"], facts["j"], facts["A"], facts["a"]) == ("x", "15", "12", "3")
    assert {key: log_facts("x", "9", {})[key] for key in "jAa"} == {"j": "9", "A": "9", "a": "0"}


# --- runs that share a job --------------------------------------------------------------------------------------------


EIGHT = list(range(10, 18))


def test_runs_of_a_pack_divide_the_cores_of_their_job() -> None:
    shares = [own_cores(EIGHT, 8, Pack(4), slot) for slot in range(4)]
    assert shares == [[10, 11], [12, 13], [14, 15], [16, 17]]


@pytest.mark.parametrize(
    ("of_job", "runs"),
    [
        pytest.param(16, 2, id="each task is bound to its own cores"),
        pytest.param(2, 2, id="jobs are not confined to their cores"),
        pytest.param(None, 2, id="Slurm does not say"),
        pytest.param(8, 9, id="there are fewer cores than runs"),
    ],
)
def test_cores_stay_as_slurm_gave_them_where_others_may_use_them(of_job: int | None, runs: int) -> None:
    assert own_cores(EIGHT, of_job, Pack(runs), 1) == EIGHT
