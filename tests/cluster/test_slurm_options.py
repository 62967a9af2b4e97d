"""Options of Slurm in a spec mean what they mean in a script."""

from __future__ import annotations

from pathlib import Path

from helpers.cluster import Cluster, ClusterSite

# What a job asks for in a script, and what `scontrol show job` has of it.
PASSED = {"nice": 7, "comment": "a b", "mail-type": "END,FAIL", "mail-user": "nobody", "deadline": "now+1hour"}
PRINT = """import os
cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["CUDA_VISIBLE_DEVICES"], "bound to", cpus)
"""


def test_options_are_passed_on_by_name_and_letter_and_ranks_are_bound(site: ClusterSite, cluster: Cluster) -> None:
    script = Path(site.path, "places.py")
    script.write_text(PRINT)
    slurm = {**PASSED, "verbose": True, "sbatch": ["-p ondemand", "-qnormal", "--begin now"], "srun": ["-v", "-X"]}
    spec = site.commanding(
        f"python {script}",
        slurm=slurm,
        resources={"gpus_per_node": 2, "mem": 0, "time": 5, "bind": "cores"},
        requeue={"lead": "120s"},
        log="logs/%x-%5j.out",
    )
    run_id = site.submit(spec, "--wait")
    lines = sorted(site.printed(run_id))
    assert [line.partition(" bound")[0] for line in lines] == ["0 of 2 on 0,1", "1 of 2 on 0,1"]
    job = cluster.slurm("scontrol", "show", "job", site.status(run_id)["job_id"])
    for text in ("Partition=ondemand", "QOS=normal", "Comment=a b", "MinMemoryNode=0", "Nice=7"):
        assert text in job, text
    bound = [set(line.rpartition(" ")[2].split(",")) for line in lines]
    assert len(bound[0] | bound[1]) == 1 or not bound[0] & bound[1]
    cpus = site.show(run_id)["attempts"][0]["cpus"]
    assert list(cpus) == ["0", "1"]
    assert f"rank 0: {cpus['0']}, rank 1: {cpus['1']}" in site.call("show", run_id).stdout
    log = site.path / "logs" / f"plain-{int(site.status(run_id)['job_id']):05d}.out"
    assert log.read_text() == lines[0] + "\n"
    [batch] = (site.runs / run_id).glob("submissions/*/submitit/*_submission.sh")
    assert "#SBATCH --signal=USR2@120\n" in batch.read_text()


def test_runs_of_one_name_wait_for_each_other_if_they_are_singletons(site: ClusterSite, cluster: Cluster) -> None:
    command = "sh -c 'echo began $(date +%s.%N); sleep 2; echo ended $(date +%s.%N)'"
    spec = site.commanding(command, slurm={"partition": "spot", "dependency": "singleton"}, name="alone")
    first, second = site.submit(spec), site.submit(spec)
    site.until_state(second, "completed")
    (_, ended), (began, _) = ([float(line.split()[1]) for line in site.printed(each)] for each in (first, second))
    assert ended < began
