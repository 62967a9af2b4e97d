"""What other users of a cluster can learn of a run: nothing from its files, its processes, or Slurm."""

from __future__ import annotations

import secrets
import subprocess

from helpers.cluster import Cluster, ClusterSite
from helpers.cluster_runs import TWO, until_trains
from helpers.command_lines import command_lines_with
from helpers.modes import open_to_others

TOKEN = secrets.token_hex(8)
NOBODY = 65534


def test_neither_files_nor_processes_nor_slurm_show_a_run_to_others(site: ClusterSite, cluster: Cluster) -> None:
    # A umask that would even keep the user's files from the user: an ordinary one, whom modes bind.
    site.identity = {**site.identity, "umask": 0o777}
    checks = f'test "$MY_API_TOKEN" = {TOKEN[:4]}\'{TOKEN[4:]}\' && test "$(umask)" = 0777'
    spec = site.light(
        "secret",
        params={"steps": 200, "step_ms": 10, "slow_from": 20},
        resources=TWO,
        checkpoint={"every": {"steps": 10}},
        setup=[f"export MY_API_TOKEN={TOKEN}", f"{checks} || exit 9"],
    )
    with command_lines_with(TOKEN, str(site.runs)) as lines:
        run_id = site.submit(spec)
        until_trains(site, run_id, starts=1)
        job = site.job(run_id)
        shown = cluster.slurm("scontrol", "show", "job", "-d", job)
        stolen = subprocess.run(
            ["scontrol", "write", "batch_script", job, "-"],
            env={"PATH": f"{cluster.programs}:/usr/bin:/bin", "SLURM_CONF": cluster.conf},
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
        cluster.slurm("scontrol", "requeue", job)
        site.call("wait", run_id)
    assert len(site.show(run_id)["attempts"]) == 2
    assert TOKEN not in lines
    of_the_run = "".join(lines[str(site.runs)])
    # What lives long enough to be seen surely, so that the watcher has seen something.
    assert all(name in of_the_run for name in ("srun", "slurmtrain.runtime.task"))
    assert TOKEN not in shown + stolen.stdout + stolen.stderr
    assert "Invalid user id" in stolen.stderr
    assert TOKEN in cluster.slurm("scontrol", "write", "batch_script", job, "-"), "Slurm keeps it, for its operators"
    assert open_to_others(site.runs) == {}
