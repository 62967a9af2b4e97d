"""Log lines that known patterns match, and the hits that they produce."""

from __future__ import annotations

from typing import Any

from slurmtrain.model.diagnosis.patterns import PATTERNS
from slurmtrain.model.diagnosis.root_cause import Hit, make_hit, rank_of, scan_log

WATCHDOG = (
    "[rank{0}]:[E1121 20:36:34.123456789 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 "
    "milliseconds before timing out."
)
PROGRESS = (
    "[rank{0}]:[E1121 20:36:34.223456789 ProcessGroupNCCL.cpp:1785] [PG ID {3} PG GUID {3}(default_pg) Rank {0}] "
    "Exception (either an error or timeout) detected by watchdog at work: {1}, last enqueued NCCL work: {1}, last "
    "completed NCCL work: {2}."
)

# Lines as programs write them: the name of the pattern, the line, and a part of the expected cause.
LINES: list[tuple[str, str, str]] = [
    ("nccl-watchdog", WATCHDOG.format(0, 812), "collective 812 (ALLREDUCE)"),
    ("nccl-progress", PROGRESS.format(0, 812, 811, 0), "completed collective 811 of 812"),
    ("nondeterministic", "RuntimeError: put_ does not have a deterministic implementation, but you set "
     "'torch.use_deterministic_algorithms(True)'.", "put_ has no deterministic implementation"),
    ("store-timeout", "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying "
     "to connect to (10.1.2.3, 29500).", "nothing answers at 10.1.2.3, port 29500"),
    ("store-name", "[W socket.cpp:697] [c10d] The IPv4 network addresses of (gpu-17, 29500) cannot be retrieved (gai "
     "error: -2 - Name or service not known).", "the name gpu-17 cannot be resolved (gai error -2)"),
    ("no-route", "RuntimeError: [../gloo/transport/tcp/pair.cc:799] connect [172.17.0.1]:5121: No route to host",
     "another network"),
    ("no-route", "The server socket on [n3]:29500 is not reachable (errno: 113 - EHOSTUNREACH).", "another network"),
    ("port-taken", "RuntimeError: The server socket has failed to listen on any local network address. port: 29500",
     "port is in use"),
    ("port-taken", "error: bind failed (errno: 98 - Address already in use).", "port is in use"),
    ("nccl-connect", "n2:7:9 [0] NCCL WARN connect to 10.1.2.3<41001> returned Connection refused, exceeded error "
     "retry count (35)", "could not connect to 10.1.2.3<41001>: Connection refused"),
    ("nccl-socket", "n2:7:9 [0] misc/socket.cc:565 NCCL WARN socketPollConnect: connect returned Connection timed out",
     "could not connect to another rank"),
    ("nccl-socket", "n2:7:9 [0] os/linux.cc:99 NCCL WARN ncclOsSocketStartConnect: failed", "could not connect"),
    ("nccl-no-interface", "n2:7:9 [0] NCCL WARN Bootstrap : no socket interface found", "no interface of this node"),
    ("peer-closed", "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
     "[10.1.2.3]:3371", "another rank had already ended"),
    ("peer-closed", "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
     "prematurely.", "another rank had already ended"),
    ("gloo-connect", "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
     "loopback"),
    ("gloo-interface", "RuntimeError: Unable to find address for: ib9", "told to use ib9"),
    ("slow-reverse-dns", "[W socket.cpp:462] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
     "ten seconds"),
    ("rendezvous", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "stopped answering"),
    ("rendezvous", "[W dynamic_rendezvous.py] Detected dead node 'gpu-17_71_0'", "stopped answering"),
    ("nccl-versions", "n2:7:9 [0] NCCL WARN Mismatched NCCL version detected : rank 1 2.19.3 rank 0 2.21.5",
     "different versions"),
    ("nccl-duplicate-gpu", "NCCL WARN Duplicate GPU detected : rank 3 and rank 0 both on CUDA device c1000",
     "rank 3 is one of them"),
    ("ib-retry", "NCCL WARN NET/IB : Got completion from peer 10.1.2.3<41001> with status=12 opcode=129 len=0 vendor "
     "err 129", "gave up after its retries"),
    ("ib-connect", "NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable", "unreachable"),
    ("ib-memlock", "NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory", "locked for RDMA"),
    ("ib-fatal", "n2:7:9 [0] NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic error",
     "network card has failed"),
    ("nccl-sockets", "n2:7:9 [0] NCCL INFO Using network Socket", "uses TCP sockets"),
    ("xid", "[ 9301.448] NVRM: Xid (PCI:0000:c1:00): 79, pid=3371, name=python, GPU has fallen off the bus.",
     "Xid 79 of GPU 0000:c1:00: the GPU has fallen off the bus"),
    ("gpu-ecc", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "memory is faulty"),
    ("cuda-assert", "RuntimeError: CUDA error: device-side assert triggered", "index out of range"),
    ("cuda-oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity "
     "of 79.15 GiB. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF", "GPU memory"),
    ("host-oom", "slurmstepd: error: Detected 3 oom_kill events in StepId=77.0. Some of the step tasks have been OOM "
     "Killed.", "the kernel killed a process"),
    ("host-oom", "slurmstepd: error: Detected 1 oom-kill event(s) in step 77.batch cgroup.", "the kernel killed"),
    ("host-oom", "kernel: Out of memory: Killed process 3371 (python) total-vm:9000000kB", "the kernel killed"),
    ("shm-bus", "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that "
     "dataloader's workers are out of shared memory.", "/dev/shm is full"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/tmp/cache/a.bin'", "file system of /tmp/cache/a.bin"),
    ("disk-full", "NCCL WARN Error: failed to extend /dev/shm/nccl-xy12 to 9637892 bytes: No space left on device",
     "/dev/shm is full"),
    ("disk-full", "tee: write error: No space left on device", "the file system is full"),
    ("efa-memory", "OSError: [Errno 12] Cannot allocate memory", "huge pages"),
    ("different-replicas", "CheckpointError: 'w' is not the same tensor on ranks 0 and 1: each", "forgotten DDP"),
    ("munge-clock", "slurmd: error: Munge decode failed: Rewound credential", "clock is wrong"),
    ("slurm-auth", "srun: error: Task launch for StepId=7.0 failed on node n3: Protocol authentication error", "munge"),
    ("slurm-auth", "slurm_receive_msg: Zero Bytes were transmitted or received", "munge"),
    ("stale-job", "srun: error: Unable to confirm allocation for job 71: Invalid job id specified", "another job"),
    (
        "component-steps",
        "srun: fatal: Job steps that span multiple components of a heterogeneous job are not currently supported",
        "several components",
    ),
    ("no-such-nodes", "sbatch: error: Batch job submission failed: Requested node configuration is not available",
     "no node of the partition"),
    ("gres", "sbatch: error: Invalid generic resource (gres) specification", "no such GPUs"),
    ("slurm-names", "sbatch: error: Batch job submission failed: Invalid account or account/partition combination "
     "specified", "does not know this account"),
    ("slurm-names", "sbatch: error: Batch job submission failed: Invalid qos specification", "this qos"),
    ("step", "srun: error: Unable to create step for job 71: More processors requested than permitted", "no free"),
    ("slurm-busy", "slurmstepd: error: Job credential expired", "too busy"),
    ("slurm-busy", "srun: error: slurm_msg_sendto: Socket timed out on send/recv operation", "too busy"),
    ("slurm-reason", "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T20:36:34 DUE TO PREEMPTION ***",
     "PREEMPTION"),
    ("obsolete", "[W] Environment variable NCCL_BLOCKING_WAIT is deprecated; use TORCH_NCCL_BLOCKING_WAIT instead",
     "NCCL_BLOCKING_WAIT has no effect"),
    ("import", "ModuleNotFoundError: No module named 'flash_attn'", "No module named 'flash_attn'"),
    ("import", "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
     "a library is missing"),
]  # fmt: skip
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


def hits_of(text: str, **attributes: Any) -> list[Hit]:
    """The hits in a log."""
    return [
        make_hit(pattern, match, text=line, origin="log", rank=rank_of(line), line=place, **attributes)
        for place, pattern, match, line in scan_log(text)
    ]


def hit(name: str, *, at: float | None = None, exact: bool = True, origin: str = "a", **attributes: Any) -> Hit:
    """A hit of a pattern, without a log."""
    pattern = BY_NAME[name]
    of_pattern: dict[str, Any] = {"name": name, "role": pattern.role, "cause": pattern.cause, "fix": pattern.fix}
    of_line = {"text": "", "origin": origin, "at": at, "exact": exact and at is not None}
    return Hit(**{**of_pattern, **of_line, **attributes})
