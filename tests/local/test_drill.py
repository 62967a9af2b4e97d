"""Drills with real runs on this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.rare import rare
from helpers.site import PATIENCE_S, Site
from helpers.trainers import TRAINERS

# Commands that wait look at a run that must be started again as often as they ask Slurm.
SOON = {"SLURMTRAIN_SLURM_INTERVAL": "10"}
STEPS_OF_TRAINERS = 30


@pytest.mark.slow
def test_a_drill_of_a_script_with_a_session_shows_who_started_it_again_and_the_same_result(site: Site) -> None:
    spec = site.light(
        params={"steps": 60, "step_ms": 60}, checkpoint={"every": {"steps": 5}}, requeue={"backoff_s": 0.5}
    )
    words = ("--executor", "local", "--fault", "preempt", "--fault", "rank")
    completed = site.call("drill", str(spec), *words, "--json", env=SOON)
    drill = json.loads(completed.stdout)["drill"]
    preempted, killed = drill["faults"]
    assert drill["passed"], drill
    assert [one["comparison"]["identical"] for one in (preempted, killed)] == [True, True]
    assert (preempted["cause"], preempted["started_by"], preempted["lost_steps"]) == ("preempted", "sync", 0)
    assert (killed["cause"], killed["started_by"], killed["restarts"]) == ("crash", "agents, in place", 1)
    # Both were struck after the first checkpoint, not during imports.
    assert all("with a checkpoint of step" in one["moment"] for one in (preempted, killed))
    # What it lost is what it had done since it saved last.
    assert killed["lost_steps"] <= killed["at_step"] + 60 - killed["resumed_at"]
    assert killed["resumed_at"] >= 5
    names = {run["id"]: run["name"] for run in site.json("status")["runs"]}
    assert names == {
        drill["reference"]["run_id"]: "light-drill-reference",
        preempted["run_id"]: "light-drill-preempt",
        killed["run_id"]: "light-drill-rank",
    }


def drill(
    site: Site, options: str, *faults: str, code: int | None = None, start: str = "python", **keys: Any
) -> dict[str, Any]:
    """Drill the plain script with these options of its own; returns what is printed as JSON."""
    command = f"{start} {site.scripts / 'drilled.py'} --out {{checkpoint_dir}} --resume {{resume_from}} {options}"
    spec = site.commanding(
        command, **{"checkpoint": {"glob": "{checkpoint_dir}/*.pt"}, "requeue": {"backoff_s": 0.5}, **keys}
    )
    words = [word for fault in faults for word in ("--fault", fault)]
    completed = site.call(
        "drill", str(spec), "--executor", "local", *words, "--json", code=code, env=SOON, patience_s=PATIENCE_S * 5
    )
    outcome: dict[str, Any] = json.loads(completed.stdout)["drill"]
    return outcome


def problems(outcome: dict[str, Any]) -> list[str]:
    return [problem["what"] for problem in outcome["problems"]]


@pytest.mark.slow
def test_a_drill_says_what_a_careless_script_does_and_ends_its_hang(site: Site) -> None:
    # It exits with 0 when it is asked to stop, saves nothing then, and draws different numbers each time.
    outcome = drill(site, "--random --stops-with 0", "preempt", "hang", code=1)
    preempted, hung = outcome["faults"]
    assert "in the format torch, of step 40, which is inside it" in outcome["script"]["notes"][0]
    # Exit code 0 completed nothing: the run went on from its last checkpoint.
    assert (preempted["result"], preempted["state"], preempted["exit_codes"]) == ("passed", "completed", {"0": 0})
    notes = " ".join(preempted["notes"])
    assert "its ranks exited with 0 after SIGTERM; that is taken as not finished" in notes
    assert "it saved nothing when it was asked to stop, which costs up to 5 steps" in notes
    assert "it resumed from ckpt-" in notes
    # A second undisturbed run was made to see that.
    assert (outcome["again"]["identical"], outcome["again"]["how"]) == (False, "tensors")
    assert [each["name"] for each in preempted["comparison"]["differing"]] == ["weights"]
    assert "the script is not deterministic" in notes
    assert hung["result"] == "failed"
    assert problems(hung) == ["nobody would notice a hang of this script: it reports no progress"]
    assert hung["state"] == "cancelled"
    assert site.processes(hung["run_id"]) == []


@rare
@pytest.mark.slow
def test_a_drill_shows_that_a_save_in_place_destroys_the_only_checkpoint_and_that_a_script_does_not_resume(
    site: Site,
) -> None:
    outcome = drill(site, "--name last.pt --torn-s 1.5 --every 4 --steps 20", "save", code=1)
    [killed] = outcome["faults"]
    assert killed["half_written"] == [f"{site.runs}/{killed['run_id']}/checkpoints/last.pt"]
    assert problems(killed) == ["the interrupted save destroyed last.pt, its only checkpoint"]
    # It started from the beginning, and so ends alike.
    assert (killed["state"], killed["comparison"]["identical"]) == ("completed", True)


@rare
@pytest.mark.slow
def test_a_script_that_saves_on_the_signal_passes_every_fault(site: Site) -> None:
    faults = ("preempt", "timeout", "rank", "agent", "all")
    outcome = drill(site, "--stops-with 75 --saves-on-signal --leaves-daemon", *faults, code=0)
    assert [fault["result"] for fault in outcome["faults"]] == ["passed"] * 5
    preempted = outcome["faults"][0]
    assert "it saved ckpt-" in preempted["notes"][0]
    # What ignored the signal was killed before the run started again.
    assert len(preempted["leftovers"]) == 1
    assert any("outlived its ranks and were killed: sleep" in note for note in preempted["notes"])
    assert all(site.processes(fault["run_id"]) == [] for fault in outcome["faults"])


@rare
@pytest.mark.slow
def test_a_script_that_torchrun_starts_is_struck_with_all_its_processes(site: Site) -> None:
    preempted, torn = drill(site, "--torn-s 0.2", "preempt", "save", code=0, start="torchrun")["faults"]
    assert list(preempted["exit_codes"]) == ["node 0"]
    assert all("it resumed from ckpt-" in " ".join(struck["notes"]) for struck in (preempted, torn))
    assert torn["resume_from"] not in torn["half_written"]


@rare
@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, False], ids=["adapter", "plain"])
@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_a_drill_of_a_trainer_compares_what_it_has_trained(site: Site, name: str, adapter: bool) -> None:
    trainer = TRAINERS[name]
    trainer.skip_if_missing()
    spec = trainer.spec(site, adapter=adapter, requeue={"backoff_s": 0.5})
    words = ("--executor", "local", "requeue.hang_after=10", "--json")
    faults = [word for fault in ("preempt", "rank", "hang") for word in ("--fault", fault)]
    completed = site.call("drill", str(spec), *words, *faults, code=None, env=SOON, patience_s=PATIENCE_S * 5)
    outcome = json.loads(completed.stdout)["drill"]
    preempted, killed, hung = outcome["faults"]
    for struck in (preempted, killed):
        # Their files hold paths and times, so that they would differ byte by byte.
        assert (struck["comparison"]["how"], struck["comparison"]["identical"]) == ("tensors", True), struck
        assert (struck["result"], struck["state"]) == ("passed", "completed"), struck
    assert f"of step {STEPS_OF_TRAINERS}" in outcome["script"]["notes"][0]
    if adapter:
        assert preempted["lost_steps"] == 0
        assert (hung["result"], hung["cause"]) == ("passed", "hang")
    else:
        assert any("saved nothing when it was asked to stop" in note for note in preempted["notes"])
        assert problems(hung) == ["nobody would notice a hang of this script: it reports no progress"]
