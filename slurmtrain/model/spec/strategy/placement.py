"""Which resources suit a strategy: nodes, processes on each, their memory, and whether they may differ."""

from __future__ import annotations

from collections.abc import Iterator

from slurmtrain.model.spec.resources.node_ranks import NodeRanks
from slurmtrain.model.spec.strategy.hook import HIERARCHICAL, POWERSGD
from slurmtrain.model.spec.strategy.mesh import MeshSpec
from slurmtrain.model.spec.strategy.pipeline import SCHEDULES
from slurmtrain.model.spec.strategy.section import DP, HSDP, REPLICATED, StrategySpec


def placement_conflicts(strategy: StrategySpec, *, least: int, ranks: NodeRanks, mem: int | None) -> Iterator[str]:
    """Why these resources do not suit a ``strategy``, as sentences.

    ``least``: the least number of nodes that an attempt may have. ``ranks``: the processes of each, if it has as many
    nodes as it may. ``mem``: the memory of a node, in MiB; None if the spec does not say.
    """
    world_size = ranks.world_size
    if strategy.name == HSDP and len(ranks.counts) == 1:
        yield "'hsdp' replicates the model across nodes, and there is only one: use 'fsdp', or raise 'resources.nodes'"
    elif strategy.name == HSDP and not ranks.are_equal:
        yield (
            "'hsdp' shards the model in the same way within each node, and nodes have different numbers of processes: "
            "use 'fsdp', or set the same 'procs_per_node' for all components"
        )
    elif strategy.name == HSDP and world_size == len(ranks.counts):
        yield (
            "'hsdp' shards the model within a node, which has only one process: use 'ddp' or 'fsdp', or raise "
            "'resources.procs_per_node'"
        )
    if strategy.hook == HIERARCHICAL and (len(ranks.counts) == 1 or world_size == len(ranks.counts)):
        where = "there is only one node" if len(ranks.counts) == 1 else "each node has only one process"
        yield f"'hook: hierarchical' reduces within nodes and then across them, and {where}: leave it out"
    elif strategy.hook == HIERARCHICAL and not ranks.are_equal:
        yield "'hook: hierarchical' needs the same number of processes on each node: leave it out"
    if strategy.name == DP and world_size > 1:
        yield (
            f"'dp' is a single process, and there are {world_size}: set 'resources.nodes' and "
            "'resources.procs_per_node' to 1, or use 'ddp'"
        )
    yield from _mesh_conflicts(strategy.layout, least, ranks)
    yield from _pipeline_conflicts(strategy, world_size)
    if strategy.is_sharded and strategy.offload and mem is None:
        yield "'offload' keeps the shards in the memory of the node: set 'resources.mem', too"


def _mesh_conflicts(mesh: MeshSpec, least: int, ranks: NodeRanks) -> Iterator[str]:
    """The least number of nodes whose processes the sizes of a mesh do not multiply to, as a sentence."""
    # A wrong size is None.
    if mesh.is_whole:
        most = len(ranks.counts)
        for count in range(least, most + 1):
            try:
                mesh.sizes(sum(ranks.counts[:count]))
            except ValueError as problem:
                on_nodes = f"on {count} nodes " if least != most else ""
                yield f"'mesh': {on_nodes}{problem}, which are 'resources.nodes' x 'resources.procs_per_node'"
                return


def _pipeline_conflicts(strategy: StrategySpec, world_size: int) -> Iterator[str]:
    """Why a schedule does not suit its stages or microbatches, as sentences. ``world_size``: all processes."""
    # A wrong schedule is None.
    if not strategy.is_pipeline or not strategy.schedule or not strategy.layout.is_whole:
        return
    try:
        pp = strategy.layout.sizes(world_size).pp
    except ValueError:
        return
    schedule = SCHEDULES[strategy.schedule]
    if schedule.fills and strategy.microbatches is not None and strategy.microbatches < pp:
        yield (
            f"'microbatches: {strategy.microbatches}' are fewer than the {pp} processes of the pipeline, which "
            f"'schedule: {strategy.schedule}' needs: raise it, or use gpipe"
        )
    stages = pp * schedule.per_rank
    if strategy.split and len(strategy.split) != stages - 1:
        yield f"'split' makes {len(strategy.split) + 1} stages, and 'schedule: {strategy.schedule}' needs {stages}"


def mixed_conflicts(strategy: StrategySpec) -> Iterator[str]:
    """Why ``resources.mixed`` does not suit a ``strategy``, as sentences."""
    if strategy.name not in REPLICATED or strategy.is_tensor_parallel:
        yield (
            "'mixed' divides batches by the speed of each process, which is known only where none waits for others "
            "before it has its gradients: with 'strategy: ddp' or 'zero1', without a 'mesh'"
        )
    elif strategy.hook == POWERSGD:
        yield "'mixed' needs the speed of each process, and with 'hook: powersgd' they wait for others"
    elif strategy.static_graph:
        yield (
            "with 'mixed' processes may divide their samples into different numbers of microbatches, each of which "
            "'static_graph' reduces over all processes: leave it out"
        )


def crossing_layers(strategy: StrategySpec, ranks: NodeRanks) -> str | None:
    """What to warn of where divided layers are on several nodes, as a sentence; None if each layer is on one.

    Args:
        strategy: Of the spec.
        ranks: The processes of each node, if an attempt has as many nodes as it may.
    """
    tp = strategy.layout.sizes(ranks.world_size).tp
    if len(ranks.counts) == 1 or not any(count % tp for count in ranks.counts):
        return None
    return (
        f"each layer is divided over {tp} processes (tp), and a node has {min(ranks.counts)}: what layers send in "
        "every step crosses the network between nodes; 'tp' should divide 'resources.procs_per_node'"
    )
