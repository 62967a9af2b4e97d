"""What commands have made of a sample's runs before a case: files of trackers, histories of metrics, counters."""

from __future__ import annotations

import json
import os

from helpers.forked_commands import CommandLine, run_forked
from helpers.sample_home import SampleHome, id_of
from helpers.workspaces import make_workspace

from slurmtrain.history import cache
from slurmtrain.ops.shared.mirroring.mirror import mirror_runs
from slurmtrain.ops.shared.observe import observe

# W&B takes a second each time: what it has written is there, and can be deleted, but its run is not sent.
_WANDB = "crashed"
TRACKING = {
    "completed": {"mlflow": {"enabled": False}, "csv": {"enabled": True}, "tensorboard": {"enabled": True}},
    "own": {"live": True, "csv": {"enabled": True, "dir": "curves"}},
    _WANDB: {"mlflow": {"enabled": False}, "wandb": {"enabled": True}},
}


def fill_caches(home: SampleHome) -> None:
    """Make them, and let commands store the histories of short runs, too."""
    cache._LEAST_BYTES = cache._LEAST_BYTES_ENDED = 1
    _send(home)
    for arguments in (("plot", id_of("completed"), "loss", "--json"), ("metrics", "--json")):
        ended = run_forked(CommandLine(arguments=arguments, cwd=home.project, environ=home.environ(), limit_s=60.0))
        if ended.code != 0:
            raise SystemExit(f"fuzz: the sample is wrong: {ended.errors.decode(errors='replace')}")
    events = home.runs / "tensorboard" / id_of("completed")
    for path in (home.runs / "csv" / "of-somebody.csv", events / "events.out.tfevents.7.of-somebody"):
        path.write_text("somebody's work\n")
        path.chmod(0o600)


def _send(home: SampleHome) -> None:
    """Send two runs to their trackers, in a process of its own: the parent of commands must have one thread only."""
    if (child := os.fork()) == 0:
        os.umask(0o077)
        workspace = make_workspace(home.runs)
        run_ids = [id_of("completed"), id_of("own")]
        outcome = mirror_runs(workspace, observe(workspace, ask_slurm=False).runs.fetch(run_ids))
        print(*outcome.problems, end="", flush=True)
        os._exit(bool(outcome.problems))
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("fuzz: the sample cannot be sent to trackers")


def write_wandb(home: SampleHome) -> None:
    """Write what the tracker for W&B leaves of a run, and that it is not to be sent; call this before any command."""
    run_id = id_of(_WANDB)
    for journal in (home.runs / run_id / "journal").iterdir():
        journal.write_text(journal.read_text().replace('"kind":"created",', '"kind":"created","tracked":false,'))
    name = f"offline-run-20260101_000000-{run_id}"
    files = {
        f"{run_id}.csv": "step,time,attempt,loss\n1,5.0,1,1.0\n2,6.0,1,0.5\n",
        f"{run_id}.json": json.dumps({"directory": name, "directories": [name], "written": 2}),
        f"{name}/run-{run_id}.wandb": ":W&B",
        f"{name}/files/config.yaml": "lr: 0.1\n",
    }
    for path, content in files.items():
        target = home.runs / "wandb" / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(0o600)
