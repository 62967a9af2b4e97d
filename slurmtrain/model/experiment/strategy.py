"""The section `strategy` of a spec: how the model is distributed over the processes of a run.

A strategy has a name and options, whose keys are the names of torch's arguments; each option belongs to some of the
strategies, and is refused with the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, ClassVar

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.launcher import NodeRanks

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
# The precision of each process by its hardware.
AUTO = "auto"
# Hardware without an entry of its own has this one.
DEFAULT = "default"
MixedPrecision = str | Mapping[str, str] | None


def precision_on(mixed: MixedPrecision, hardware: str, *, has_bf16: bool) -> str:
    """The precision that a process computes in: bf16, fp16 or fp32.

    Args:
        mixed: The key of the spec. By `auto` it is bf16 if the hardware has it, else fp16; in a mapping the longest
            part of the hardware's name counts.
        hardware: The name of the process's GPU, or CPU.
        has_bf16: Whether it computes in bf16 without emulating it.
    """
    if mixed == AUTO:
        return BF16 if has_bf16 else FP16
    if mixed is None or isinstance(mixed, str):
        return mixed or FP32
    names = [name for name in mixed if name != DEFAULT and name.lower() in hardware.lower()]
    return mixed[max(names, key=len, default=DEFAULT)]


def is_by_hardware(mixed: MixedPrecision) -> bool:
    """Whether processes may have different precisions."""
    return mixed == AUTO or isinstance(mixed, Mapping)


def may_be(mixed: MixedPrecision, precision: str) -> bool:
    """Whether a process may compute in a ``precision``."""
    return mixed in (precision, AUTO) if isinstance(mixed, str | None) else precision in mixed.values()


_BLANK = "expected {}, found a blank text"
_check_hardware = kinds.matching(r"(?s).*\S.*", _BLANK.format("a part of the name of a GPU, 'CPU', or 'default'"))
_check_module = kinds.matching(r"(?s).*\S.*", _BLANK.format("the name of a module"))
_FOR_ALL = kinds.choice(BF16, FP16, AUTO)
_BY_HARDWARE = kinds.Entries(kinds.choice(BF16, FP16, FP32), "mapping", _check_hardware)


class MixedPrecisionKind:
    """The value of the key, as any kind reads and writes it."""

    text = "one of `bf16`, `fp16`, `auto`, or mapping, or null"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> MixedPrecision:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if not isinstance(value, Mapping):
            return None if value is None else str(_FOR_ALL.read(value, at, report))
        precisions = _BY_HARDWARE.read(value, at, report)
        if DEFAULT not in precisions:
            hint = next(filter(None, (kinds.suggestion(name, [DEFAULT]) for name in precisions)), "")
            report(at, f"add an entry 'default', for hardware without an entry of its own{hint}")
        return precisions

    def write(self, value: MixedPrecision) -> object:
        """As :meth:`Kind.write`."""
        return dict(value) if isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """Modules whose activations the backward pass recomputes, so that they need not be kept."""

    @staticmethod
    def expand(value: object) -> object:
        """The section that true or a list of classes stands for; None for false. Another ``value`` unchanged."""
        if isinstance(value, bool):
            return {} if value else None
        return value if value is None or isinstance(value, Mapping) else {"wrap": value}

    wrap: Annotated[tuple[str, ...], kinds.Items(kinds.text("name of a class"), "list of classes")] = ()
    """The classes of these modules, such as `[Block]`; if empty, all elements of the model's module lists and sequences
    that consist of modules themselves."""
    save: Annotated[tuple[str, ...], kinds.Items(kinds.text("name of an operator"), "list of operators")] = ()
    """Operators of torch whose results are kept anyway, such as the slow ones, `[mm, addmm]`."""


# As torch's -1 in the shape of a view: what the others leave.
REST = -1


_SIZE = kinds.whole_number(1, why=f"or {REST} for the rest")
MeshSize = Annotated[
    int, kinds.Scalar(f"{_SIZE.text}, or {REST}", lambda value: REST if value == REST else _SIZE.parse(value))
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """How many processes each dimension of the mesh has. Their product is the number of processes."""

    pp: MeshSize = 1
    """Pipeline parallelism: over how many processes the stages of the model are divided. -1: as many as the other
    dimensions leave."""
    dp: MeshSize = REST
    """Data parallelism: into how many parts the batch is divided; `name` says how the model is held in each. -1: as
    many as the other dimensions leave."""
    tp: MeshSize = 1
    """Tensor parallelism: over how many processes each layer of the `plan` is divided; these are neighbouring ranks,
    best on one node. -1: as many as the other dimensions leave."""

    @property
    def is_whole(self) -> bool:
        """Whether each size is a number, and at most one of them is to be the rest."""
        sizes = (self.pp, self.dp, self.tp)
        # A size that cannot be read is None.
        return None not in sizes and sizes.count(REST) <= 1

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """More than one size that is to be the rest."""
        rest = [name for name, size in self._items() if size == REST]
        if len(rest) > 1:
            yield rest[-1], f"only one size can be {REST}: the rest"

    def sizes(self, world_size: int) -> MeshSpec:
        """The mesh of this many processes, without a size that is to be the rest.

        Args:
            world_size: How many processes there are.

        Raises:
            ValueError: The sizes do not multiply to that; the message is a phrase.
        """
        fixed = {name: size for name, size in self._items() if size != REST}
        rest, left = divmod(world_size, math.prod(fixed.values()))
        has_rest = len(fixed) < len(self._items())
        if left or (rest != 1 and not has_rest):
            written = " x ".join(f"{name} {size}" for name, size in fixed.items() if size != 1 or len(fixed) == 1)
            raise ValueError(f"{written or 'dp 1'} {'do not divide' if has_rest else 'are not'} {world_size} processes")
        return MeshSpec(**{name: rest if size == REST else size for name, size in self._items()})

    def _items(self) -> tuple[tuple[str, int], ...]:
        return ("pp", self.pp), ("dp", self.dp), ("tp", self.tp)


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """A schedule of torch.distributed.pipelining.

    ``name``: torch's. ``per_rank``: how many stages each rank has. ``fills``: whether it needs as many microbatches as
    ranks.
    """

    name: str
    per_rank: int = 1
    fills: bool = False

    @property
    def forward(self) -> str:
        """The schedule for forward passes alone, for any number of microbatches: all schedules have the same order."""
        return "GPipe" if self.per_rank == 1 else "LoopedBFS"

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The stages of a ``rank`` among so many ``ranks`` of a pipeline, in order."""
        return list(range(rank, ranks * self.per_rank, ranks))


# By their names in a spec, which are torch's in lower case. Schedules that compute the gradients of weights apart from
# the gradients of inputs (zero bubble) are left out: with FSDP2 they lose gradients (torch 2.13).
SCHEDULES = {
    "gpipe": PipelineSchedule("GPipe"),
    "1f1b": PipelineSchedule("1F1B", fills=True),
    "interleaved1f1b": PipelineSchedule("Interleaved1F1B", per_rank=2, fills=True),
    "loopedbfs": PipelineSchedule("LoopedBFS", per_rank=2),
}
DEFAULT_SCHEDULE = "1f1b"


def even_split(sizes: Sequence[int], stages: int) -> list[int]:
    """Where to begin each stage, so that none is without parameters in vain, and the largest is as small as possible.

    Args:
        sizes: The parameters of each part of a model, in order; at least as many as there are stages.
        stages: How many stages there are, each of at least one part.

    Returns:
        The index of the first part of each stage; the first is 0.
    """
    sums = [0, *accumulate(sizes)]
    count = len(sizes)
    # By the number of stages, if they are the first parts: how many have no parameters, the size of the largest one,
    # and where the last one begins.
    best = [[(int(not sums[end]), float(sums[end]), 0) for end in range(count + 1)]]
    for stage in range(1, stages):
        row = [(count, float("inf"), 0)] * (count + 1)
        for end in range(stage + 1, count + 1):
            row[end] = min(
                (
                    best[-1][begin][0] + (sums[end] == sums[begin]),
                    max(best[-1][begin][1], sums[end] - sums[begin]),
                    begin,
                )
                for begin in range(stage, end)
            )
        best.append(row)
    begins, end = [], count
    for row in reversed(best):
        end = row[end][2]
        begins.append(end)
    return begins[::-1]


POWERSGD, TOPK, HIERARCHICAL = "powersgd", "topk", "hierarchical"
HOOKS = (BF16, FP16, POWERSGD, TOPK, HIERARCHICAL)
# Hooks that keep the unsent part of a gradient.
WITH_FEEDBACK = (POWERSGD, TOPK)
_OF_POWERSGD = (
    "matrix_approximation_rank", "start_powersgd_iter", "min_compression_rate", "use_error_feedback", "warm_start",
    "orthogonalization_epsilon", "batch_tensors_with_same_shape",
)  # fmt: skip
_HOOKS_OF_OPTIONS = {**dict.fromkeys(_OF_POWERSGD, POWERSGD), "density": TOPK}
OPTIONS = tuple(_HOOKS_OF_OPTIONS)


def hook_conflicts(strategy: StrategySpec) -> Iterator[kinds.Conflict]:
    """What contradicts the hook of a ``strategy`` that may have one."""
    for option, owner in _HOOKS_OF_OPTIONS.items():
        if owner != strategy.hook and strategy.is_set(option):
            yield option, f"it has no effect without 'hook: {owner}'; leave it out"
    if strategy.hook in WITH_FEEDBACK and strategy.static_graph:
        yield "static_graph", f"'hook: {strategy.hook}' needs its buckets before the first step reveals the graph"
    if strategy.hook in WITH_FEEDBACK and may_be(strategy.mixed_precision, FP16):
        yield "hook", "infinite gradients of 'mixed_precision: fp16' would stay in the hook's buffers: use bf16"
    remembers = strategy.use_error_feedback or strategy.warm_start
    if strategy.hook == POWERSGD and remembers and strategy.start_powersgd_iter < 2:
        yield (
            "start_powersgd_iter",
            "PowerSGD cannot begin before the third step, so that this is at least 2, unless 'use_error_feedback' and "
            "'warm_start' are false",
        )


DDP, FSDP, HSDP, ZERO1, TENSOR, PIPELINE, DP = "ddp", "fsdp", "hsdp", "zero1", "tensor", "pipeline", "dp"
STRATEGIES = (DDP, FSDP, HSDP, ZERO1, TENSOR, PIPELINE, DP)
SHARDED = (FSDP, HSDP)
# What others call strategies that are options of ours.
_MEANT = {
    "fsdp2": FSDP, "fully_shard": FSDP, "zero3": FSDP, "zero2": f"{{name: {FSDP}, reshard_after_forward: false}}",
    "zero": ZERO1, "hybrid": HSDP, "hybrid_shard": HSDP, "tp": TENSOR, "tensor_parallel": TENSOR,
    "data_parallel": DP, "dataparallel": DP, "pp": PIPELINE, "pipeline_parallel": PIPELINE,
}  # fmt: skip
COLWISE, COLWISE_REP, ROWWISE, SEQUENCE = "colwise", "colwise_rep", "rowwise", "sequence_parallel"
ON_PARTS = "replicated_with_grad_allreduce"
STYLES = (COLWISE, COLWISE_REP, ROWWISE, SEQUENCE, ON_PARTS)


# As torch, whatever the case.
_SCHEDULE = kinds.Scalar(
    kinds.choice(*SCHEDULES).text,
    lambda word: kinds.choice(*SCHEDULES).parse(word.lower() if isinstance(word, str) else word),
)
# Which strategies the options belong to.
REPLICATED = (DDP, ZERO1)
_NOT_COPIED = tuple(name for name in STRATEGIES if name != DP)
_OF_DDP = ("bucket_cap_mb", "static_graph", "gradient_as_bucket_view", "find_unused_parameters", "hook", *OPTIONS)
_OWNERS = {
    **dict.fromkeys(_OF_DDP, REPLICATED),
    **dict.fromkeys(("reshard_after_forward", "wrap", "offload", "reduce_dtype"), SHARDED),
    # What changes the forward pass of a module does not reach the copies that DataParallel makes of it.
    **dict.fromkeys(("mixed_precision", "activation_checkpointing"), _NOT_COPIED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """How `run.parallelize(model)` distributes the model. `strategy: fsdp` is short for `strategy: {name: fsdp}`."""

    SHORTHAND: ClassVar = "name"
    name: Annotated[str, kinds.choice(*STRATEGIES, meant=_MEANT)] = DDP
    """`ddp`: each process has the whole model. `fsdp`: parameters, gradients and the optimizer's state are sharded over
    all processes. `hsdp`: sharded within each node, and replicated across nodes. `zero1`: as `ddp`, but each process
    has a share of the optimizer's state; needs `run.optimizer(...)`. `tensor`: layers are divided over all processes,
    or over the dimension `tp` of the `mesh`. `pipeline`: the model's parts are divided over all processes, or over the
    dimension `pp`; needs `run.forward_backward(...)`. `dp`: a single process divides each batch over its GPUs; only for
    comparison, since `ddp` is faster."""
    mixed_precision: Annotated[MixedPrecision, MixedPrecisionKind()] = None
    """The precision of the model's forward and backward passes; null: the precision of its parameters. The optimizer
    and checkpoints keep the parameters as they are, and the model's output is fp32. `fp16` scales the loss, and needs
    `run.backward(loss)` and `run.optimizer(...)`. With `ddp` and `zero1` also `auto`: `bf16` on hardware that has it,
    `fp16` elsewhere; or a mapping from parts of GPU names, `CPU` and `default` to `bf16`, `fp16` or `fp32`, such as
    `{default: bf16, V100:
    fp16}`."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """Which modules recompute their activations in the backward pass instead of keeping them: `true`, classes such as
    `[Block]`, or a section. This saves memory and costs time."""
    bucket_cap_mb: Annotated[float, kinds.finite_number(0.001)] | None = None
    """`ddp`, `zero1`: the size in MiB of buckets of gradients; null: torch's."""
    static_graph: bool = False
    """`ddp`, `zero1`: whether each step uses the same parameters, in the same order."""
    gradient_as_bucket_view: bool = False
    """`ddp`, `zero1`: whether gradients are views of the buckets, which saves a copy."""
    find_unused_parameters: bool = False
    """`ddp`, `zero1`: whether some parameters may have no gradient in some steps."""
    hook: Annotated[str, kinds.choice(*HOOKS)] | None = None
    """`ddp`, `zero1`: the communication hook by which gradients are reduced; null: none. `bf16` and `fp16` compress
    them to 16 bits; gradients beyond 65,504 overflow in `fp16`. `powersgd`: matrices as products of two thin ones.
    `topk`: only the largest; the rest is added to the next step's. `hierarchical`: without compression, first within
    each node, then across nodes, each process a part."""
    matrix_approximation_rank: kinds.Positive = 1
    """`hook: powersgd`: how many columns the two matrices have."""
    start_powersgd_iter: kinds.Count = 1000
    """`hook: powersgd`: how many steps are reduced without compression before it begins; at least 2 with
    `use_error_feedback` or `warm_start`."""
    min_compression_rate: kinds.Amount = 2.0
    """`hook: powersgd`: matrices that compression makes smaller by less than this factor are sent whole."""
    use_error_feedback: bool = True
    """`hook: powersgd`: whether the compression error is added to the gradients of the next step."""
    warm_start: bool = True
    """`hook: powersgd`: whether each step starts from the matrices of the previous one."""
    orthogonalization_epsilon: kinds.Amount = 0.0
    """`hook: powersgd`: a small number added to the norms of columns, such as 1e-8 if gradients may be zero."""
    batch_tensors_with_same_shape: bool = False
    """`hook: powersgd`: whether matrices of the same shape are computed together."""
    density: Annotated[float, kinds.finite_number(1e-6, 1)] = 0.01
    """`hook: topk`: the part of the gradients of a bucket that is sent."""
    reshard_after_forward: bool = True
    """`fsdp`, `hsdp`: true: gathered parameters are freed after the forward pass, and gathered again for the backward
    pass (as in ZeRO-3). false: they are kept in between (as in ZeRO-2), which is faster and takes more memory."""
    wrap: Annotated[tuple[str, ...], kinds.Items(kinds.text("name of a class"), "list of classes")] = ()
    """`fsdp`, `hsdp`: the classes of the modules that are gathered one at a time, such as `[Block]`; if empty, the
    elements of the model's module lists and sequences."""
    offload: bool = False
    """`fsdp`, `hsdp`: whether shards of parameters, gradients and the optimizer's state are kept in the node's memory,
    and the optimizer steps there too; needs `resources.mem`."""
    reduce_dtype: Annotated[str, kinds.choice(BF16, FP32)] | None = None
    """`fsdp`, `hsdp`: the precision of the reduction of gradients; null: fp32 with `mixed_precision`, else the
    precision of the parameters."""

    mesh: MeshSpec | None = None
    """How the processes are arranged, such as `{dp: 2, tp: 4}`; null: one dimension."""
    plan: Annotated[Mapping[str, str], kinds.Entries(kinds.choice(*STYLES), "mapping", _check_module)] = field(
        default_factory=dict
    )
    """With tensor parallelism: how modules are divided, by their names, where `*` stands for one part:
    `{blocks.*.mlp.up: colwise, blocks.*.mlp.down: rowwise}`; if empty, the model's own `tensor_plan`. `colwise`: by
    output features. `rowwise`: by input features, as after a `colwise` layer. `colwise_rep`: as `colwise`, with the
    outputs gathered. `sequence_parallel`: a norm or dropout that `sequence_parallel: true` divides.
    `replicated_with_grad_allreduce`: a module that each process applies to its own features, such as a norm of each
    head."""
    sequence_parallel: bool = False
    """With tensor parallelism: whether activations between the divided layers are divided too, along the last dimension
    but one; needs a plan with all modules that have parameters."""

    schedule: Annotated[str, _SCHEDULE] = DEFAULT_SCHEDULE
    """With a pipeline: the order of microbatches in its stages, one of torch's schedules. With `gpipe` and `1f1b` each
    process has one stage, with the other schedules two."""
    microbatches: kinds.Positive | None = None
    """With a pipeline: into how many microbatches the batch of a step is divided, each of them further by
    `resources.accumulation`; null: one for each process of the pipeline."""
    split: Annotated[tuple[str, ...], kinds.Items(kinds.text("name of a module"), "list of modules")] = ()
    """With a pipeline: the parts of the model that begin a new stage, such as `[blocks.4, blocks.8]`; if empty, stages
    have about the same number of parameters."""

    def is_set(self, option: str) -> bool:
        """Whether an ``option`` has another value than its default: a default never contradicts anything."""
        return bool(getattr(self, option) != kinds.keys_of(StrategySpec)[option].default)

    @property
    def is_sharded(self) -> bool:
        """Whether ``fully_shard`` is applied, so that parameters are DTensors."""
        return self.name in SHARDED or self.is_tensor_parallel or self.is_pipeline

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether layers are divided over processes."""
        return self.name == TENSOR or (self.mesh is not None and self.mesh.tp not in (1, None))

    @property
    def is_pipeline(self) -> bool:
        """Whether the parts of the model are divided over processes."""
        return self.name == PIPELINE or (self.mesh is not None and self.mesh.pp not in (1, None))

    @property
    def layout(self) -> MeshSpec:
        """The mesh, also of a strategy that is written without it."""
        if self.mesh is None and self.name in (TENSOR, PIPELINE):
            return MeshSpec(dp=1, tp=REST) if self.name == TENSOR else MeshSpec(dp=1, pp=REST)
        return self.mesh or MeshSpec()

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Options of other strategies."""
        if self.name not in STRATEGIES:
            return
        yield from self._conflicts_of_mesh()
        for option, owners in _OWNERS.items():
            if self.name not in owners and self.is_set(option):
                yield option, f"it has no effect on {self.name!r}, only on {' and '.join(owners)}; leave it out"
        if self.name in REPLICATED:
            yield from hook_conflicts(self)
        if is_by_hardware(self.mixed_precision) and (self.name not in REPLICATED or self.is_sharded):
            yield (
                "mixed_precision",
                "different precisions by hardware need gradients that are reduced in float32: use 'ddp' or 'zero1' "
                "without a 'mesh', or one of bf16 and fp16",
            )
        if self.mixed_precision == FP16 and self.reduce_dtype == BF16:
            yield "reduce_dtype", "gradients of 'mixed_precision: fp16' have more bits than bf16 keeps: leave it out"

    def _conflicts_of_mesh(self) -> Iterator[kinds.Conflict]:
        for dimension, name, is_used, keys in (
            ("tp", TENSOR, self.is_tensor_parallel, ("plan", "sequence_parallel")),
            ("pp", PIPELINE, self.is_pipeline, ("schedule", "microbatches", "split")),
        ):
            for option in filter(self.is_set, () if is_used else keys):
                yield option, f"it has no effect without 'mesh: {{{dimension}: 2}}' or 'name: {name}'; leave it out"
            if self.name == name and self.mesh is not None and getattr(self.mesh, dimension) == 1:
                yield "mesh", f"{name!r} needs a dimension '{dimension}' of more than one process"
        if not (self.is_tensor_parallel or self.is_pipeline):
            return
        if self.name == DP:
            yield "mesh", "'dp' is a single process, so there is no other to divide the model with: use 'ddp'"
        if self.name == ZERO1:
            yield "mesh", "'zero1' cannot divide the model as well: use 'fsdp', which also shards the optimizer's state"
        if self.name == HSDP and self.is_pipeline:
            yield "mesh", "'hsdp' arranges shards by nodes, and a pipeline its stages: use 'fsdp' or 'ddp'"
        for option, owners in _OWNERS.items():
            if owners == REPLICATED and self.is_set(option):
                yield (
                    option,
                    "it has no effect on a divided model, which reduces gradients differently; leave it out",
                )


def placement_conflicts(strategy: StrategySpec, *, least: int, ranks: NodeRanks, mem: int | None) -> Iterator[str]:
    """Why these resources do not suit a ``strategy``, as sentences.

    ``least``: the least number of nodes that an attempt may have. ``ranks``: the processes of each, if it has as many
    nodes as it may. ``mem``: the memory of a node, in MiB; None if the spec does not say.
    """
    world_size = ranks.world_size
    if strategy.name == HSDP and len(ranks.counts) == 1:
        yield "'hsdp' replicates the model across nodes, but there is only one: use 'fsdp', or raise 'resources.nodes'"
    elif strategy.name == HSDP and not ranks.are_equal:
        yield (
            "'hsdp' shards the model in the same way within each node, but nodes have different numbers of processes: "
            "use 'fsdp', or set the same 'procs_per_node' for all components"
        )
    elif strategy.name == HSDP and world_size == len(ranks.counts):
        yield (
            "'hsdp' shards the model within a node, which has only one process: use 'ddp' or 'fsdp', or raise "
            "'resources.procs_per_node'"
        )
    if strategy.hook == HIERARCHICAL and (len(ranks.counts) == 1 or world_size == len(ranks.counts)):
        where = "there is only one node" if len(ranks.counts) == 1 else "each node has only one process"
        yield f"'hook: hierarchical' reduces within nodes and then across them, but {where}: leave it out"
    elif strategy.hook == HIERARCHICAL and not ranks.are_equal:
        yield "'hook: hierarchical' needs the same number of processes on each node: leave it out"
    if strategy.name == DP and world_size > 1:
        yield (
            f"'dp' is a single process, but there are {world_size}: set 'resources.nodes' and "
            "'resources.procs_per_node' to 1, or use 'ddp'"
        )
    yield from _layout_conflicts(strategy, least, ranks)
    if strategy.is_sharded and strategy.offload and mem is None:
        yield "'offload' keeps the shards in the memory of the node: set 'resources.mem', too"


def _layout_conflicts(strategy: StrategySpec, least: int, ranks: NodeRanks) -> Iterator[str]:
    """Why the sizes of a mesh do not multiply to the processes, or a schedule does not suit its stages."""
    # A wrong size or schedule is None.
    if not strategy.layout.is_whole:
        return
    most = len(ranks.counts)
    # An attempt may get any number of nodes in this range.
    for count in range(least, most + 1):
        try:
            pp = strategy.layout.sizes(sum(ranks.counts[:count])).pp
        except ValueError as problem:
            on_nodes = f"on {count} nodes " if least != most else ""
            yield f"'mesh': {on_nodes}{problem}, which are 'resources.nodes' x 'resources.procs_per_node'"
            return
    if not strategy.is_pipeline or not strategy.schedule:
        return
    schedule = SCHEDULES[strategy.schedule]
    if schedule.fills and strategy.microbatches is not None and strategy.microbatches < pp:
        yield (
            f"'schedule: {strategy.schedule}' needs at least as many microbatches as the pipeline has processes, "
            f"{pp}, and 'microbatches' is {strategy.microbatches}: raise it, or use gpipe"
        )
    stages = pp * schedule.per_rank
    if strategy.split and len(strategy.split) != stages - 1:
        yield f"'split' makes {len(strategy.split) + 1} stages, but 'schedule: {strategy.schedule}' needs {stages}"


def mixed_conflicts(strategy: StrategySpec | None, *, deterministic: bool) -> Iterator[str]:
    """Why ``resources.mixed`` does not suit a ``strategy``, or ``deterministic``, as sentences."""
    if deterministic:
        yield "'mixed' divides batches by measured times, and no two runs repeat those: leave 'deterministic' out"
    if strategy is None:
        return
    if strategy.name not in REPLICATED or strategy.is_tensor_parallel:
        yield (
            "'mixed' needs the speed of each process, and that can only be measured if none waits for others before "
            "it has its gradients: use 'strategy: ddp' or 'zero1', without a 'mesh'"
        )
    elif strategy.hook == POWERSGD:
        yield "'mixed' needs the speed of each process, and with 'hook: powersgd' processes wait for each other"
    elif strategy.static_graph:
        yield (
            "with 'mixed' processes may divide their samples into different numbers of microbatches, and "
            "'static_graph' reduces each of them over all processes: leave it out"
        )


def crossing_layers(strategy: StrategySpec, ranks: NodeRanks) -> str | None:
    """What to warn of where divided layers are on several nodes, as a sentence; None if each layer is on one.

    Args:
        strategy: Of the spec.
        ranks: The processes of each node, if an attempt has as many nodes as it may.
    """
    tp = strategy.layout.sizes(ranks.world_size).tp
    # Neighbouring ranks share a layer, so that it stays on one node if tp divides the ranks of each.
    if len(ranks.counts) == 1 or not any(count % tp for count in ranks.counts):
        return None
    return (
        f"each layer is divided over {tp} processes (tp), but a node has {min(ranks.counts)}, so layers communicate "
        "between nodes in every step; 'tp' should divide 'resources.procs_per_node'"
    )
