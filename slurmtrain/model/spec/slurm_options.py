"""Every option of sbatch and srun, and what becomes of it in a spec: passed on, or what to write instead.

Source: slurm_opt.c and the manual pages of Slurm 22.05 to 25.11. A run differs from a script in that its job has a name
of its own and one task a node, the node agent, which starts the ranks: what a script says about tasks means that task.
docs/slurm-options.md is generated from this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
    "order": "ranks are counted node by node; 'resources.bind' places those of a node",
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

# Its name; its letter; its value: "=" it must have one, "?" it may; whether each component of a heterogeneous job has
# its own, "*"; then what becomes of it in sbatch, and in the srun that starts the agents ("-": no such option).
_TABLE = """
accel-bind            -  =  -  -           bind
account               A  =  -  as-is       job
acctg-freq            -  =  -  as-is       as-is
array                 a  =  -  sweep       -
autocomplete          -  =  -  help        help
batch                 -  =  -  as-is       -
bb                    -  =  -  as-is       job
bbf                   -  =  -  as-is       job
bcast                 -  ?  -  -           bcast
bcast-exclude         -  =  -  -           bcast
begin                 b  =  -  as-is       job
chdir                 D  =  -  workdir     workdir
cluster               -  =  -  clusters    clusters
cluster-constraint    -  =  -  clusters    clusters
clusters              M  =  -  clusters    clusters
comment               -  =  -  as-is       job
compress              -  ?  -  -           bcast
consolidate-segments  -  -  -  as-is       job
constraint            C  =  *  as-is       job
container             -  =  -  as-is       as-is
container-id          -  =  -  as-is       as-is
context               -  =  -  as-is       as-is
contiguous            -  -  *  as-is       job
core-spec             S  =  *  as-is       job
cores-per-socket      -  =  *  as-is       job
cpu-bind              -  =  -  -           bind
cpu-freq              -  =  -  as-is       as-is
cpus-per-gpu          -  =  *  cpus        cpus
cpus-per-task         c  =  *  cpus        cpus
deadline              -  =  -  as-is       job
debugger-test         -  -  -  -           void
delay-boot            -  =  -  as-is       job
dependency            d  =  -  as-is       job
disable-status        X  -  -  -           as-is
distribution          m  =  *  order       order
epilog                -  =  -  -           as-is
error                 e  =  -  log         log
exact                 -  -  -  -           as-is
exclude               x  =  -  as-is       job
exclusive             -  ?  *  as-is       as-is
export                -  =  -  env         env
export-file           -  =  -  env         -
external              -  -  -  void        -
external-launcher     -  ?  -  -           void
extra                 -  =  -  as-is       job
extra-node-info       B  =  *  as-is       job
get-user-env          -  ?  -  as-is       -
gid                   -  =  -  user        user
gpu-bind              -  =  *  bind        bind
gpu-freq              -  =  *  as-is       as-is
gpus                  G  =  *  gpus        gpus
gpus-per-node         -  =  *  gpus        gpus
gpus-per-socket       -  =  *  gpus        gpus
gpus-per-task         -  =  *  gpus        gpus
gres                  -  =  *  as-is       job
gres-flags            -  =  *  as-is       job
help                  h  -  -  help        help
het-group             -  =  -  -           components
hint                  -  =  *  as-is       job
hold                  H  -  -  as-is       job
ignore-pbs            -  -  -  as-is       -
immediate             I  ?  -  -           job
input                 i  =  -  input       input
interactive           -  -  -  -           pty
job-name              J  =  -  name        name
jobid                 -  =  -  -           step
kill-on-bad-exit      K  ?  -  -           agent
kill-on-invalid-dep   -  =  -  as-is       -
label                 l  -  -  -           label
licenses              L  =  -  as-is       job
mail-type             -  =  -  as-is       job
mail-user             -  =  -  as-is       job
mcs-label             -  =  -  as-is       job
mem                   -  =  *  mem         mem
mem-bind              -  =  *  bind        bind
mem-per-cpu           -  =  *  as-is       job
mem-per-gpu           -  =  *  as-is       job
mincpus               -  =  *  as-is       job
mpi                   -  =  -  -           as-is
msg-timeout           -  =  -  -           as-is
multi-prog            -  -  -  -           multi
network               -  =  *  as-is       as-is
nice                  -  ?  -  as-is       job
no-allocate           Z  -  -  -           void
no-kill               k  ?  -  lost        lost
no-requeue            -  -  -  requeue     -
nodefile              F  =  *  as-is       job
nodelist              w  =  *  as-is       job
nodes                 N  =  *  nodes       nodes
ntasks                n  =  *  ranks       ranks
ntasks-per-core       -  =  *  threads     threads
ntasks-per-gpu        -  =  *  ranks       ranks
ntasks-per-node       -  =  *  ranks       ranks
ntasks-per-socket     -  =  *  ranks       ranks
ntasks-per-tres       -  =  *  ranks       ranks
oom-kill-step         -  ?  -  as-is       as-is
open-mode             -  =  -  open-mode   open-mode
output                o  =  -  log         log
overcommit            O  -  *  overcommit  overcommit
overlap               -  ?  -  -           as-is
oversubscribe         s  -  *  as-is       job
pack-group            -  =  -  -           components
parsable              -  -  -  reads       -
partition             p  =  *  as-is       job
power                 -  =  *  as-is       job
prefer                -  =  -  as-is       job
preserve-env          E  -  -  -           step
priority              -  =  -  as-is       job
profile               -  =  -  as-is       as-is
prolog                -  =  -  -           as-is
propagate             -  ?  -  as-is       as-is
pty                   -  ?  -  -           pty
qos                   q  =  -  as-is       job
quiet                 Q  -  -  reads       as-is
quit-on-interrupt     -  -  -  -           as-is
reboot                -  -  -  as-is       job
relative              r  =  -  -           step
requeue               -  ?  -  requeue     -
reservation           -  =  -  as-is       job
resources             -  =  *  as-is       job
resv-ports            -  ?  *  as-is       as-is
segment               -  =  *  as-is       job
send-libs             -  ?  -  -           bcast
signal                -  =  -  signal      signal
slurmd-debug          -  =  -  -           as-is
sockets-per-node      -  =  *  as-is       job
spread-job            -  -  *  as-is       job
spread-segments       -  -  *  as-is       job
stepmgr               -  -  -  as-is       job
switches              -  =  *  as-is       job
task-epilog           -  =  -  -           prolog
task-prolog           -  =  -  -           prolog
tasks-per-node        -  =  *  ranks       ranks
test-only             -  -  -  test        test
thread-spec           -  =  *  as-is       job
threads               T  =  -  -           as-is
threads-per-core      -  =  *  as-is       job
time                  t  =  -  time        time
time-min              -  =  -  as-is       job
tmp                   -  =  *  as-is       job
treewidth             -  =  -  -           as-is
tres-bind             -  =  *  bind        bind
tres-per-task         -  =  *  tres        tres
uid                   -  =  -  user        user
unbuffered            u  -  -  -           as-is
usage                 -  -  -  help        help
use-min-nodes         -  -  *  as-is       job
verbose               v  -  -  as-is       as-is
version               V  -  -  help        help
wait                  W  =  -  wait        srun-wait
wait-all-nodes        -  =  -  as-is       -
wait-for-children     -  -  -  -           as-is
wckey                 -  =  -  as-is       job
whole                 -  -  -  -           as-is
wrap                  -  =  -  wrap        -
x11                   -  ?  -  -           display
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


def _read(line: str) -> Option:
    name, letter, value, component, sbatch, srun = line.split()
    letter, value = ("" if each == "-" else each for each in (letter, value))
    return Option(name, letter, value, component == "*", *(_ADVICE.get(word) for word in (sbatch, srun)))


SLURM_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {option.name: option for option in map(_read, _TABLE.strip().splitlines())}
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
