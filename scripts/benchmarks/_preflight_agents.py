"""Some of the agents of a simulated preflight in one process: ``_preflight_agents.py NODES FIRST COUNT SECRET PORT``.

They speak the real protocol over loopback addresses, in two networks, and prove both. What a node measures of itself is
made up: the facts of a healthy node with eight GPUs. The process with node 0 listens, whatever PORT is, and prints the
port; the others print that they are there. All begin when a line comes on standard input, and are ended when it closes.
At the end {"wall_s", "cpu_s", "agents": [{"sent", "tests", "problem", "warnings"}]} is printed, about the time between;
``cpu_s`` is that of all agents of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from slurmtrain.model.preflight.election import Candidate, ExcludedAddress
from slurmtrain.model.spec.spec import Spec, read_spec
from slurmtrain.runtime.peers import channel
from slurmtrain.runtime.peers.sockets import listen
from slurmtrain.runtime.preflight.connections import Endpoint
from slurmtrain.runtime.preflight.coordinator import coordinate
from slurmtrain.runtime.preflight.participant import Participant, PreflightOutcome, participate

GPUS = 8
# On a machine that runs all agents at once, a probe waits for others that would run elsewhere on a cluster.
PROBE_S = 60.0
JOIN_S = 120.0
_HOST = "127.0.0.1"
_FAST, _SLOW = 2, 3
_PREFIX = 16


def main(nodes: int, first: int, count: int, secret: bytes, port: int) -> None:
    # Agents that share a process share its files too; a node has those of one agent.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = listen(_HOST, 0) if first == 0 else None
    port = port if listener is None else listener.getsockname()[1]
    print(port, flush=True)
    if not os.read(0, 1):
        sys.exit(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # As with PROBE_S, which says why; no setting of a spec's reaches it.
    assert hasattr(channel, "_HANDSHAKE_S")
    channel._HANDSHAKE_S = PROBE_S
    spec = _spec(nodes)
    participants = [_participant(node, nodes, spec) for node in range(first, first + count)]
    endpoint = Endpoint(_HOST, port, secret)

    async def run_agents() -> list[PreflightOutcome]:
        return await asyncio.gather(
            *(
                participate(participant, lambda: [endpoint])
                if participant.node
                else coordinate(participant, secret, listener)
                for participant in participants
            )
        )

    began, spent = time.perf_counter(), time.process_time()
    outcomes = asyncio.run(run_agents())
    times = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
    print(json.dumps({**times, "agents": [_summarize(outcome) for outcome in outcomes]}), flush=True)


def _summarize(outcome: PreflightOutcome) -> dict[str, Any]:
    """How much an agent did, and its findings other than passes."""
    warnings = [f"{finding.check}: {finding.summary}" for finding in outcome.findings if finding.status != "pass"]
    return {"sent": outcome.sent, "tests": outcome.tests, "problem": outcome.problem, "warnings": warnings}


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _spec(nodes: int) -> Spec:
    raw = {
        "command": "true",
        "resources": {"nodes": nodes, "gpus_per_node": GPUS},
        "preflight": {"network": {"timeout_s": PROBE_S}},
    }
    return read_spec(raw, lambda at, message: sys.exit(f"the spec is wrong: {at}: {message}"))


def _participant(node: int, nodes: int, spec: Spec) -> Participant:
    candidates = [
        Candidate(interface="hsn0", address=_address(_FAST, node), prefix=_PREFIX, speed_mbps=200_000, mtu=9000),
        Candidate(interface="eno1", address=_address(_SLOW, node), prefix=_PREFIX, speed_mbps=1000),
    ]
    bridge = ExcludedAddress(
        node=node,
        interface="docker0",
        address="172.17.0.1",
        reason="an interface of containers or virtual machines, by its name",
    )
    return Participant(
        node=node,
        nodes=nodes,
        host=_name(node),
        spec=spec,
        candidates=lambda: (candidates, [bridge]),
        measure=lambda addresses, _: _facts(node, addresses),
        discipline=lambda: {
            "disciplined": True,
            "source": "chrony",
            "description": "synchronised, by chrony, to 21 us",
        },
        reserve=lambda: listen("127.0.0.1", 0),
        listen=lambda address: listen(address, 0),
        bandwidth=lambda *_: {"skip": "not measured"},
        expected_hosts={other: _name(other) for other in range(nodes)},
        join_s=JOIN_S,
        bind_source=True,
    )


def _name(node: int) -> str:
    return f"gpu{node:04}"


def _address(network: int, node: int) -> str:
    return f"127.{network}.{node // 250}.{node % 250 + 1}"


def _facts(node: int, addresses: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """What a healthy node measures, as from :func:`slurmtrain.runtime.preflight.facts.measure.measure_all`."""
    name = "NVIDIA H100 80GB HBM3"
    room = {"inodes": 976_562_496, "writable": True}
    gpus = [
        {"name": name, "bus": f"00000000:{bus:02X}:00.0", "uncorrected": 0, "pending": False, "used_mb": 620}
        for bus in range(0x18, 0x18 + 0x10 * GPUS, 0x10)
    ]
    products = [
        {"gpu": gpu, "name": name, "ms": 0.2134 + gpu / 1e4, "tflops": 644.1 - gpu} for gpu in range(GPUS)
    ]  # fmt: skip
    return {
        "shared": {"read_ms": 21.437} | ({"write_ms": 12.842} if node == 0 else {}),
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0+cu130",
            "cuda": "13.0",
            "nccl": "2.28.9",
            "driver": "580.95.05",
            "slurmtrain": "0.1.0",
        },
        "gpu": {
            "asked": GPUS,
            "nvml": None,
            "count": GPUS,
            "mig": False,
            "gpus": gpus,
            "xids": [],
            "kernel_log": None,
            "gemm": {"count": GPUS, "gpus": products},
        },
        "disk": {"path": "/scratch/somebody/runs/6ag2dd9qks", "free": 81_134_342_144_000, **room},
        "tmp": {"path": "/local/tmp", "free": 811_343_421_440, **room},
        "shm": {"path": "/dev/shm", "free": 1_081_134_342_144, **room},
        "limits": {"nofile": 1_048_576, "memlock": None, "rdma": [f"mlx5_{index}" for index in range(GPUS)]},
        "dns": dict.fromkeys(addresses, 0.412),
        "straggler": {"seconds": 0.0002141},
        "environment": {"said": []},
    }


if __name__ == "__main__":
    nodes, first, count = map(int, sys.argv[1:4])
    main(nodes, first, count, bytes.fromhex(sys.argv[4]), int(sys.argv[5]))
