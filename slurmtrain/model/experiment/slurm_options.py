"""Every option of sbatch and srun, and what becomes of it in a spec: passed on, or what to write instead.

Source: slurm_opt.c and the manual pages of Slurm 22.05 to 25.11. A run differs from a script in that its job has a name
of its own and one task a node, the node agent, which starts the ranks: what a script says about tasks means that task.
docs/slurm-options.md is generated from this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

# What becomes of an option, by the words in the table. An empty text: it is passed on, and has the same meaning as in a
# script.
_ADVICE = {
    "as-is": "",
    "job": "it is an option of the whole job: write it under 'slurm'",
    "agent": "agents decide what the end of one of them means",
    "bcast": "srun starts Python, which needs the files around it: copy files in 'setup_node'",
    "bind": "it would bind the node agent, and all ranks with it: use 'resources.bind'",
    "clusters": "runs are followed on the cluster that this machine belongs to: submit on a machine of the other one",
    "components": "use 'resources.components'",
    "cpus": "use 'resources.cpus_per_proc'",
    "display": "a batch job has no display",
    "env": "use 'env'",
    "gpus": "use 'resources.gpus_per_node', also with a type: 'h100:4'",
    "help": "it submits nothing; 'sbatch --help' in a shell prints it",
    "input": "jobs read nothing from standard input",
    "label": "logs are kept for each rank",
    "log": "logs are kept in the run directory: use 'log' for a link of your own to each",
    "lost": "use a range of 'resources.nodes', or 'resources.spares'",
    "mem": "use 'resources.mem'",
    "multi": "each node runs the same agent",
    "name": "use 'name'",
    "nodes": "use 'resources.nodes'",
    "open-mode": "logs are always appended to",
    "order": "ranks are counted node by node; 'resources.bind' places the ranks of a node",
    "overcommit": "each process has CPU cores of its own: use 'resources.cpus_per_proc' for how many",
    "prolog": "it would run once a node, not for each rank: use 'setup_node'",
    "pty": "a batch job has no terminal",
    "ranks": "use 'resources.procs_per_node'",
    "reads": "slurmtrain reads the job's id from what sbatch prints",
    "requeue": "use 'requeue.enabled'",
    "signal": "use 'requeue.lead' for how long before the time limit the job is warned",
    "srun-wait": "leave it out: agents that are still saving get the time that they need",
    "step": "the step has the nodes and tasks of the job: use 'resources.nodes' and 'resources.procs_per_node'",
    "sweep": "use 'sweep', and 'parallel' for how many of its runs run at once",
    "test": "use 'slurmtrain render'",
    "threads": "there is one task a node: write 'threads-per-core: 1', or 'hint: nomultithread'",
    "time": "use 'resources.time'",
    "tres": "use 'resources.gpus_per_node' and 'resources.cpus_per_proc'; other resources are 'gres', for each node",
    "user": "a run belongs to who submits it",
    "void": "no job with an agent would be started",
    "wait": "use 'slurmtrain submit --wait'",
    "workdir": "use 'workdir'; the job itself is submitted from the run directory",
    "wrap": "use 'command'",
}

# The value: "=" there must be one, "?" there may; "*": each component of a heterogeneous job has its own; what becomes
# of it in sbatch, and in the srun that starts the agents ("-": no such option); then all such options, each with its
# letter.
_TABLE = """
? - -          agent      kill-on-bad-exit:K
- - -          as-is      disable-status:X exact quit-on-interrupt unbuffered:u wait-for-children whole
= - -          as-is      epilog mpi msg-timeout prolog slurmd-debug threads:T treewidth
? - -          as-is      overlap
= - -          bcast      bcast-exclude
? - -          bcast      bcast compress send-libs
= - -          bind       accel-bind cpu-bind
= - -          components het-group pack-group
? - -          display    x11
? - -          job        immediate:I
- - -          label      label:l
- - -          multi      multi-prog
= - -          prolog     task-epilog task-prolog
- - -          pty        interactive
? - -          pty        pty
- - -          step       preserve-env:E
= - -          step       jobid relative:r
- - -          void       debugger-test no-allocate:Z
? - -          void       external-launcher
- - as-is      -          ignore-pbs
= - as-is      -          batch kill-on-invalid-dep wait-all-nodes
? - as-is      -          get-user-env
- - as-is      as-is      verbose:v
= * as-is      as-is      gpu-freq network
= - as-is      as-is      acctg-freq container container-id context cpu-freq profile
? * as-is      as-is      exclusive resv-ports
? - as-is      as-is      oom-kill-step propagate
- * as-is      job        contiguous oversubscribe:s spread-job spread-segments use-min-nodes
- - as-is      job        consolidate-segments hold:H reboot stepmgr
= * as-is      job        constraint:C core-spec:S cores-per-socket extra-node-info:B gres gres-flags hint mem-per-cpu
= * as-is      job        mem-per-gpu mincpus nodefile:F nodelist:w partition:p power resources segment sockets-per-node
= * as-is      job        switches thread-spec threads-per-core tmp
= - as-is      job        account:A bb bbf begin:b comment deadline delay-boot dependency:d exclude:x extra licenses:L
= - as-is      job        mail-type mail-user mcs-label prefer priority qos:q reservation time-min wckey
? - as-is      job        nice
= * bind       bind       gpu-bind mem-bind tres-bind
= - clusters   clusters   cluster cluster-constraint clusters:M
= * cpus       cpus       cpus-per-gpu cpus-per-task:c
= - env        -          export-file
= - env        env        export
= * gpus       gpus       gpus:G gpus-per-node gpus-per-socket gpus-per-task
- - help       help       help:h usage version:V
= - help       help       autocomplete
= - input      input      input:i
= - log        log        error:e output:o
? - lost       lost       no-kill:k
= * mem        mem        mem
= - name       name       job-name:J
= * nodes      nodes      nodes:N
= - open-mode  open-mode  open-mode
= * order      order      distribution:m
- * overcommit overcommit overcommit:O
= * ranks      ranks      ntasks:n ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres tasks-per-node
- - reads      -          parsable
- - reads      as-is      quiet:Q
- - requeue    -          no-requeue
? - requeue    -          requeue
= - signal     signal     signal
= - sweep      -          array:a
- - test       test       test-only
= * threads    threads    ntasks-per-core
= - time       time       time:t
= * tres       tres       tres-per-task
= - user       user       gid uid
- - void       -          external
= - wait       srun-wait  wait:W
= - workdir    workdir    chdir:D
= - wrap       -          wrap
"""

# Values with which a binding option changes nothing for the ranks, or undoes a site's default.
UNBOUND = frozenset({"none", "no", "quiet", "q", "verbose", "v"})
BINDINGS = frozenset({"cpu-bind", "mem-bind", "gpu-bind", "tres-bind"})


@dataclass(frozen=True, slots=True)
class Option:
    """An option of sbatch, srun or both.

    ``letter``: its short name; empty: none. ``takes_value``: ``=`` always, ``?`` if it is given, empty never.
    ``of_component``: each component of a heterogeneous job has its own. ``sbatch``, ``srun``: what to write instead; an
    empty text: it is passed on; None: the program has no such option.
    """

    name: str
    letter: str
    takes_value: str
    of_component: bool
    sbatch: str | None
    srun: str | None

    def advice(self, program: str) -> str | None:
        """What to write instead of this option of ``sbatch`` or ``srun``, as in the attributes of these names."""
        return self.srun if program == "srun" else self.sbatch


def _read(line: str) -> Iterator[Option]:
    value, component, sbatch, srun, *names = line.split()
    for name, _, letter in (each.partition(":") for each in names):
        takes = "" if value == "-" else value
        yield Option(name, letter, takes, component == "*", _ADVICE.get(sbatch), _ADVICE.get(srun))


SLURM_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        each.name: each
        for each in sorted(chain.from_iterable(map(_read, _TABLE.strip().splitlines())), key=attrgetter("name"))
    }
)


_GPU = re.compile(r"(?:gres[/:])?gpu(?:[:=](?P<type>[A-Za-z][\w.+-]*))?(?:[:=](?P<count>\d+))?", re.ASCII)
_COUNT = re.compile(r"(?:(?P<type>[A-Za-z][\w.+-]*)[:=])?(?P<count>\d+)", re.ASCII)
# What options that bind tasks mean for ranks.
_BIND = {
    "cores": "cores", "rank": "cores", "threads": "cores", "map_cpu": "cores", "mask_cpu": "cores",
    "sockets": "numa", "ldoms": "numa", "rank_ldom": "numa", "map_ldom": "numa", "local": "numa", "map_mem": "numa",
    "closest": "gpu",
}  # fmt: skip


def advice_on(program: str, name: str, value: object, nodes: int | None) -> str | None:
    """What to write instead of an option; an empty text: it is passed on; None: no version of Slurm has it.

    Args:
        program: ``sbatch`` or ``srun``.
        name: the option's long name.
        value: its value; True: it has none.
        nodes: how many nodes the job has; None: that is not known.
    """
    option = SLURM_OPTIONS.get(name)
    advice = None if option is None else option.advice(program)
    if advice is None:
        return None
    text = str(value)
    if name == "gres":
        return _advice_on_gres(text) or advice
    if name in ("gpus", "gpus-per-node"):
        return _advice_on_gpus(text, nodes if name == "gpus" else 1) or advice
    if name in BINDINGS:
        kinds = [kind.partition(":")[0] for kind in text.lower().split(",")]
        bind = next((_BIND[kind] for kind in kinds if kind in _BIND), None)
        if UNBOUND.issuperset(kinds):
            return ""
        return f"{advice[:-1]}: {bind}'" if bind else advice
    return advice


def _advice_on_gres(value: str) -> str:
    """What to write instead of generic resources with GPUs; empty if there are none among them."""
    items = value.split(",")
    gpus = [match for item in items if (match := _GPU.fullmatch(item.strip()))]
    if not gpus:
        return ""
    rest = ",".join(item for item in items if not _GPU.fullmatch(item.strip()))
    kept = f", beside 'gres: {rest}'" if rest else ""
    if len(gpus) > 1:
        return f"ranks follow the number of GPUs: use 'resources.gpus_per_node' for one type of them{kept}"
    return f"ranks follow the number of GPUs: use 'resources.gpus_per_node: {_written(gpus[0])}'{kept}"


def _advice_on_gpus(value: str, nodes: int | None) -> str:
    """What to write instead of a number of GPUs on so many ``nodes``; empty if it cannot be divided."""
    match = _COUNT.fullmatch(value.strip())
    if match is None or not nodes or int(match["count"]) % nodes:
        return ""
    return f"ranks follow the number of GPUs: use 'resources.gpus_per_node: {_written(match, nodes)}'"


def _written(match: re.Match[str], nodes: int = 1) -> str:
    count = int(match["count"] or 1) // nodes
    return f"{match['type']}:{count}" if match["type"] else str(count)
