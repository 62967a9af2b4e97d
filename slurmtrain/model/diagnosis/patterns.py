"""What lines of logs say of a failure: patterns, their causes, and which of several is the root: pure.

The texts are those of torch's c10d and its NCCL and Gloo backends, NCCL, NVIDIA's driver, the kernel and Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo

# What a pattern is to a failure: its root; what follows because something else died first; a last word that confirms
# how it ended; or something worth knowing that ends nothing.
ROOT, CASCADE, CONFIRMATION, NOTE = "root", "cascade", "confirmation", "note"

# What of a line is looked at, on each side of what makes it worth a look. Some logs hold lines of megabytes.
_REACH = 2000
_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A line that means something. ``needles``: texts one of which such a line holds, for a quick first look.

    ``cause`` and ``fix`` are phrases; ``{1}`` and the like stand for groups of the expression.
    """

    name: str
    role: str
    needles: tuple[str, ...]
    expression: str
    cause: str
    fix: str

    @property
    def regex(self) -> re.Pattern[str]:
        """The expression, compiled (re keeps those)."""
        return re.compile(self.expression)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A line that a pattern has found, or what a journal says to the same effect.

    ``origin``: which log or journal. ``rank`` and ``host``: whose, where known. ``at``: seconds since 1970, or None;
    ``exact``: whether the line itself says so, and not only the end of its process. ``line``: its place in its log, as
    an order. ``groups``: of the expression.
    """

    name: str
    role: str
    cause: str
    fix: str
    text: str
    origin: str
    rank: int | None = None
    host: str = ""
    at: float | None = None
    exact: bool = False
    line: int = 0
    groups: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """All hits of one pattern: the first of them, how many there were, and on which ranks."""

    first: Hit
    count: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Laggard:
    """The ranks that others waited for in a collective, and why they are named."""

    ranks: Sequence[int]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a run's logs amount to. ``root``: None where nothing that was found is a root.

    ``others``: in order. ``laggard``: whom others waited for. ``ordered``: whether the order is that of time; else it
    is that of files and their lines.
    """

    root: PatternMatch | None
    others: Sequence[PatternMatch] = ()
    laggard: Laggard | None = None
    ordered: bool = True


# --- Xid ----------------------------------------------------------------------------------------------------------

_PROGRAM = "the program"
# What the driver's Xid numbers stand for, by NVIDIA's catalogue: whose fault it is, and in words.
XIDS: Mapping[int, tuple[str, str]] = {
    13: (_PROGRAM, "an exception in a kernel, often an index out of bounds"),
    31: (_PROGRAM, "a memory access to a wrong address"),
    43: (_PROGRAM, "a program's own error stopped its work"),
    45: ("another error", "the driver cleaned up after an earlier error"),
    48: ("the GPU", "an uncorrected memory error (double bit ECC)"),
    63: ("the GPU", "a row of memory was remapped"),
    64: ("the GPU", "a row of memory could not be remapped"),
    74: ("the GPU", "an NVLink error"),
    79: ("the GPU", "the GPU has fallen off the bus"),
    92: ("the GPU", "many corrected memory errors"),
    94: (_PROGRAM, "a contained memory error, which ended one program"),
    95: ("the GPU", "an uncontained memory error"),
    119: ("the GPU", "the GPU's system processor does not answer"),
    120: ("the GPU", "the GPU's system processor failed"),
}


def xid(number: int, where: str = "") -> tuple[str, str, str]:
    """Role, cause and fix of an Xid number; ``where``: the GPU's address on its bus."""
    whose, words = XIDS.get(number, ("not known", "see NVIDIA's catalogue of Xid errors"))
    at = f" of GPU {where}" if where else ""
    cause = f"Xid {number}{at}: {words}"
    if whose == "the GPU":
        return ROOT, cause, "exclude the node (slurm.exclude) and have its administrators look at the GPU"
    if whose == _PROGRAM:
        return ROOT, cause, "run it with CUDA_LAUNCH_BLOCKING=1 and look at the step that failed; the GPU is sound"
    return (CASCADE if whose == "another error" else ROOT), cause, "look at the other Xid lines of that node"


# --- patterns -----------------------------------------------------------------------------------------------------

_PEER = "look at the rank that failed first; the node it ran on may have died"
_IFNAME = "set network.interface to an interface that the nodes have, or leave it at auto"
_SHM = "/dev/shm is full"  # noqa: S108 (words)
_SHM_FIX = "use fewer data loader workers, or have /dev/shm made larger"
_FABRIC = "have the fabric looked at (link, GID, MTU); exclude the node if it is always the same one"

PATTERNS: tuple[Pattern, ...] = (
    # Collectives that wait, and who they waited for.
    Pattern("nccl-watchdog", CASCADE, ("Watchdog caught collective",),
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)",
            "collective {1} ({2}) was not done in time: some rank did not come to it",
            "look at the rank that is behind, or silent"),
    Pattern("nccl-progress", CASCADE, ("last enqueued NCCL work",),
            r"last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)",
            "had completed collective {2} of {1} when it gave up waiting", "compare over ranks"),
    # Meeting.
    Pattern("store-timeout", ROOT, ("client socket has timed out",),
            r"client socket has timed out after .{0,80}?connect to \((.+?), (\d+)\)",
            "nobody answers at {1}, port {2}, where the ranks meet",
            "see whether rank 0 has started, and that no firewall keeps nodes apart (`slurmtrain preflight`)"),
    Pattern("store-name", ROOT, ("cannot be retrieved (gai error",),
            r"network addresses of \((.+?), \d+\) cannot be retrieved \(gai error: (-?\d+)",
            "the name {1} cannot be looked up (gai error {2})",
            "use an address without brackets, or have the name put into DNS or /etc/hosts of the nodes"),
    Pattern("no-route", ROOT, ("No route to host", "errno: 113"), r"No route to host|errno: 113",
            "an address of another network: no way leads there", _IFNAME),
    Pattern("port-taken", ROOT, ("EADDRINUSE", "errno: 98", "server socket has failed to listen"),
            r"EADDRINUSE|errno: 98\b|server socket has failed to listen",
            "the port is in use", "let slurmtrain choose the port (no MASTER_PORT in env), or end what holds it"),
    Pattern("nccl-connect", ROOT, ("exceeded error retry",),
            r"connect to (\S+) returned (Connection refused|.*?timed out), exceeded error retry",
            "NCCL could not connect to {1}: {2}", f"{_IFNAME}; see whether a firewall or a dead peer is behind it"),
    Pattern("nccl-socket", ROOT, ("socketStartConnect", "socketPollConnect", "ncclOsSocket"),
            r"socket(?:Start|Poll)Connect|ncclOsSocket\w*Connect",
            "NCCL could not connect to another rank", f"{_IFNAME}; see whether a firewall or a dead peer is behind it"),
    Pattern("nccl-no-interface", ROOT, ("no socket interface found", "is neither AF_INET"),
            r"Bootstrap : no socket interface found|family \d+ is neither",
            "NCCL_SOCKET_IFNAME names no interface of this node", _IFNAME),
    Pattern("peer-closed", CASCADE,
            ("Connection closed by remote peer", "ncclRemoteError", "Connection closed by peer",
             "Connection reset by peer", "Broken pipe"),
            r"Connection closed by (?:remote )?peer|ncclRemoteError|Connection reset by peer|Broken pipe",
            "another rank had gone", _PEER),
    Pattern("gloo-connect", ROOT, ("Gloo connectFullMesh failed", "Unable to resolve hostname to a"),
            r"Gloo connectFullMesh failed|Unable to resolve hostname to a \(local\) address",
            "Gloo could not connect the ranks: a node's name leads to the wrong interface, or to loopback", _IFNAME),
    Pattern("gloo-interface", ROOT, ("Unable to find address for:",), r"Unable to find address for: (\S+)",
            "Gloo was told to use {1}, which is no interface of this node", _IFNAME),
    Pattern("slow-reverse-dns", NOTE, ("hostname of the client socket cannot be retrieved",),
            r"The hostname of the client socket cannot be retrieved",
            "reverse look-ups fail: each connection may wait ten seconds for one",
            "have the nodes' addresses put into DNS or /etc/hosts"),
    Pattern("rendezvous", ROOT, ("RendezvousClosedError", "no heartbeat", "Detected dead node"),
            r"RendezvousClosedError|no heartbeat|Detected dead node",
            "an agent fell silent: it died, or clocks are more than 15 s apart",
            "look at the nodes' clocks (`slurmtrain preflight`), and at the node that fell silent"),
    # Versions and devices.
    Pattern("nccl-versions", ROOT, ("Mismatched NCCL version",), r"Mismatched NCCL version detected",
            "nodes have different versions of NCCL", "use one environment on all nodes"),
    Pattern("nccl-duplicate-gpu", ROOT, ("Duplicate GPU detected",), r"Duplicate GPU detected : rank (\d+)",
            "two ranks use one GPU (rank {1} is one of them)",
            "use cuda:LOCAL_RANK, and set no CUDA_VISIBLE_DEVICES in env"),
    Pattern("ib-retry", ROOT, ("Got completion from peer", "vendor err", "vendor_err"),
            r"Got completion from peer .*status=12|vendor.err.?129",
            "InfiniBand gave up after its retries", _FABRIC),
    Pattern("ib-connect", ROOT, ("ibv_modify_qp failed",),
            r"ibv_modify_qp failed with error (Network is unreachable|Connection timed out)",
            "InfiniBand could not set up a connection: {1}",
            "see which HCA, GID and RoCE route it takes (network.profile), and leave NCCL_IB_GID_INDEX out"),
    Pattern("ib-memlock", ROOT, ("ibv_reg_mr", "ibv_create_cq"), r"ibv_(?:reg_mr|create_cq)\S* failed",
            "memory could not be locked for RDMA",
            "an administrator lifts the limit of the nodes (`ulimit -l`, memlock)"),
    Pattern("ib-fatal", ROOT, ("async fatal event",), r"NET/IB : .*async fatal event",
            "the network card has failed", "exclude the node (slurm.exclude) and tell its administrators"),
    Pattern("nccl-sockets", NOTE, ("NET/Socket", "Using network Socket"), r"Using network Socket|NET/Socket : Using",
            "NCCL goes over TCP sockets; where the nodes have InfiniBand or RoCE that is slow",
            "set network.profile to the kind of network that it is"),
    Pattern("xid", ROOT, ("NVRM: Xid",), r"NVRM: Xid \(PCI:([^)]+)\): (\d+)", "Xid {2} of GPU {1}", ""),
    Pattern("gpu-ecc", ROOT, ("uncorrectable ECC error",), r"uncorrectable ECC error encountered",
            "a GPU's memory is faulty", "exclude the node (slurm.exclude) and tell its administrators"),
    Pattern("cuda-assert", ROOT, ("device-side assert triggered",), r"device-side assert triggered",
            "the program's own error on the GPU, often a label or an index out of range",
            "run it with CUDA_LAUNCH_BLOCKING=1 to see where"),
    # Memory and disks.
    Pattern("cuda-oom", ROOT, ("CUDA out of memory", "OutOfMemoryError", "HIP out of memory"),
            r"(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
            "GPU memory is full",
            "use smaller batches, or shard more; look for processes that earlier jobs left there (`nvidia-smi`)"),
    Pattern("host-oom", ROOT, ("oom_kill", "oom-kill", "Out of memory: Killed process"),
            r"[Dd]etected \d+ oom[_-]kill events? in|oom-kill|Out of memory: Killed process",
            "memory of the node, or of the job's share, is full: the kernel killed a process",
            "raise resources.mem, or use less (data loader workers take a share each)"),
    Pattern("shm-bus", ROOT, ("killed by signal: Bus error", "insufficient shared memory"),
            r"killed by signal: Bus error|insufficient shared memory",
            _SHM, _SHM_FIX),
    Pattern("disk-full", ROOT, ("No space left on device",), r"No space left on device(?:: '([^']+)')?",
            "a file system is full", "make room"),
    Pattern("efa-memory", ROOT, ("Cannot allocate memory",), r"OSError.*Cannot allocate memory",
            "memory for a new process could not be had; EFA keeps huge pages that a fork would need twice",
            "set FI_EFA_USE_HUGE_PAGE=0 in env where EFA is used, else raise resources.mem"),
    # Slurm.
    Pattern("munge-clock", ROOT, ("Munge decode failed", "out of sync clocks"),
            r"Munge decode failed: (?:Rewound|Expired) credential|out of sync clocks",
            "a node's clock is wrong: Slurm refuses what it says", "exclude the node and have its clock put right"),
    Pattern("slurm-auth", ROOT, ("Protocol authentication error", "Zero Bytes were transmitted"),
            r"Protocol authentication error|Zero Bytes were transmitted",
            "Slurm's daemons do not trust each other: munge's key or daemon, or a clock",
            "tell the administrators; exclude the node"),
    Pattern("stale-job", ROOT, ("Unable to confirm allocation",), r"Unable to confirm allocation for job",
            "a SLURM_JOB_ID of another job is in the environment", "submit from a shell that is in no job"),
    Pattern("no-such-nodes", ROOT, ("Requested node configuration",), r"Requested node configuration is not available",
            "no node of the partition has what was asked for",
            "ask for less per node in resources, or name another slurm.partition"),
    Pattern("gres", ROOT, ("Invalid generic resource",), r"Invalid generic resource \(gres\)",
            "the partition has no such GPUs", "see `sinfo -o '%P %G'`; change resources.gpus_per_node or slurm.gres"),
    Pattern("slurm-names", ROOT, ("Invalid account", "Invalid qos", "Invalid partition", "invalid partition specified"),
            r"(?i:invalid (account|qos|partition))",
            "Slurm does not know this {1}, or you may not use it",
            "see `sacctmgr show assoc user=$USER`; change slurm.{1}"),
    Pattern("step", ROOT, ("Unable to create step for job",), r"Unable to create step for job",
            "srun got no room in its own job",
            "do not ask for more CPUs in a task than the job has; use srun --overlap"),
    Pattern("slurm-busy", ROOT, ("Job credential expired", "Socket timed out on send/recv"),
            r"Job credential expired|Socket timed out on send/recv",
            "slurmctld was too busy, or a clock is wrong", "try again; look at the nodes' clocks"),
    Pattern("slurm-reason", CONFIRMATION, ("DUE TO ",),
            r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE|TASK FAILURE)",
            "Slurm ended it: {1}", ""),
    # The environment.
    Pattern("obsolete", NOTE, ("is deprecated; use TORCH_NCCL",), r"(\w+) is deprecated; use (TORCH_NCCL\w*)",
            "{1} has no effect", "leave it out, or set {2}"),
    Pattern("import", ROOT, ("ModuleNotFoundError", "ImportError"),
            r"ModuleNotFoundError: No module named '?([\w.]+)|ImportError: .*\.so",
            "the environment on the node is not the one of the login node",
            "activate it in setup, or put it where all nodes see it"),
)  # fmt: skip

# What a dead peer causes too.
_DOUBTFUL = frozenset({"store-timeout", "nccl-connect", "nccl-socket", "rendezvous", "gloo-connect", "ib-retry"})
# Patterns that stand for several causes.
_SEVERAL = frozenset({"xid", "disk-full", "slurm-reason", "evidence"})
_TASK = "TASK FAILURE"
_REASON_FIX = {
    "TIME LIMIT": "ask for more in resources.time, or let it be put back (requeue.enabled)",
    "PREEMPTION": "nothing: it is put back (`slurmtrain doctor SPEC` says how)",
    "NODE FAILURE": "nothing, unless it is always the same node: then exclude it",
    "JOB REQUEUE": "nothing: it is put back",
    _TASK: "look at the task that failed",
}
# A line that advises, and tells of nothing that has happened.
_ADVICE = re.compile(
    r"^\W*(?:\S+ ){0,2}?(?:hint|note|tip|advice)\s*:|^\W*(?:if you|consider|please|to (?:avoid|fix|debug)|try |you may|"
    r"for (?:more|debugging))\b|(?:can|may|might) help\b",
    re.IGNORECASE,
)


def is_advice(line: str) -> bool:
    """Whether a line only advises: such lines name errors that have not happened."""
    return _ADVICE.search(_bare(line)) is not None


# A line of a program, as tracebacks quote them: it names errors that it raises, catches or looks for.
_CODE = re.compile(r"^\s*(?:(?:raise|except|elif|if|assert|return)\b|print\(|#)")


def is_code(line: str) -> bool:
    """Whether a line quotes a program's source, and does not say that anything has happened."""
    return _CODE.search(_bare(line)) is not None


_PREFIX = re.compile(r"^(?:\[[^\]]*\]:?\s*|\d{4}-\d\d-\d\d[T ]\S+\s*|[A-Z]+:?\s+(?=[A-Z]))+")


def _bare(line: str) -> str:
    """A line without what loggers put before it."""
    return _PREFIX.sub("", line)


def find(text: str, limit: int = 20) -> Iterator[tuple[int, Pattern, re.Match[str], str]]:
    """(place, pattern, match, line) of what the patterns find in a log, of each pattern the first and last ones.

    ``place``: where the line begins. No more than ``limit`` lines of a pattern at each end of the text: a failing
    loop may write the same for hours. Lines are cut to what is near.
    """
    for pattern in PATTERNS:
        places = _places(text, pattern.needles)
        chosen = places if len(places) <= 2 * limit else [*places[:limit], *places[-limit:]]
        for begin, needle in chosen:
            end = text.find("\n", needle, needle + _REACH)
            line = text[max(begin, needle - _REACH) : end if end >= 0 else needle + _REACH].rstrip("\r")
            match = pattern.regex.search(line)
            if match is not None and not is_advice(line) and not is_code(line):
                yield begin, pattern, match, line


def _places(text: str, needles: Iterable[str]) -> list[tuple[int, int]]:
    """(beginning of the line, place of the needle), once for each line that holds one, in order."""
    found: dict[int, int] = {}
    for needle in needles:
        at = text.find(needle)
        while at >= 0:
            found.setdefault(text.rfind("\n", 0, at) + 1, at)
            end = text.find("\n", at)
            at = text.find(needle, end) if end >= 0 else -1
    return sorted(found.items())


def hit(pattern: Pattern, match: re.Match[str], **about: object) -> Hit:
    """What a match means, with ``about`` as fields of the hit."""
    groups = [group or "" for group in match.groups()]
    if pattern.name == "slurm-names":
        groups = [groups[0].lower()]
    role, cause, fix = pattern.role, _filled(pattern.cause, groups), _filled(pattern.fix, groups)
    if pattern.name == "xid":
        role, cause, fix = xid(int(groups[1]), groups[0])
    elif pattern.name == "slurm-reason":
        fix = _REASON_FIX[groups[0]]
    elif pattern.name == "disk-full":
        cause, fix = _full(match.string, groups[0])
    made = Hit(name=pattern.name, role=role, cause=cause, fix=fix, text="", origin="", groups=tuple(groups))
    return replace(made, **about)  # type: ignore[arg-type]


def _filled(text: str, groups: Sequence[str]) -> str:
    for number, group in enumerate(groups, 1):
        text = text.replace(f"{{{number}}}", group)
    return text


def _full(line: str, path: str) -> tuple[str, str]:
    """Which file system is full, as far as the line says, and what to do."""
    where = path or next(iter(re.findall(r"/[\w./-]+", line)), "")
    if "/dev/shm" in where or "shm" in line:  # noqa: S108 (a name, no file of ours)
        return _SHM, _SHM_FIX
    if where.startswith(("/tmp", "/var/tmp", "/scratch")):  # noqa: S108
        return f"the file system of {where} is full", "make room there, or set TMPDIR to where there is some"
    at = f" of {where}" if where else ""
    return (
        f"the file system{at} is full",
        "make room, or see your quota; checkpoint.quota bounds a run",
    )


# --- time ---------------------------------------------------------------------------------------------------------

_ISO = re.compile(r"(?<!\d)(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?(?![\d:])")
# glog's, of torch: severity, month (of one or two digits) and day, time.
_GLOG = re.compile(r"(?:^|[\[\s:])[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")


def time_of(line: str, near: float, zone: tzinfo = UTC) -> float | None:
    """When a line was written, in seconds since 1970, by what it says itself; None where it does not.

    ``near``: about when that was, by which lines without a year get one. ``zone``: of lines that name none.
    """
    try:
        if found := _ISO.search(line[:_REACH]):
            return _iso(found, zone)
        if found := _GLOG.search(line[:_REACH]):
            return _glog(found, near, zone)
    except (ValueError, OverflowError):  # a thirteenth month is no time
        return None
    return None


def _iso(found: re.Match[str], zone: tzinfo) -> float:
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    fraction = float(f"0.{found[7] or 0}")
    given = found[8]
    if given == "Z":
        zone = UTC
    elif given:
        zone = datetime.strptime(given, "%z").tzinfo or zone
    return datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() + fraction


def _glog(found: re.Match[str], near: float, zone: tzinfo) -> float:
    month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
    about = datetime.fromtimestamp(near, zone)
    years = (about - _ONE_DAY).year, (about + _ONE_DAY).year
    times = [datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp() for year in years]
    return min(times, key=lambda time: abs(time - near)) + float(f"0.{found[6]}")


_RANK = re.compile(r"\[rank(\d+)\]|\bRank (\d+)\]")


def rank_of(line: str) -> int | None:
    """The rank that a line of torch's names as its writer."""
    found = _RANK.search(line[:_REACH])
    return int(found[1] or found[2]) if found else None


# --- judging ------------------------------------------------------------------------------------------------------


def diagnose(hits: Sequence[Hit], ranks: Iterable[int] = ()) -> Diagnosis:
    """The root among these hits, and all others in order. ``ranks``: all that the attempt had.

    The earliest root wins; what has no time comes after what has one. Where there is no root, the last word of Slurm
    stands in for it, if it says why.
    """
    ordered = sorted(hits, key=_order)
    found = _grouped(ordered)
    roots = [one for one in found if one.first.role == ROOT]
    last_words = [one for one in found if one.first.role == CONFIRMATION and _TASK not in one.first.groups]
    candidates = _certain(roots) or last_words
    root = candidates[0] if candidates else None
    origins = {one.first.origin for one in candidates}
    timed = len(origins) < 2 or all(one.first.at is not None for one in candidates)
    others = [one for one in found if one is not root]
    return Diagnosis(root=root, others=others, laggard=laggard(hits, ranks), ordered=timed)


def _certain(roots: Sequence[PatternMatch]) -> Sequence[PatternMatch]:
    """Roots, without those that another one explains: one that may have come from a rank's death.

    Such a one is a root by itself only where it came before all others, as far as their lines say when they came.
    """
    certain = [one for one in roots if one.first.name not in _DOUBTFUL]
    if not certain:
        return roots
    doubtful = [one for one in roots if one.first.name in _DOUBTFUL]
    before = [one for one in doubtful if all(_is_before(one.first, other.first) for other in certain)]
    return [*before, *certain]


def _is_before(one: Hit, other: Hit) -> bool:
    return one.exact and other.exact and one.at is not None and other.at is not None and one.at < other.at


def _order(one: Hit) -> tuple[bool, float, str, int]:
    return (one.at is None, one.at or 0.0, one.origin, one.line)


def _grouped(hits: Sequence[Hit]) -> list[PatternMatch]:
    """Hits by pattern, and cause where a pattern has several, each at the place of its first one."""
    groups: dict[tuple[str, str], list[Hit]] = {}
    for one in hits:
        groups.setdefault((one.name, one.cause if one.name in _SEVERAL else ""), []).append(one)
    return [
        PatternMatch(members[0], len(members), sorted({one.rank for one in members if one.rank is not None}))
        for members in groups.values()
    ]


_GROUP = re.compile(r"PG GUID (\S+)|\[PG (\S+)")


def laggard(hits: Sequence[Hit], ranks: Iterable[int]) -> Laggard | None:
    """Whom the others waited for, by what NCCL's watchdogs say; None where they do not tell.

    A rank that is behind in a group of ranks; else the ranks that say nothing while others wait, unless that is most.
    """
    done = _by_group(hits, "nccl-progress", 1) or _by_group(hits, "nccl-watchdog", 0)
    for completed in done.values():
        least, most = min(completed.values()), max(completed.values())
        if least < most:
            behind = sorted(rank for rank, number in completed.items() if number == least)
            return Laggard(behind, f"{_ranks(behind)} had completed collective {least}, others {most}")
    waited = {rank for completed in done.values() for rank in completed}
    silent = sorted(set(ranks) - waited)
    if waited and silent and len(silent) < len(waited):
        return Laggard(silent, f"{_ranks(silent)} said nothing while {len(waited)} others waited")
    return None


def _by_group(hits: Sequence[Hit], name: str, group: int) -> dict[str, dict[int, int]]:
    """The highest number that each rank told, by process group."""
    told: dict[str, dict[int, int]] = {}
    for one in hits:
        if one.name == name and one.rank is not None:
            named = _GROUP.search(one.text)
            ranks = told.setdefault((named[1] or named[2]) if named else "", {})
            ranks[one.rank] = max(ranks.get(one.rank, -1), int(one.groups[group]))
    return told


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" + (" and more" if len(ranks) > 8 else "")
