"""The section `slurm` of a spec, and the key `log`: every option of sbatch and srun, and what becomes of it.

An option is passed on, or the message says what to write instead. Source: slurm_opt.c and the manual pages of Slurm
22.05 to 25.11. A run differs from a script in that its job has a name of its own and one task a node, the node agent,
which starts the ranks: what a script says about tasks means that task. docs/reference/slurm-options.md is generated
from this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from slurmtrain.model.experiment.kinds import Entries, Items, KeyPath, Report, Scalar, nearest, suggestion, type_name
from slurmtrain.model.experiment.values import read_sbatch_value

# What becomes of an option, by the words in the table. An empty text: it is passed on, and has the same meaning as in a
# script.
_ADVICE = {
    "as-is": "",
    "job": "this option belongs to the whole job: write it under 'slurm'",
    "agent": "slurmtrain decides what to do when one of the tasks ends",
    "bcast": "srun starts Python, and Python needs the files around it: copy files in 'setup_node'",
    "bind": "it would bind the node agent and all ranks together: use 'resources.bind'",
    "clusters": "runs can only be followed on the cluster of this machine: submit on a machine of the other cluster",
    "components": "use 'resources.components'",
    "cpus": "use 'resources.cpus_per_proc'",
    "display": "a batch job has no display",
    "env": "use 'env'",
    "gpus": "use 'resources.gpus_per_node', also with a type: 'h100:4'",
    "help": "it would submit nothing; call 'sbatch --help' in a shell",
    "input": "jobs read nothing from standard input",
    "label": "logs are kept for each rank",
    "log": "logs are kept in the run directory: set 'log' for links elsewhere",
    "lost": "use a range of 'resources.nodes', or 'resources.spares'",
    "mem": "use 'resources.mem'",
    "multi": "each node runs the same agent",
    "name": "use 'name'",
    "nodes": "use 'resources.nodes'",
    "open-mode": "logs are always appended to",
    "order": "ranks are numbered node by node; 'resources.bind' places the ranks of a node",
    "overcommit": "each process has its own CPU cores: set their number with 'resources.cpus_per_proc'",
    "prolog": "it would run once per node, not for each rank: use 'setup_node'",
    "pty": "a batch job has no terminal",
    "ranks": "use 'resources.procs_per_node'",
    "reads": "slurmtrain reads the job's id from what sbatch prints",
    "requeue": "use 'requeue.enabled'",
    "signal": "set how long before the time limit the job is warned with 'requeue.lead'",
    "srun-wait": "leave it out: ranks that are still saving get the time that they need",
    "step": "the step uses the nodes and tasks of the job: use 'resources.nodes' and 'resources.procs_per_node'",
    "sweep": "use 'sweep', and its key 'parallel' to limit how many run at once",
    "test": "use 'slurmtrain render'",
    "threads": "there is one task per node: write 'threads-per-core: 1', or 'hint: nomultithread'",
    "time": "use 'resources.time'",
    "tres": "use 'resources.gpus_per_node' and 'resources.cpus_per_proc', and 'gres' for other resources of each node",
    "user": "a run belongs to the user who submits it",
    "void": "slurmtrain would not run in the job",
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


_ROWS = [line.split() for line in _TABLE.strip().splitlines()]
_EACH = [
    Option(name, letter, value.strip("-"), component == "*", _ADVICE.get(sbatch), _ADVICE.get(srun))
    for value, component, sbatch, srun, *names in _ROWS
    for name, _, letter in (each.partition(":") for each in names)
]
SLURM_OPTIONS: Mapping[str, Option] = MappingProxyType(
    {each.name: each for each in sorted(_EACH, key=attrgetter("name"))}
)


_GPU_RESOURCE = re.compile(r"(?:gres[/:])?gpu(?:[:=](?P<type>[A-Za-z][\w.+-]*))?(?:[:=](?P<count>\d+))?", re.ASCII)
_TYPED_COUNT = re.compile(r"(?:(?P<type>[A-Za-z][\w.+-]*)[:=])?(?P<count>\d+)", re.ASCII)
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
    if name in ("gres", "gpus", "gpus-per-node"):
        return _advice_on_gpus(name, text, nodes if name == "gpus" else 1) or advice
    if name in BINDINGS:
        kinds = [kind.partition(":")[0] for kind in text.lower().split(",")]
        bind = next((_BIND[kind] for kind in kinds if kind in _BIND), None)
        if UNBOUND.issuperset(kinds):
            return ""
        return f"{advice[:-1]}: {bind}'" if bind else advice
    return advice


def _advice_on_gpus(name: str, value: str, nodes: int | None) -> str:
    """What to write instead of GPUs as generic resources, or of a number of them on so many ``nodes``; else empty."""
    items = [item.strip() for item in value.split(",")] if name == "gres" else [value.strip()]
    pattern = _GPU_RESOURCE if name == "gres" else _TYPED_COUNT
    gpus = [match for item in items if (match := pattern.fullmatch(item))]
    rest = ",".join(item for item in items if not pattern.fullmatch(item))
    kept = f", beside 'gres: {rest}'" if rest else ""
    if len(gpus) > 1:
        return f"the number of ranks depends on the GPUs: use 'resources.gpus_per_node' for one type{kept}"
    if not gpus or not nodes or int(gpus[0]["count"] or 1) % nodes:
        return ""
    count = int(gpus[0]["count"] or 1) // nodes
    typed = f"{gpus[0]['type']}:{count}" if gpus[0]["type"] else count
    return f"the number of ranks depends on the GPUs: use 'resources.gpus_per_node: {typed}'{kept}"


# sbatch(1), filename pattern: a number before the letter is the width of a zero-padded number.
_LOG_PATTERN = re.compile(r"%(\d{0,2})(.?)", re.DOTALL)
LETTERS = "xjAauNnt"
_LOG_EXAMPLE = "logs/%x-%j.out"


def check_log(pattern: str) -> None:
    """Raise ValueError unless this is a path that no two jobs have in common, with what is known of a job."""
    if re.search(r"[\x00-\x1f\x7f]", pattern):
        raise ValueError("a control character cannot be used here")
    if "\\" in pattern:
        raise ValueError("slurmtrain does not support backslashes here: leave the backslash out")
    letters = {match[2] for match in _LOG_PATTERN.finditer(pattern)}
    strange = sorted(letters - {*LETTERS, "%"})
    if strange:
        letters_here = ", ".join(f"%{letter}" for letter in LETTERS)
        raise ValueError(f"%{strange[0]} is not supported here; use {letters_here}, or %% for a percent sign")
    if pattern.endswith("/"):
        raise ValueError(f"expected the path of a file, such as {_LOG_EXAMPLE}, found {pattern!r}")
    if "j" not in letters and not {"A", "a"} <= letters:
        stem, dot, suffix = pattern.rpartition(".")
        name = f"{stem}-%j.{suffix}" if dot and stem and "/" not in suffix else f"{pattern}-%j"
        raise ValueError(f"{pattern!r} is the same for every run because it lacks the job's id; write {name}")


def fill_log(pattern: str, facts: Mapping[str, str]) -> str:
    """The path that a ``pattern`` stands for; ``facts``: what its letters do."""

    def fill(match: re.Match[str]) -> str:
        fact = "%" if match[2] == "%" else facts[match[2]]
        return fact.zfill(int(match[1])) if match[1] and fact.isdecimal() else fact

    return _LOG_PATTERN.sub(fill, pattern)


# The options of all versions: the site's sbatch itself reports the options that it lacks, and lists its plug-ins'
# options.
OPTIONS = frozenset(name for name, option in SLURM_OPTIONS.items() if option.sbatch is not None)
# The options of these that are passed on.
PASSED = frozenset(name for name in OPTIONS if not SLURM_OPTIONS[name].sbatch)
# Keys of ``slurm`` that hold lists of options as they would be typed, which no table of options limits: plug-ins of a
# site, such as pyxis, add options of their own.
SBATCH, SRUN = "sbatch", "srun"
_LISTS = (SBATCH, SRUN)
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_LONG = re.compile(r"--([A-Za-z0-9][\w-]*)(?:=(.*))?", re.ASCII)
_LONG_AND_VALUE = re.compile(r"--([A-Za-z0-9][\w-]*)\s+(\S.*)", re.ASCII)
_SHORT = re.compile(r"-([A-Za-z])\s*(.*)", re.ASCII)
_LETTERS = {
    program: {each.letter: each for each in SLURM_OPTIONS.values() if each.letter and each.advice(program) is not None}
    for program in _LISTS
}
_ALL = "; 'sbatch --help' lists all"
_ELSEWHERE = f"; an option that a plug-in of your cluster adds goes into the list slurm.{SBATCH}: {{0!r}}"
# How similar an option must be to a known one to be a slip beyond doubt, and no option of a plug-in.
_SLIP = 0.85
# Returns the options that the site's own sbatch has, options of plug-ins included; none where there is no sbatch. It is
# given the option that is looked for.
ReadOptions = Callable[[str], frozenset[str]]


def check_sbatch_option(name: object) -> None:
    """Raise ValueError unless this can name an option (``-`` or ``_`` between words)."""
    if not isinstance(name, str):
        raise ValueError(f"expected the long name of an sbatch option, found {type_name(name)} ({name!r})")
    if not _NAME.fullmatch(canonical_option(name)):
        raise ValueError(f"{name!r} cannot be the name of an sbatch option")


def refused_options(
    slurm: Mapping[str, Any], read_site_options: ReadOptions, nodes: int | None
) -> Iterator[tuple[KeyPath, str]]:
    """Entries of ``slurm`` that are not passed on, by their keys in it, each with a message.

    Only what a user writes is checked: plans of earlier versions, and of other sites, must stay readable.

    Args:
        slurm: The section.
        read_site_options: Called only for options that no version of Slurm has by itself.
        nodes: How many nodes the job has; None: that is not known.
    """
    for entry, value in slurm.items():
        option = canonical_option(entry)
        if entry in _LISTS or value is None or value is False:
            continue
        advice = advice_on(SBATCH, option, value, nodes)
        if advice:
            yield (entry,), f"--{option} is not passed on: {advice}"
        elif advice is None and (unknown := _describe_unknown(option, value, read_site_options)):
            yield (entry,), unknown
    for program in _LISTS:
        for index, typed in enumerate(slurm.get(program) or ()):
            if typed is not None and (problem := _listed_problem(program, typed, nodes)):
                yield (program, str(index)), problem


def _listed_problem(program: str, typed: str, nodes: int | None) -> str:
    """Why an option of the list for a ``program`` is not passed on; empty if it is."""
    name, value = _name_and_value(typed)
    option = canonical_option(name)
    advice = advice_on(program, option, value, nodes)
    if advice:
        return f"--{option} is not passed on: {advice}"
    if advice is None and option in SLURM_OPTIONS:
        return f"--{option} is not an option of {program}: only {SRUN if program == SBATCH else SBATCH} has it"
    if advice is None:
        # getopt_long(3) takes the beginning of a name for the whole.
        whole = next((each for each in sorted(SLURM_OPTIONS) if each.startswith(option)), None)
        return f"--{name} is not an option of {program}: did you mean '--{whole}'?" if whole else ""
    if value is True and SLURM_OPTIONS[option].takes_value == "=":
        return f"--{option} needs a value: write '--{option}=...'"
    return ""


def _describe_unknown(option: str, value: object, read_site_options: ReadOptions) -> str:
    """The message about an option that no version of sbatch has; empty if this site's has it."""
    of_srun = SLURM_OPTIONS.get(option)
    if of_srun is not None:
        typed = f"--{option}" if value is True else f"--{option}={value}"
        cure = of_srun.srun or f"srun has it: write {typed!r} into the list slurm.{SRUN}"
        return f"sbatch has no option --{option}; {cure}"
    if option in _LETTERS[SBATCH]:
        return f"-{option} is the short form; did you mean '{_LETTERS[SBATCH][option].name}'?"
    site = read_site_options(option)
    if option in site:
        return ""
    near = suggestion(option, PASSED | (site - OPTIONS))
    if site:
        return f"this site's sbatch has no option --{option}{near or _ALL}"
    typed = f"--{option}" if value is True else f"--{option}={value}"
    elsewhere = "" if nearest(option, PASSED, _SLIP) is not None else _ELSEWHERE.format(typed)
    return f"sbatch has no option --{option}{near}{elsewhere}"


def unknown_srun_options(slurm: Mapping[str, Any], read_srun_options: ReadOptions) -> Iterator[str]:
    """What is wrong with options in the list ``srun``, as far as this machine's srun can tell.

    ``read_srun_options``: as :data:`ReadOptions`, for srun.
    """
    for option in slurm.get(SRUN) or ():
        name, _ = _name_and_value(option)
        if name in SLURM_OPTIONS:
            continue
        site = read_srun_options(name)
        if site and name not in site:
            refused = {each for each, row in SLURM_OPTIONS.items() if row.srun}
            yield f"srun has no option --{name} here{suggestion(name, site - refused)}"


def runs_in_container(slurm: Mapping[str, Any]) -> bool:
    """Whether these options start the tasks in a container, whose files differ from this machine's."""
    return any(
        name.startswith("container") for name in (*named_options(slurm), *named_options({SBATCH: slurm.get(SRUN)}))
    )


def canonical_option(name: str) -> str:
    """The name as sbatch writes it: dashes, no leading ones."""
    return name.replace("_", "-").lstrip("-")


def named_options(slurm: Mapping[str, Any]) -> dict[str, Any]:
    """The options that ``slurm`` sets, by the names that sbatch has for them; the value of one without is True."""
    by_name = {
        canonical_option(name): value
        for name, value in slurm.items()
        if name not in _LISTS and value is not None and value is not False
    }
    return by_name | dict(_name_and_value(option) for option in slurm.get(SBATCH) or () if option is not None)


def is_singleton(slurm: Mapping[str, Any]) -> bool:
    """Whether only one run of the name may be active at a time (``--dependency=singleton``)."""
    return "singleton" in re.split("[,?]", str(named_options(slurm).get("dependency", "")))


def repeated_options(slurm: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of entries of ``slurm`` that are the same option of sbatch, whose last value would win silently."""
    first: dict[str, str] = {}
    listed = [option for option in slurm.get(SBATCH) or () if option is not None]
    named = [key for key, value in slurm.items() if key not in _LISTS and value is not None and value is not False]
    for entry in (*named, *listed):
        name = _name_and_value(entry)[0] if entry.startswith("--") else canonical_option(entry)
        # The same entry twice, as in two lists of a merged spec, contradicts nothing.
        if first.setdefault(name, entry) != entry:
            yield first[name], entry


def _name_and_value(option: str) -> tuple[str, str | bool]:
    match = _LONG.fullmatch(option)
    assert match is not None
    return match[1], True if match[2] is None else match[2]


def long_option(program: str, typed: object) -> str:
    """An option as it is typed, also by its letter (``-p spot``, ``-pspot``), with its long name. Raises ValueError.

    ``program``: :data:`SBATCH` or :data:`SRUN`.
    """
    typed = read_sbatch_value(typed)
    text = typed.strip() if isinstance(typed, str) else ""
    if _LONG.fullmatch(text):
        return text
    apart, short = _LONG_AND_VALUE.fullmatch(text), _SHORT.fullmatch(text)
    if apart is not None and apart[1] in SLURM_OPTIONS and SLURM_OPTIONS[apart[1]].takes_value == "=":
        return f"--{apart[1]}={_unquoted(apart[2])}"
    if short is None:
        raise ValueError(
            f"expected an option such as '--container-image=...', '--exclusive' or '-p spot', found {typed!r}"
        )
    option = _LETTERS[program].get(short[1])
    if option is None:
        raise ValueError(f"{program} has no option -{short[1]}")
    # A blank ends an option whose value may be missing (getopt(3)).
    if not short[2]:
        return f"--{option.name}"
    if not option.takes_value or short[2].startswith("="):
        raise ValueError(
            f"{program} spells {typed!r} differently: write '--{option.name}{'=...' if option.takes_value else ''}'"
        )
    return f"--{option.name}={_unquoted(short[2])}"


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


@dataclass(frozen=True, slots=True)
class SlurmValue:
    """The kind of a value in ``slurm``: an option's or, under :data:`SBATCH` and :data:`SRUN`, a list of options."""

    text: str = "text, number, true or false; under sbatch and srun, a list of options"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if at[-1] not in _LISTS:
            return Scalar(self.text, read_sbatch_value, is_text=True).read(value, at, report)
        items = Items(Scalar("option", lambda typed: long_option(at[-1], typed)), "list of options")
        return () if value is None else items.read(value, at, report)

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return list(value) if isinstance(value, tuple) else value


SLURM_SECTION = Entries(SlurmValue(), "mapping of sbatch options", check_sbatch_option)
