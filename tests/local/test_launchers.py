"""Commands that start the ranks themselves: torchrun, accelerate launch, deepspeed, Megatron's scripts, mp.spawn.

Whatever interrupts them, training continues from a complete checkpoint, at most one save interval back, and nothing of
an attempt trains on beside the next one. Two runs on one machine never share a port.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import run_faults
from helpers.rare import THOROUGH
from helpers.site import SCRIPTS, Site, until
from helpers.trainers import SAVE_EVERY, lost_steps, trainings

STEPS = 30
FOLDER = SCRIPTS / "launchers"
ARGUMENTS = "{checkpoint_dir} --resume {resume_from}"
# On CPUs accelerate starts several processes only if it is told to use several GPUs.
COMMANDS: dict[str, dict[str, Any]] = {
    "torchrun": {"command": f"torchrun {FOLDER}/ranks.py {ARGUMENTS}"},
    "accelerate": {"command": f"accelerate launch --multi_gpu {FOLDER}/ranks.py {ARGUMENTS}"},
    "deepspeed": {"command": f"deepspeed {FOLDER}/ranks.py {ARGUMENTS}"},
    "megatron": {"command": f"bash {FOLDER}/megatron.sh {ARGUMENTS}", "launcher": "node"},
    "spawn": {"command": f"python {FOLDER}/spawned.py {ARGUMENTS}", "launcher": "none"},
}
TWO = {"nodes": 1, "procs_per_node": 2, "time": "00:10:00"}
FAULTS = ("preempted", "killed", "killed in a save", "cancelled")
FEW = {
    ("torchrun", "killed in a save"), ("accelerate", "preempted"), ("deepspeed", "preempted"), ("megatron", "killed"),
    ("spawn", "cancelled"),
}  # fmt: skip
CELLS = [cell for cell in itertools.product(COMMANDS, FAULTS) if THOROUGH or cell in FEW]


def launched(site: Site, name: str, **keys: Any) -> Path:
    """A spec whose command starts two ranks on each node; skips the test if there is no such launcher."""
    program = COMMANDS[name]["command"].split()[0]
    if program in ("accelerate", "deepspeed") and shutil.which(program, path=site.environment()["PATH"]) is None:
        pytest.skip(f"{program} is not installed")
    params = {"steps": STEPS, "step_ms": 50, "save_every": SAVE_EVERY} | keys.pop("params", {})
    spec = {"resources": TWO, "checkpoint": {"glob": "{checkpoint_dir}/ckpt-*.pt"}, **COMMANDS[name], **keys}
    return site.spec(name, params=params, **spec)


def ranks(site: Site, run_id: str) -> list[dict[str, str]]:
    """The variables that the ranks of a run have printed."""
    return [json.loads(line.partition(" ")[2]) for line in site.printed(run_id) if line.startswith("ranks ")]


# --- faults -----------------------------------------------------------------------------------------------------------


def kill_in_save(site: Site, run_id: str) -> None:
    half = site.runs / run_id / "checkpoints" / f"ckpt-{2 * SAVE_EVERY}.pt"
    run_faults.kill_in_save(site, run_id, lambda: half.exists() and half.read_bytes() == b"PK")


STRIKE: dict[str, Callable[[Site, str], None]] = {
    "preempted": run_faults.preempt,
    "killed": run_faults.kill,
    "killed in a save": kill_in_save,
    "cancelled": run_faults.cancel,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), CELLS)
def test_training_that_a_launcher_has_started_continues_from_its_newest_checkpoint(
    site: Site, name: str, fault: str
) -> None:
    # A command takes a while to start: the training that it is to cancel must take longer.
    params = {"killed in a save": {"save_ms": 1000}, "cancelled": {"step_ms": 250}}.get(fault, {})
    run_id = site.submit(launched(site, name, params=params))
    STRIKE[fault](site, run_id)
    site.call("wait", run_id)
    run = site.show(run_id)
    log = "\n".join(site.printed(run_id))
    assert run["state"] == "completed", log
    causes = [attempt["cause"] for attempt in run["attempts"]]
    assert causes == [{"preempted": "preempted", "cancelled": "cancelled"}.get(fault, "lost"), "completed"], log
    [lost] = lost_steps(site, run_id)
    assert lost <= SAVE_EVERY
    assert trainings(site, run_id)[-1].last == STEPS


# --- where the ranks meet -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS] if THOROUGH else ["torchrun"])
def test_two_runs_at_once_meet_at_ports_of_their_own(site: Site, name: str) -> None:
    nodes = {"resources": {**TWO, "nodes": 1 if name == "spawn" else 2}, "params": {"step_ms": 0}}
    runs = [site.submit(launched(site, name, **nodes)) for _ in range(2)]
    site.call("wait", *runs)
    ports = set()
    for run_id in runs:
        started = ranks(site, run_id)
        world = 2 * nodes["resources"]["nodes"]
        assert sorted(rank["RANK"] for rank in started) == [str(rank) for rank in range(world)]
        [port] = {rank["MASTER_PORT"] for rank in started}
        ports.add(port)
    assert len(ports) == 2
    assert not ports & {"29500", "29400"}


@pytest.mark.slow
def test_a_round_in_place_meets_at_another_port(site: Site) -> None:
    run_id = site.submit(launched(site, "torchrun", requeue={"backoff_s": 0}))
    until(lambda: run_faults.has_saved(site, run_id), "a checkpoint")
    [launcher] = [each for each in site.processes(run_id) if Path(each.cmdline()[1]).name == "torchrun"]
    launcher.send_signal(signal.SIGKILL)
    site.call("wait", run_id)
    run = site.show(run_id)
    assert run["state"] == "completed"
    [attempt] = run["attempts"]
    [restart] = attempt["restarts"]
    assert restart["why"].startswith("the command on node 0 was killed by SIGKILL")
    assert len({rank["MASTER_PORT"] for rank in ranks(site, run_id)}) == 2
    assert lost_steps(site, run_id)[0] <= SAVE_EVERY


def variables(site: Site, **keys: Any) -> dict[str, str]:
    """The environment of the command of a run with these keys, and in ``LOADED`` what its parent, the agent, has."""
    loaded = "open(f'/proc/{os.getppid()}/maps').read()"
    show = f"import json, os; print('environ', json.dumps({{**os.environ, 'LOADED': {loaded}}}), flush=True)"
    run_id = site.submit(site.commanding(f'python -c "{show}"', f"shows-{len(list(site.runs.glob('[!.]*/')))}", **keys))
    site.call("wait", run_id)
    [line] = [line for line in site.printed(run_id) if line.startswith("environ ")]
    environ: dict[str, str] = json.loads(line.partition(" ")[2])
    return environ


RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"}


def test_what_a_command_inherits_never_makes_a_rendezvous_of_its_own_wait_for_somebody_elses_store(site: Site) -> None:
    alone = variables(site)
    assert {alone["RANK"], alone["WORLD_SIZE"]} == {"0", "1"}
    assert alone["MASTER_PORT"] == alone["PET_MASTER_PORT"] != "29500"
    node = variables(site, launcher="node", resources=TWO)
    assert (node["NODE_RANK"], node["NNODES"], node["PET_NPROC_PER_NODE"]) == ("0", "1", "2")
    assert node["MASTER_PORT"] == node["SLURMTRAIN_MASTER_PORT"]
    assert Path(node["SLURMTRAIN_HOSTFILE"]).read_text() == "node-0 slots=2\n"
    none = variables(site, launcher="none", resources=TWO)
    assert not none.keys() & {*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "PET_MASTER_PORT"}
    assert none["SLURMTRAIN_PROCS_PER_NODE"] == "2"
    for environ in (alone, node, none):
        assert "python3" in environ["LOADED"]
        # submitit imports numpy wherever there is one.
        assert not [name for name in ("libtorch", "mlflow", "pydantic") if name in environ["LOADED"]]
        assert environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    for environ in (node, none):
        assert not RANK_VARIABLES & environ.keys()
        assert not [name for name in environ if name.startswith("TORCHELASTIC_")]


# --- sessions inside --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["SIGTERM", "SIGUSR1"] if THOROUGH else ["SIGTERM"])
def test_sessions_in_ranks_of_torchrun_lose_no_step_and_are_known_by_rank(site: Site, stop: str) -> None:
    spec = site.spec(
        command=f"torchrun {SCRIPTS}/steps.py",
        params={"steps": 100, "step_ms": 50},
        resources={**TWO, "nodes": 2},
        requeue={"signal": stop},
    )
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) >= 5, "a few steps")
    site.signal_all(run_id, signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    stopped = site.status(run_id)
    assert (stopped["state"], stopped["lost_steps"]) == ("requeued", 0)
    site.call("sync")
    site.call("wait", run_id)
    run = site.show(run_id)
    assert (run["state"], run["step"], run["lost_steps"]) == ("completed", 100, 0)
    assert [attempt["cause"] for attempt in run["attempts"]] == ["preempted", "completed"]
    weights = [line.split() for line in site.printed(run_id) if line.startswith("weights ")]
    assert sorted(rank for *_, rank in weights) == ["0", "1", "2", "3"]
    assert len({digest for _, digest, *_ in weights}) == 1
    logs = {path.name for path in (site.runs / run_id).glob("attempts/*/logs/*.log")}
    assert logs == {"node-0.log", "node-1.log"}
    assert {line.origin for line in printed_by(site, run_id)} == {"node 0", "node 1"}


def printed_by(site: Site, run_id: str) -> Sequence[Any]:
    """The lines of ``logs``, with their origin."""
    from slurmtrain.ops.logs import Line

    lines = []
    for line in site.call("logs", run_id).stdout.splitlines():
        place, _, text = line.removeprefix("[").partition("] ")
        attempt, _, origin = place.partition("/")
        lines.append(Line(int(attempt), origin, text))
    return lines


@pytest.mark.slow
def test_a_rank_of_torchrun_that_stops_by_itself_is_no_crash(site: Site) -> None:
    """A signal that reaches only the ranks: torchrun exits with 1, whatever their exit code."""
    spec = site.spec(command=f"torchrun {SCRIPTS}/steps.py", params={"steps": 100_000, "step_ms": 20})
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) >= 3, "a few steps")
    for process in site.processes(run_id):
        if "steps.py" in process.cmdline()[-1] and "torchrun" not in " ".join(process.cmdline()):
            process.send_signal(signal.SIGTERM)
    until(lambda: not site.processes(run_id), "the end of all processes")
    [attempt] = site.show(run_id)["attempts"]
    assert (attempt["cause"], attempt["lost_steps"]) == ("cancelled", 0)


@pytest.mark.slow
def test_a_hang_in_a_rank_of_torchrun_is_noticed_and_the_ranks_start_again(site: Site) -> None:
    spec = site.spec(
        command=f"torchrun {SCRIPTS}/steps.py",
        params={"steps": 100, "step_ms": 50},
        requeue={"hang_after": 3, "backoff_s": 0},
        checkpoint={"every": {"steps": 10}},
    )
    run_id = site.submit(spec)
    until(lambda: site.step(run_id) >= 15, "a checkpoint")
    ranks = [each for each in site.processes(run_id) if each.cmdline()[-1].endswith("steps.py")]
    [rank] = [each for each in ranks if each.environ().get("RANK") == "1"]
    rank.send_signal(signal.SIGSTOP)
    site.call("wait", run_id)
    run = site.show(run_id)
    assert (run["state"], run["step"]) == ("completed", 100)
    assert [restart["cause"] for restart in run["attempts"][0]["restarts"]] == ["hang"]
    assert not psutil.pid_exists(rank.pid)


@pytest.mark.slow
def test_a_session_takes_its_rank_from_the_process_group_of_its_script(site: Site) -> None:
    spec = site.spec(command=f"python {FOLDER}/session.py", launcher="none", resources=TWO)
    run_id = site.submit(spec, "--wait")
    assert sorted(line for line in site.printed(run_id) if line.startswith("rank ")) == ["rank 0 of 2", "rank 1 of 2"]
    assert site.status(run_id)["step"] == 20
