"""The outlook for a spec on a site, by what Slurm and the registry say."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.fakeslurm import SlurmCommands
from helpers.simulated_run import SimulatedRun
from helpers.siteconfig import CONFIG, PARTITIONS, QOS, config, partitions

from slurmtrain.errors import PathError, SlurmDown
from slurmtrain.model.interruption.outlook import InterruptionCase, SiteFinding
from slurmtrain.ops.doctor import DoctorReport, examine, is_watched
from slurmtrain.ops.shared.observe import observe
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.runtime.job import torch_private
from slurmtrain.system.process import identify

pytestmark = pytest.mark.usefixtures("slurm")

SPEC = "name: x\ncommand: python x.py\nresources: {nodes: 2, time: '1:00:00'}\ntracking: {mlflow: {enabled: false}}\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmCommands:
    fake = SlurmCommands(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.on_path())
    monkeypatch.chdir(tmp_path)
    fake.replies("scontrol", CONFIG + PARTITIONS)  # each reader ignores the lines for the other
    fake.replies("sacctmgr", QOS)
    return fake


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(SPEC)
    return path


def preemption_case(report: DoctorReport) -> InterruptionCase:
    [outlook] = report.outlooks
    return outlook.case("preemption")


def partitions_of(report: DoctorReport) -> list[str]:
    return [outlook.partition for outlook in report.outlooks]


def finding_about(report: DoctorReport, name: str) -> SiteFinding:
    findings = [*report.findings, *(finding for outlook in report.outlooks for finding in outlook.findings)]
    return next(finding for finding in findings if finding.about == name)


def test_a_spec_is_examined_in_the_partition_that_it_goes_to(workspace: Workspace, spec: Path) -> None:
    report = examine(workspace, spec, (), "slurm")
    assert partitions_of(report) == ["spot"]
    assert (preemption_case(report).seconds, preemption_case(report).starts) == (30, "agent")
    limit = report.outlooks[0].case("time limit")
    assert limit.seconds == 90
    assert "after 1 h (resources.time)" in limit.text
    assert (report.good, report.name, report.config["KillWait"]) == (True, "x", "5 sec")
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (document["schema"], document["executor"], document["name"], document["good"]) == (1, "slurm", "x", True)
    assert set(document["partitions"][0]["cases"][0]) == {"event", "seconds", "starts", "delay_s", "text"}
    elsewhere = examine(workspace, spec, ["slurm.partition=spot-cancel,ondemand"], "slurm")
    assert partitions_of(elsewhere) == ["ondemand", "spot-cancel"]


def test_without_a_spec_each_partition_is_examined(workspace: Workspace) -> None:
    report = examine(workspace, None, (), "slurm")
    assert (partitions_of(report), report.name) == (["spot", "spot-cancel", "ondemand"], "")


def test_what_no_partition_can_run_is_a_failure(workspace: Workspace, spec: Path) -> None:
    report = examine(workspace, spec, ["slurm.partition=sopt"], "slurm")
    assert not report.good
    assert "did you mean 'spot'?" in finding_about(report, "request").text
    assert report.outlooks == []


def test_a_spec_without_requeue_is_a_warning(workspace: Workspace, spec: Path) -> None:
    report = examine(workspace, spec, ["requeue.enabled=false"], "slurm")
    assert finding_about(report, "requeue.enabled").severity == "warn"
    assert preemption_case(report).starts == "nobody"


@pytest.mark.parametrize("changes", [{"AllowGroups": "no-group-of-mine"}, {"RootOnly": "YES"}])
def test_partitions_that_the_user_may_not_use_are_skipped(
    workspace: Workspace, slurm: SlurmCommands, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    slurm.replies("scontrol", CONFIG + partitions(**changes))
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert examine(workspace, None, (), "slurm").outlooks == []


def test_the_last_save_of_a_run_of_that_name_is_compared_with_the_grace(workspace: Workspace, spec: Path) -> None:
    sim = SimulatedRun(workspace.root.run("0000000001"), job="8", now=time.time() - 3600)
    sim.created(name="x").submitted(partition="spot").started().saved(1, seconds=45.0, stall_s=1.0)
    observe(workspace, ask_slurm=False)
    report = examine(workspace, spec, (), "slurm")
    assert not report.good
    assert "took 45 s, but a preemption leaves 30 s" in finding_about(report, "save").text


def test_the_qos_of_the_spec_counts_before_that_of_the_user(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.replies("scontrol", config(PreemptType="preempt/qos") + PARTITIONS)
    # QOS are read as associations too, which then have no single default QOS.
    assert preemption_case(examine(workspace, spec, ["slurm.qos=low"], "slurm")).seconds == 60
    assert "unknown" in preemption_case(examine(workspace, spec, (), "slurm")).text


def test_accounting_that_is_down_leaves_things_unknown_and_a_slurm_or_a_spec_that_is_not_there_is_an_error(
    workspace: Workspace, slurm: SlurmCommands, spec: Path
) -> None:
    slurm.fails("sacctmgr", "sacctmgr: error: Sending PersistInit msg: Connection refused")
    report = examine(workspace, spec, (), "slurm")
    assert report.unknown == ("QOS and accounts: sacctmgr: Sending PersistInit msg: Connection refused",)
    assert finding_about(report, "QOS").severity == "warn"
    assert report.good
    with pytest.raises(PathError):
        examine(workspace, spec.with_name("other.yaml"), (), "slurm")
    slurm.fails("scontrol", "Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmDown):
        examine(workspace.looking_again(), spec, (), "slurm")


def test_on_this_machine_slurm_is_not_asked(workspace: Workspace, slurm: SlurmCommands, spec: Path) -> None:
    report = examine(workspace, spec, (), "local")
    assert [outlook.partition for outlook in report.outlooks] == [""]
    assert report.outlooks[0].case("time limit").starts == "watch"
    assert slurm.calls("scontrol") == []


# --- who watches ------------------------------------------------------------------------------------------------------


def test_a_watch_that_runs_is_seen(workspace: Workspace) -> None:
    assert not is_watched(workspace.root)
    workspace.root.path.mkdir()
    me = identify(os.getpid())
    lock = workspace.root.watch_lock
    lock.write_text(json.dumps({**asdict(me), "since": "now", "every": 30.0}))
    assert is_watched(workspace.root)
    lock.write_text(json.dumps({**asdict(me), "start": me.start + 1, "since": "now", "every": 30.0}))
    assert not is_watched(workspace.root)
    lock.write_text("no JSON")
    assert not is_watched(workspace.root)


@pytest.mark.parametrize("executor", ["local", "slurm"])
@pytest.mark.parametrize(
    ("version", "severity", "message"),
    [
        ("99.1.0+cu999", "warn", "torch 99.1.0+cu999 is newer than"),
        ("1.13.1", "fail", "torch 1.13.1 is older than"),
        (torch_private.installed_version(), "", ""),
        ("main", "", ""),
        (None, "", ""),
    ],
)
def test_a_torch_that_was_not_tested_is_a_finding(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    severity: str,
    message: str,
    executor: str,
) -> None:
    monkeypatch.setattr(torch_private, "installed_version", lambda: version)
    report = examine(workspace, None, (), executor)
    of_torch = [(finding.severity, finding.text) for finding in report.findings if finding.about == "torch"]
    assert [kind for kind, _ in of_torch] == ([severity] if severity else [])
    assert all(message in text for _, text in of_torch)
    assert report.good == (severity != "fail")
