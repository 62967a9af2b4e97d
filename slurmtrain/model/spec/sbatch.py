"""The spec's section ``slurm``: the long options of sbatch, and which of them belong to slurmtrain.

Source: ``sbatch --help`` and the manual pages of Slurm 22.05 to 25.11.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.spec.kinds import Entries, Items, KeyPath, Report, Scalar, nearest, suggestion, type_name
from slurmtrain.model.spec.values import read_sbatch_value

# The options of all versions: the site's sbatch itself reports those that it lacks, and lists those of its plug-ins.
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

# Options that slurmtrain gives to the srun which starts the node agents.
_OWNED_OF_SRUN = {
    **OWNED,
    "kill-on-bad-exit": "agents decide what the end of one of them means",
    "label": "logs are kept for each rank",
    "multi-prog": "each node runs the same agent",
    "no-kill": "use a range of 'resources.nodes', or 'resources.spares'",
    "pty": "a batch job has no terminal",
}
# Keys of ``slurm`` that hold lists of options as they would be typed, which no table of options limits: plug-ins of a
# site, such as pyxis, add options of their own.
SBATCH, SRUN = "sbatch", "srun"
_LISTS = {SBATCH: OWNED, SRUN: _OWNED_OF_SRUN}
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_OPTION = re.compile(r"--([A-Za-z0-9][\w-]*)(?:=(.*))?")
_ALL = "; 'sbatch --help' lists all"
_ELSEWHERE = f"; one that a plug-in of your site adds goes into the list slurm.{SBATCH}, as it is typed"
# How similar an option must be to a known one to be a slip beyond doubt, and no option of a plug-in.
_SLIP = 0.85
# Returns the options that the site's own sbatch has, those of plug-ins included; none where there is no sbatch. It is
# given the option that is looked for.
ReadOptions = Callable[[str], frozenset[str]]


def check_sbatch_option(name: object) -> None:
    """Raise ValueError unless this can name an option that a spec may set (``-`` or ``_`` between words)."""
    if not isinstance(name, str):
        raise ValueError(f"expected the long name of an sbatch option, found {type_name(name)} ({name!r})")
    option = canonical_option(name)
    if option in OWNED:
        raise ValueError(f"slurmtrain sets this option itself: {OWNED[option]}")
    if not _NAME.fullmatch(option):
        raise ValueError(f"{name!r} cannot name an option of sbatch")


def unknown_options(slurm: Mapping[str, Any], read_site_options: ReadOptions) -> Iterator[tuple[str, str]]:
    """Entries of ``slurm`` that are no option of sbatch, each with a message.

    ``read_site_options`` is called only for those that no version of Slurm has by itself.
    """
    for entry in slurm:
        option = canonical_option(entry)
        if entry in _LISTS or option in OPTIONS:
            continue
        site = read_site_options(option)
        if option in site:
            continue
        near = suggestion(option, (OPTIONS | site) - OWNED.keys())
        if site:
            yield entry, f"this site's sbatch has no option --{option}{near or _ALL}"
        else:
            slip = nearest(option, OPTIONS - OWNED.keys(), _SLIP) is not None
            yield entry, f"sbatch has no option --{option}{near}{'' if slip else _ELSEWHERE}"


def unknown_srun_options(slurm: Mapping[str, Any], read_srun_options: ReadOptions) -> Iterator[str]:
    """What is wrong with options in the list ``srun``, as far as this machine's srun can tell.

    ``read_srun_options``: as :data:`ReadOptions`, for srun.
    """
    for option in slurm.get(SRUN) or ():
        name, _ = _split(option)
        site = read_srun_options(name)
        if site and name not in site:
            yield f"srun has no option --{name} here{suggestion(name, site - _OWNED_OF_SRUN.keys())}"


def runs_in_container(slurm: Mapping[str, Any]) -> bool:
    """Whether these options start the tasks in a container, whose files are not those of this machine."""
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
    return by_name | dict(_split(option) for option in slurm.get(SBATCH) or ())


def repeated_options(slurm: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of entries of ``slurm`` that are the same option of sbatch, whose last value would win silently."""
    first: dict[str, str] = {}
    listed = [option for option in slurm.get(SBATCH) or () if option is not None]
    for entry in (*(key for key in slurm if key not in _LISTS), *listed):
        name = _split(entry)[0] if entry.startswith("--") else canonical_option(entry)
        if first.setdefault(name, entry) != entry:
            yield first[name], entry


def _split(option: str) -> tuple[str, str | bool]:
    match = _OPTION.fullmatch(option)
    assert match is not None
    return match[1], True if match[2] is None else match[2]


def _read_option(owned: Mapping[str, str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        value = read_sbatch_value(value)
        match = _OPTION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            raise ValueError(f"expected an option such as '--container-image=...' or '--exclusive', found {value!r}")
        if match[1] in owned:
            raise ValueError(f"slurmtrain sets --{match[1]} itself: {owned[match[1]]}")
        return match[0]

    return parse


@dataclass(frozen=True, slots=True)
class SlurmValue:
    """The kind of a value in ``slurm``: that of an option or, under :data:`SBATCH` and :data:`SRUN`, a list of them."""

    text: str = "text, whole number, true or false; under sbatch and srun, a list of options"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if at[-1] not in _LISTS:
            return Scalar(self.text, read_sbatch_value).read(value, at, report)
        items = Items(Scalar("option", _read_option(_LISTS[at[-1]])), "list of options")
        return () if value is None else items.read(value, at, report)

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return list(value) if isinstance(value, tuple) else value


SLURM_OPTIONS = Entries(SlurmValue(), "mapping of sbatch options", check_sbatch_option)
