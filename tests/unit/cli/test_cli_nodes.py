"""What ``nodes`` prints for a person."""

from __future__ import annotations

from typing import Any

from slurmtrain.cli.check_commands import node_lines


def entry(host: str, reason: str, **facts: Any) -> dict[str, Any]:
    times = {"seen_at": "2023-11-14T22:13:20.000Z", "expires_at": "2023-11-15T22:13:20.000Z"}
    return {"host": host, "state": "active", "run_id": "6ak4", "attempt": 1, "reason": reason, **times, **facts}


def test_nodes_with_the_same_finding_share_a_row() -> None:
    nodes = [entry(f"tb{i}", f"clock: {i} s ahead of the other 15 nodes (limit 1 s)") for i in range(2, 6)]
    nodes.append(entry("tb9", "gpu: 7 of 8 GPUs"))
    nodes.append(entry("tb10", "gpu: 7 of 8 GPUs", state="forgiven", expires_at=None))
    seen_at, until = "2023-11-14 22:13", "2023-11-15 22:13"
    clock = "clock: 2 to 5 s ahead of the other 15 nodes (limit 1 s) (the largest on tb5)"
    assert node_lines(nodes) == [
        ("tb[2-5]", "active", seen_at, until, "6ak4 (1)", clock),
        ("tb9", "active", seen_at, until, "6ak4 (1)", "gpu: 7 of 8 GPUs"),
        ("tb10", "forgiven", seen_at, "-", "6ak4 (1)", "gpu: 7 of 8 GPUs"),
    ]
