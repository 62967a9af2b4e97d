"""What a job has of a hostile shell: the spec comes first, and what counts besides is named."""

from __future__ import annotations

import resource
import subprocess

from helpers.cluster import Cluster, ClusterSite
from helpers.rare import rare

# As a site's module or a person's profile sets them, and what is left in a shell within an allocation.
HOSTILE = {
    "SBATCH_ACCOUNT": "research", "SBATCH_PARTITION": "ondemand", "SBATCH_TIMELIMIT": "7", "SBATCH_MEM_PER_NODE": "99",
    "SBATCH_NO_REQUEUE": "1", "SBATCH_SIGNAL": "USR1@10", "SBATCH_EXPORT": "NONE", "SBATCH_OUTPUT": "/nowhere/log",
    "SBATCH_JOB_NAME": "other", "SBATCH_EXCLUSIVE": "user", "SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1",
    "SLURM_JOB_ID": "77", "SLURM_NTASKS": "5", "SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "NONE",
    "SLURM_TIMELIMIT": "1", "SLURM_CPUS_PER_TASK": "3", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "jobid",
    "CUDA_VISIBLE_DEVICES": "7", "OMP_NUM_THREADS": "9", "MKL_NUM_THREADS": "3",
    "TOKEN_SECRET": "open sesame",
}  # fmt: skip
PRINTED = "env | grep -E 'SECRET|SBATCH_|CUDA|OMP_NUM' | sort; ulimit -S -t; ulimit -S -s; ulimit -S -n"


@rare
def test_a_hostile_shell_changes_neither_the_job_nor_its_ranks(site: ClusterSite, cluster: Cluster) -> None:
    spec = site.commanding(
        f'bash -c "{PRINTED}"',
        setup=["export SLURM_TIMELIMIT=0:01 SLURM_NTASKS=7 SRUN_DEBUG=4 SLURM_LABELIO=1"],
        env={"TOKEN_SECRET": "${oc.env:TOKEN_SECRET}"},
        resources={"nodes": 1, "procs_per_node": 1, "mem": "200MB", "time": "00:05:00"},
    )
    submitted = subprocess.run(
        [site.python, "-m", "slurmtrain", "submit", str(spec), "--executor", "slurm", "--wait"],
        cwd=site.path, env={**site.environment(), **HOSTILE}, capture_output=True, text=True, preexec_fn=limited,
        **site.identity,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "from this environment: SBATCH_ACCOUNT=research (--account), SBATCH_PARTITION=ondemand" in submitted.stderr
    assert "SBATCH_EXCLUSIVE=user (write slurm.exclusive into the spec)" in submitted.stderr
    [run] = site.json("status")["runs"]
    shown = site.show(run["id"])
    assert (shown["state"], shown["params"]) == ("completed", {})
    assert site.printed(run["id"])[:5] == [
        "OMP_NUM_THREADS=1", "TOKEN_SECRET=open sesame", "unlimited", stack_of_a_node(), "1000",
    ]  # fmt: skip
    record = dict(
        word.split("=", 1) for word in cluster.slurm("scontrol", "show", "job", run["job_id"]).split() if "=" in word
    )
    assert (record["Partition"], record["Account"], record["TimeLimit"]) == ("ondemand", "research", "00:05:00")
    # The agent itself has forbidden another start, at the end.
    assert (record["NumTasks"], record["MinMemoryNode"]) == ("1", "200M")
    [attempt] = shown["attempts"]
    assert attempt["inherited"].items() >= {
        "SBATCH_ACCOUNT": "research", "SBATCH_PARTITION": "ondemand", "MKL_NUM_THREADS": "3",
    }.items()  # fmt: skip
    for command in ("show", "doctor"):
        assert "SBATCH_PARTITION=ondemand (--partition)" in site.call(command, run["id"]).stdout


def limited() -> None:
    """Limits of a login node, for a process that is about to be started."""
    for number, soft in ((resource.RLIMIT_CPU, 300), (resource.RLIMIT_STACK, 2 << 20), (resource.RLIMIT_NOFILE, 1000)):
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))


def stack_of_a_node() -> str:
    """The limit of stacks where the cluster was started, in KiB, as a shell prints it."""
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft // 1024)
