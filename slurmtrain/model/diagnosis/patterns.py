"""Known log lines of failures: the patterns that find them, what each means, and what to do. Data, no matching.

The texts come from torch's c10d and its NCCL and Gloo backends, NCCL, NVIDIA's driver, the kernel and Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurmtrain.model.diagnosis.last_words import EXCEPTION, EXIT, IMPORT, KILLED
from slurmtrain.model.diagnosis.rank_groups import WRAP

# What a line means for a failure: its root cause; a consequence of something that died first; Slurm's final state,
# which confirms how it ended; or something worth knowing that ended nothing.
ROOT, CASCADE, CONFIRMATION, NOTE = "root", "cascade", "confirmation", "note"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A kind of log line that says something about a failure.

    ``role``: one of the above. ``needles``: every such line contains one of these texts; plain searches for them are
    far faster than the ``expression``, which is tried only on lines that contain one; empty: a needle is enough.
    ``cause`` and ``fix`` are phrases; ``{0}`` stands for what the expression matches, ``{1}`` for its first group.
    """

    name: str
    role: str
    needles: tuple[str, ...]
    cause: str
    fix: str
    expression: str = ""

    @property
    def regex(self) -> re.Pattern[str]:
        """The expression, compiled; ``re`` caches it."""
        return re.compile(self.expression or "|".join(map(re.escape, self.needles)))


# --- Xid ----------------------------------------------------------------------------------------------------------

_PROGRAM, _GPU, _EARLIER, _UNKNOWN = "the program", "the GPU", "an earlier error", "unknown"
# The driver's Xid numbers, from NVIDIA's catalogue of Xid errors: what is at fault, and a description.
XIDS: Mapping[int, tuple[str, str]] = {
    13: (_PROGRAM, "an exception in a kernel, often an index out of bounds"),
    31: (_PROGRAM, "a memory access to a wrong address"),
    43: (_PROGRAM, "a program's own error stopped its work"),
    45: (_EARLIER, "the driver cleaned up after an earlier error"),
    48: (_GPU, "an uncorrected memory error (double bit ECC)"),
    63: (_GPU, "a row of memory was remapped"),
    64: (_GPU, "a row of memory could not be remapped"),
    74: (_GPU, "an NVLink error"),
    79: (_GPU, "the GPU has fallen off the bus"),
    92: (_GPU, "many corrected memory errors"),
    94: (_PROGRAM, "a contained memory error, which ended one program"),
    95: (_GPU, "an uncontained memory error"),
    119: (_GPU, "the GPU's system processor does not answer"),
    120: (_GPU, "the GPU's system processor failed"),
}


def explain_xid(number: int, where: str = "") -> tuple[str, str, str]:
    """Role, cause and fix of an Xid number; ``where`` is the address of the GPU on its bus."""
    at_fault, description = XIDS.get(number, (_UNKNOWN, "see NVIDIA's catalogue of Xid errors"))
    gpu = f" of GPU {where}" if where else ""
    cause = f"Xid {number}{gpu}: {description}"
    if at_fault == _GPU:
        return ROOT, cause, "exclude the node (slurm.exclude) and have its administrators look at the GPU"
    if at_fault == _PROGRAM:
        return ROOT, cause, "run it with CUDA_LAUNCH_BLOCKING=1 and look at the step that failed; the GPU is fine"
    return (CASCADE if at_fault == _EARLIER else ROOT), cause, "look at the other Xid lines of that node"


# --- patterns -----------------------------------------------------------------------------------------------------

_PEER = "look at the rank that failed first; the node it ran on may have died"
_IFNAME = "set network.interface to an interface that the nodes have, or leave it at auto"
SHM_FULL = "/dev/shm is full"  # noqa: S108 (a message)
SHM_FIX = "use fewer data loader workers, or have /dev/shm made larger"
_FABRIC = "have the fabric checked (link, GID, MTU); exclude the node if it is always the same one"

PATTERNS: tuple[Pattern, ...] = (
    # Collectives that wait for a rank.
    Pattern("nccl-watchdog", CASCADE, ("Watchdog caught collective",),
            "collective {1} ({2}) did not finish in time: some rank did not reach it",
            "look at the rank that is behind, or silent",
            r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"),
    Pattern("nccl-progress", CASCADE, ("last enqueued NCCL work",),
            "had completed collective {2} of {1} when it gave up waiting", "compare over ranks",
            r"last enqueued NCCL work: (-?\d+), last completed NCCL work: (-?\d+)"),
    Pattern("nondeterministic", ROOT, ("does not have a deterministic implementation",),
            "{1} has no deterministic implementation, and nothing else is allowed",
            "use another operation, or remove `deterministic: true` from the spec if it is there",
            r"(\S+) does not have a deterministic implementation"),
    # Connections and rendezvous.
    Pattern("store-timeout", ROOT, ("client socket has timed out",),
            "nothing answers at {1}, port {2}, where the ranks rendezvous",
            "check that rank 0 has started, and that no firewall is in the way (`slurmtrain preflight`)",
            r"client socket has timed out after .{0,80}?connect to \((.+?), (\d+)\)"),
    Pattern("store-name", ROOT, ("cannot be retrieved (gai error",), "the name {1} cannot be resolved (gai error {2})",
            "use an address without brackets, or have the name added to DNS or to /etc/hosts of the nodes",
            r"network addresses of \((.+?), \d+\) cannot be retrieved \(gai error: (-?\d+)"),
    Pattern("no-route", ROOT, ("No route to host", "errno: 113"),
            "an address in another network, and there is no route to it", _IFNAME),
    Pattern("port-taken", ROOT,
            ("EADDRINUSE", "errno: 98", "Address already in use", "server socket has failed to listen"),
            "the port is in use", "let slurmtrain choose the port (no MASTER_PORT in env), or end what uses it"),
    Pattern("nccl-connect", ROOT, ("exceeded error retry",),
            "NCCL could not connect to {1}: {2}", f"{_IFNAME}; check for a firewall or a dead peer",
            r"connect to (\S+) returned (Connection refused|.*?timed out), exceeded error retry"),
    Pattern("nccl-socket", ROOT, ("socketStartConnect", "socketPollConnect", "ncclOsSocket"),
            "NCCL could not connect to another rank", f"{_IFNAME}; check for a firewall or a dead peer",
            r"socket(?:Start|Poll)Connect|ncclOsSocket\w*Connect"),
    Pattern("nccl-no-interface", ROOT, ("no socket interface found", "is neither AF_INET"),
            "NCCL_SOCKET_IFNAME names no interface of this node", _IFNAME),
    Pattern("peer-closed", CASCADE,
            ("Connection closed by remote peer", "ncclRemoteError", "Connection closed by peer",
             "Connection reset by peer", "Broken pipe"),
            "another rank had already ended", _PEER),
    Pattern("gloo-connect", ROOT, ("Gloo connectFullMesh failed", "Unable to resolve hostname to a"),
            "Gloo could not connect the ranks: a node's name resolves to the wrong interface, or to loopback", _IFNAME),
    Pattern("gloo-interface", ROOT, ("Unable to find address for:",),
            "Gloo was told to use {1}, which is no interface of this node", _IFNAME,
            r"Unable to find address for: (\S+)"),
    Pattern("slow-reverse-dns", NOTE, ("hostname of the client socket cannot be retrieved",),
            "reverse lookups fail: each connection may wait ten seconds for one",
            "have the nodes' addresses added to DNS or /etc/hosts"),
    Pattern("rendezvous", ROOT, ("RendezvousClosedError", "no heartbeat", "Detected dead node"),
            "an agent stopped answering: it died, or clocks differ by more than 15 s",
            "look at the nodes' clocks (`slurmtrain preflight`), and at the node that stopped answering"),
    # Versions and devices.
    Pattern("nccl-versions", ROOT, ("Mismatched NCCL version",), "nodes have different versions of NCCL",
            "use one environment on all nodes"),
    Pattern("nccl-duplicate-gpu", ROOT, ("Duplicate GPU detected",), "two ranks use one GPU (rank {1} is one of them)",
            "use cuda:LOCAL_RANK, and set no CUDA_VISIBLE_DEVICES in env", r"Duplicate GPU detected : rank (\d+)"),
    Pattern("ib-retry", ROOT, ("Got completion from peer", "vendor err", "vendor_err"),
            "InfiniBand gave up after its retries", _FABRIC,
            r"Got completion from peer .*status=12|vendor.err.?129"),
    Pattern("ib-connect", ROOT, ("ibv_modify_qp failed",), "InfiniBand could not set up a connection: {1}",
            "check which HCA, GID and RoCE route it uses (network.profile), and leave NCCL_IB_GID_INDEX out",
            r"ibv_modify_qp failed with error (Network is unreachable|Connection timed out)"),
    Pattern("ib-memlock", ROOT, ("ibv_reg_mr", "ibv_create_cq"), "memory could not be locked for RDMA",
            "ask an administrator to raise the limit of the nodes (`ulimit -l`, memlock)",
            r"ibv_(?:reg_mr|create_cq)\S* failed"),
    Pattern("ib-fatal", ROOT, ("async fatal event",), "the network card has failed",
            "exclude the node (slurm.exclude) and tell its administrators", r"NET/IB : .*async fatal event"),
    Pattern("nccl-sockets", NOTE, ("NET/Socket : Using", "Using network Socket"),
            "NCCL uses TCP sockets, which is slow where the nodes have InfiniBand or RoCE",
            "set network.profile to the kind of network"),
    Pattern("xid", ROOT, ("NVRM: Xid",), "Xid {2} of GPU {1}", "", r"NVRM: Xid \(PCI:([^)]+)\): (\d+)"),
    Pattern("gpu-ecc", ROOT, ("uncorrectable ECC error encountered",), "a GPU's memory is faulty",
            "exclude the node (slurm.exclude) and tell its administrators"),
    Pattern("cuda-assert", ROOT, ("device-side assert triggered",),
            "the program's own error on the GPU, often a label or an index out of range",
            "run it with CUDA_LAUNCH_BLOCKING=1 to see where"),
    # Memory and disks.
    Pattern("cuda-oom", ROOT,
            ("CUDA out of memory", "HIP out of memory", "torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"),
            "GPU memory is full",
            "use smaller batches, or shard more; look for processes that earlier jobs left behind (`nvidia-smi`)"),
    Pattern("host-oom", ROOT, ("oom_kill", "oom-kill", "Out of memory: Killed process"),
            "memory of the node, or of the job's share, is full: the kernel killed a process",
            "raise resources.mem, or use less (data loader workers take a share each)",
            r"[Dd]etected \d+ oom[_-]kill events? in|oom-kill|Out of memory: Killed process"),
    Pattern("shm-bus", ROOT, ("killed by signal: Bus error", "insufficient shared memory"), SHM_FULL, SHM_FIX),
    Pattern("disk-full", ROOT, ("No space left on device",), "a file system is full", "make room",
            r"No space left on device(?:: '([^']+)')?"),
    Pattern("efa-memory", ROOT, ("Cannot allocate memory",),
            "no memory for a new process; EFA reserves huge pages that a fork would need twice",
            "set FI_EFA_USE_HUGE_PAGE=0 in env where EFA is used, else raise resources.mem",
            r"OSError.*Cannot allocate memory"),
    Pattern("different-replicas", ROOT, ("is not the same tensor on ranks",),
            "the ranks train models of their own: nothing averages their gradients, as with a forgotten DDP", WRAP),
    # Slurm.
    Pattern("munge-clock", ROOT,
            ("Munge decode failed: Rewound credential", "Munge decode failed: Expired credential",
             "out of sync clocks"),
            "a node's clock is wrong: Slurm rejects its messages", "exclude the node and have its clock corrected"),
    Pattern("slurm-auth", ROOT, ("Protocol authentication error", "Zero Bytes were transmitted"),
            "Slurm's daemons do not trust each other: check munge's key, its daemon, and the clocks",
            "tell the administrators; exclude the node"),
    Pattern("stale-job", ROOT, ("Unable to confirm allocation for job",),
            "a SLURM_JOB_ID of another job is in the environment", "submit from a shell outside any job"),
    Pattern("component-steps", ROOT, ("Job steps that span multiple components",),
            "this site allows no job step over several components (SchedulerParameters=disable_hetjob_steps)",
            "leave resources.components out, and ask for nodes of one partition"),
    Pattern("no-such-nodes", ROOT, ("Requested node configuration is not available",),
            "no node of the partition has the requested resources",
            "ask for less per node in resources, or name another slurm.partition"),
    Pattern("gres", ROOT, ("Invalid generic resource (gres)",), "the partition has no such GPUs",
            "check `sinfo -o '%P %G'`; change resources.gpus_per_node or slurm.gres"),
    Pattern("slurm-names", ROOT, ("Invalid account", "Invalid qos", "Invalid partition", "invalid partition specified"),
            "Slurm does not know this {1}, or you may not use it",
            "check `sacctmgr show assoc user=$USER`; change slurm.{1}", r"(?i:invalid (account|qos|partition))"),
    Pattern("step", ROOT, ("Unable to create step for job",), "srun found no free resources in its own job",
            "leave srun out of the command, which is started on each node already; other steps need `srun --overlap`"),
    Pattern("slurm-busy", ROOT, ("Job credential expired", "Socket timed out on send/recv"),
            "slurmctld was too busy, or a clock is wrong", "try again; look at the nodes' clocks"),
    Pattern("slurm-reason", CONFIRMATION, ("DUE TO ",), "Slurm ended it: {1}", "",
            r"DUE TO (TIME LIMIT|PREEMPTION|NODE FAILURE|JOB REQUEUE|TASK FAILURE)"),
    # The environment.
    Pattern("obsolete", NOTE, ("is deprecated; use TORCH_NCCL",), "{1} has no effect", "remove it, or set {2}",
            r"(\w+) is deprecated; use (TORCH_NCCL\w*)"),
    Pattern(IMPORT, ROOT, ("ModuleNotFoundError", "ImportError"), "a module or a library is missing: {0}",
            "activate the environment that has it in setup",
            r"ModuleNotFoundError: No module named '?[\w.]+.*|ImportError: .*\.so.*"),
)  # fmt: skip

# A dead peer, or something that is known, causes these too, so they count as roots only if nothing else explains them.
DOUBTFUL = frozenset({"store-timeout", "nccl-connect", "nccl-socket", "rendezvous", "gloo-connect", "ib-retry", KILLED})
# What exceptions say too: a script that goes on after such a line has survived it.
OF_EXCEPTIONS = frozenset(
    {"nondeterministic", "store-name", "no-route", "port-taken", "cuda-assert", "cuda-oom", "shm-bus", "disk-full",
     "efa-memory", "different-replicas", "peer-closed", IMPORT}
)  # fmt: skip
# Patterns with several possible causes: their hits are grouped by cause as well.
SEVERAL_CAUSES = frozenset({"xid", "disk-full", "slurm-reason", "evidence", EXCEPTION, EXIT})
# What to do where no Slurm and no administrator of nodes is involved: with the local executor.
_LOCAL_MEMORY = "use less memory (data loader workers take a share each), or end other programs that use much of it"
_LOCAL_GPU = "use another GPU (CUDA_VISIBLE_DEVICES), and look at `nvidia-smi` and the kernel's log (`dmesg`)"
LOCAL_FIXES: Mapping[str, str] = {
    "oom": _LOCAL_MEMORY,
    "host-oom": _LOCAL_MEMORY,
    "efa-memory": _LOCAL_MEMORY,
    "evidence": _LOCAL_GPU,
    "xid": _LOCAL_GPU,
    "gpu-ecc": _LOCAL_GPU,
    "node_fail": "look for what has ended the agent; `slurmtrain resume` continues",
    "lost": "look whether this machine was restarted, or its agent killed; `slurmtrain resume` continues",
}
# Reasons of Slurm that explain nothing: a task fails, and a job is requeued, because of what is to be explained.
TASK_FAILURE, JOB_REQUEUE = "TASK FAILURE", "JOB REQUEUE"
# What to do, by the reason that Slurm gives.
REASON_FIXES = {
    "TIME LIMIT": "ask for more in resources.time, or let it be requeued (requeue.enabled)",
    "PREEMPTION": "nothing, unless requeue.enabled is false: it is requeued (`slurmtrain doctor SPEC` says how)",
    "NODE FAILURE": "nothing, unless it is always the same node: then exclude it",
    JOB_REQUEUE: "nothing: it is requeued",
    TASK_FAILURE: "look at the task that failed",
}
