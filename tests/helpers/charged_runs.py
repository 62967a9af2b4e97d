"""A run whose cost a person can calculate by hand."""

from __future__ import annotations

from typing import Any

from helpers.simulated_run import BEGIN, SimulatedRun
from slurmtrain.model.run.layout import RunDir


def preempted_run(directory: RunDir | None = None, now: float = BEGIN, **created: Any) -> SimulatedRun:
    """A run on two nodes of the partition `spot` that three preemptions interrupt.

    Each start of its job: in the queue, 40 s of start and 20 s of preflight; later ones restore for 10 s more. Training
    for 3,000 s, a save after 2,000 s that stalls it for 5 s, and again so after each preemption; then 30 s of stop.
    The last start trains for 2,000 s, and its last save takes 15 s, the end 5 s.

    Args:
        directory: Where to write its journals; None: its events stay in memory.
        now: When it was created, in seconds since 1970.
        created: Further fields of the event ``created``.
    """
    run = SimulatedRun(directory, now=now - 1)
    run.created(**{"resources": {"nodes": {"min": 2, "max": 2}, "gpus_per_node": 4}, "name": "gpt", **created})
    run.submitted(partition="spot", requeue={"enabled": True})
    at = now + 101.0
    for restart in range(4):
        folder, resumed = f"attempts/7.{restart}", 100 * restart
        for node in (0, 1):
            fields = {"nodes": 2, "host": f"n{node}", "submission": 1, "attempt": 1 + restart, "executor": "slurm"}
            run.write(f"{folder}/node-{node}.jsonl", "agent", at=at, node=node, **fields)
        node_0, rank_0 = f"{folder}/node-0.jsonl", f"{folder}/rank-0.jsonl"
        run.write(node_0, "preflight", at=at + 30, seconds=20.0, findings=[])
        run.write(node_0, "workers", at=at + 40, processes={})
        run.write(rank_0, "session", at=at + 50, step=0, world_size=8)
        begun = at + 60
        if restart:
            begun += 10
            saved = {"path": f"checkpoints/step-{resumed}", "seconds": 5.0, "saved_at": 0.0, "stall_s": 5.0}
            run.write(rank_0, "restored", at=begun, step=resumed, took_s=10.0, **saved)
        run.write(rank_0, "total", at=begun, total_steps=400)
        step = resumed + 100
        save = {"step": step, "path": f"checkpoints/step-{step}", "bytes": 1, "metrics": {}}
        if restart == 3:
            end = begun + 2000
            run.write(rank_0, "saved", at=end + 15, seconds=15.0, saved_at=end + 15, stall_s=15.0, why="end", **save)
            run.write(node_0, "end", at=end + 20, cause="completed", reason="", signal=None)
            run.write(f"{folder}/node-1.jsonl", "end", at=end + 20, cause="completed", reason="", signal=None)
            return run
        run.write(
            rank_0, "saved", at=begun + 2005, seconds=5.0, saved_at=begun + 2005, stall_s=5.0, why="interval", **save
        )
        stopped = begun + 3000
        run.write(node_0, "stopping", at=stopped, cause="preempted")
        for node in (0, 1):
            fields = {"cause": "preempted", "reason": "", "signal": "SIGTERM", "failed_at": stopped}
            run.write(f"{folder}/node-{node}.jsonl", "requeue", at=stopped + 29, cause="preempted")
            run.write(f"{folder}/node-{node}.jsonl", "end", at=stopped + 30, **fields)
        at = stopped + 30 + 300
    return run
