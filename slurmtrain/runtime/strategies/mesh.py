"""The device mesh of a strategy: torch's arrangement of the ranks, over whose dimensions a model is distributed.

Neighbouring ranks, which are on the same node, are in the last dimension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from slurmtrain.errors import StrategyError
from slurmtrain.model.spec.strategy import FSDP, HSDP, MeshSpec, StrategySpec

PP, REPLICATE, SHARD, TP = "pp", "replicate", "shard", "tp"


def sizes_of(spec: StrategySpec, world_size: int) -> MeshSpec:
    """The sizes of a strategy's mesh with this many ranks.

    Args:
        spec: The strategy.
        world_size: How many ranks there are.

    Raises:
        StrategyError: Its sizes do not multiply to that.
    """
    try:
        return spec.layout.sizes(world_size)
    except ValueError as problem:
        raise StrategyError(f"'strategy.mesh': {problem}") from None


def make_mesh(spec: StrategySpec, nodes: Sequence[int], device: torch.device) -> DeviceMesh:
    """The mesh of a strategy that makes DTensors of parameters.

    Args:
        spec: The strategy.
        nodes: The number of each rank's node, by rank.
        device: Where this rank computes.

    Returns:
        A mesh with the dimension ``shard``, before it ``replicate`` where there are replicas, and after it ``tp`` with
        tensor parallelism; the first is ``pp`` with a pipeline.

    Raises:
        StrategyError: The sizes of the mesh do not multiply to the number of ranks; or parameters are to be sharded
            within each node, and nodes have different numbers of ranks.
    """
    world_size = len(nodes)
    sizes = sizes_of(spec, world_size)
    if spec.name == FSDP:
        shape, names = [sizes.dp], [SHARD]
    elif spec.name == HSDP:
        shape, names = _within_nodes(nodes, sizes)
    else:
        # Shards of one rank: what is left is that gradients are reduced over the replicas.
        shape, names = [sizes.dp, 1], [REPLICATE, SHARD]
    if spec.is_tensor_parallel:
        shape, names = [*shape, sizes.tp], [*names, TP]
    if spec.is_pipeline:
        shape, names = [sizes.pp, *shape], [PP, *names]
    return DeviceMesh(device.type, torch.arange(world_size).view(shape), mesh_dim_names=tuple(names))


def data_parallel(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of a ``mesh`` over which gradients are reduced."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name not in (PP, TP))
    return mesh[names]


def across_nodes(nodes: Sequence[int], device: torch.device, key: str) -> DeviceMesh | None:
    """All ranks by their nodes: a mesh with the dimension ``replicate``, across nodes, and ``shard``, within each.

    Args:
        nodes: The number of each rank's node, by rank.
        device: Where this rank computes.
        key: What the spec has that needs the mesh, for the error.

    Returns:
        The mesh; None if there is only one node, or one rank on each.

    Raises:
        StrategyError: Nodes have different numbers of ranks.
    """
    per_node = _ranks_per_node(nodes, key)
    if per_node in (1, len(nodes)):
        return None
    return DeviceMesh(device.type, torch.arange(len(nodes)).view(-1, per_node), mesh_dim_names=(REPLICATE, SHARD))


def _within_nodes(nodes: Sequence[int], sizes: MeshSpec) -> tuple[list[int], list[str]]:
    per_node = _ranks_per_node(nodes, f"strategy: {HSDP}")
    if per_node == len(nodes):
        return [sizes.dp], [SHARD]
    if per_node % sizes.tp:
        raise StrategyError(
            f"'strategy.mesh': 'hsdp' shards within each node, whose {per_node} processes are not a multiple of "
            f"tp {sizes.tp}"
        )
    return [len(nodes) // per_node, per_node // sizes.tp], [REPLICATE, SHARD]


def _ranks_per_node(nodes: Sequence[int], key: str) -> int:
    """How many ranks each node has. Raises StrategyError if it is not the same number; the spec has this ``key``."""
    ranks = Counter(nodes)
    if len(set(ranks.values())) > 1:
        counts = ", ".join(f"{count} on node {node}" for node, count in ranks.items())
        raise StrategyError(f"'{key}' needs the same number of processes on each node, and there are {counts}")
    return len(nodes) // len(ranks)
