"""The long options of sbatch, and which of them belong to slurmtrain.

Source: ``sbatch --help`` and the manual pages of Slurm 22.05 to 25.11.
"""

from __future__ import annotations

from slurmtrain.model.spec.kinds import suggestion, type_name

# The options of all versions: the site's sbatch itself reports those that it lacks.
OPTIONS = frozenset(
    """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment consolidate-segments
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
    deadline delay-boot dependency distribution error exclude exclusive export export-file extra extra-node-info
    get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold
    ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit oversubscribe
    parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports
    segment signal sockets-per-node spread-job spread-segments stepmgr switches test-only thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task uid umask use-min-nodes
    verbose wait wait-all-nodes wckey wrap x11
    """.split()  # noqa: SIM905 (a list of names to read, not of strings)
)

# Options that slurmtrain sets itself, or from another key of the spec, and what to use instead.
OWNED = {
    "array": "use 'sweep'",
    "chdir": "use 'workdir'; the job itself is submitted from the run directory",
    "cpus-per-task": "use 'resources.cpus_per_proc'",
    "error": "logs are kept in the run directory",
    "export": "use 'env'",
    "export-file": "use 'env'",
    "gpus": "use 'resources.gpus_per_node'",
    "gpus-per-node": "use 'resources.gpus_per_node'",
    "input": "jobs read nothing from standard input",
    "job-name": "use 'name'",
    "mem": "use 'resources.mem'",
    "no-requeue": "use 'requeue'",
    "nodes": "use 'resources.nodes'",
    "ntasks": "use 'resources.nodes' and 'resources.procs_per_node'",
    "ntasks-per-node": "use 'resources.procs_per_node'",
    "open-mode": "logs are always appended to",
    "output": "logs are kept in the run directory",
    "parsable": "slurmtrain reads sbatch's answer itself",
    "requeue": "use 'requeue'",
    "signal": "slurmtrain asks for the signals that it needs",
    "test-only": "use 'slurmtrain render'",
    "time": "use 'resources.time'",
    "wait": "use 'slurmtrain submit --wait'",
    "wrap": "use 'command'",
}


def check_sbatch_option(name: object) -> None:
    """Raise ValueError unless this names an option of sbatch that a spec may set (``-`` or ``_`` between words)."""
    if not isinstance(name, str):
        raise ValueError(f"expected the long name of an sbatch option, found {type_name(name)} ({name!r})")
    option = canonical_option(name)
    if option in OWNED:
        raise ValueError(f"slurmtrain sets this option itself: {OWNED[option]}")
    if option not in OPTIONS:
        raise ValueError(f"sbatch has no option --{option}{suggestion(option, OPTIONS - OWNED.keys())}")


def canonical_option(name: str) -> str:
    """The name as sbatch writes it: dashes, no leading ones."""
    return name.replace("_", "-").lstrip("-")
