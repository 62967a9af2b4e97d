"""The section `strategy` of a spec: how the model is distributed over the processes of a run.

A strategy has a name and options, whose keys are the names of torch's arguments; each option belongs to some of the
strategies, and is refused with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from slurmtrain.model.spec import kinds
from slurmtrain.model.spec.kinds import (
    Conflict,
    Entries,
    Items,
    Nullable,
    NullableSection,
    Scalar,
    ShorthandSection,
    declare_key,
    default_of,
    suggestion,
)
from slurmtrain.model.spec.strategy.activation_checkpointing import (
    ActivationCheckpointing,
    ActivationCheckpointingSection,
)
from slurmtrain.model.spec.strategy.hook import HOOKS, OPTIONS, hook_conflicts
from slurmtrain.model.spec.strategy.mesh import REST, MeshSpec
from slurmtrain.model.spec.strategy.pipeline import DEFAULT_SCHEDULE, SCHEDULES
from slurmtrain.model.spec.strategy.precision import (
    BF16,
    FP16,
    FP32,
    MixedPrecision,
    MixedPrecisionKind,
    is_by_hardware,
)

DDP, FSDP, HSDP, ZERO1, TENSOR, PIPELINE, DP = "ddp", "fsdp", "hsdp", "zero1", "tensor", "pipeline", "dp"
STRATEGIES = (DDP, FSDP, HSDP, ZERO1, TENSOR, PIPELINE, DP)
SHARDED = (FSDP, HSDP)
# What others call strategies that are options of ours.
_MEANT = {
    "fsdp2": FSDP,
    "fully_shard": FSDP,
    "zero": ZERO1,
    "zero2": f"{{name: {FSDP}, reshard_after_forward: false}}",
    "zero3": FSDP,
    "hybrid": HSDP,
    "hybrid_shard": HSDP,
    "tp": TENSOR,
    "tensor_parallel": TENSOR,
    "data_parallel": DP,
    "dataparallel": DP,
    "pp": PIPELINE,
    "pipeline_parallel": PIPELINE,
}
COLWISE, COLWISE_REP, ROWWISE, SEQUENCE = "colwise", "colwise_rep", "rowwise", "sequence_parallel"
ON_PARTS = "replicated_with_grad_allreduce"
STYLES = (COLWISE, COLWISE_REP, ROWWISE, SEQUENCE, ON_PARTS)


def _read_name(value: object) -> str:
    if isinstance(value, str) and value in STRATEGIES:
        return value
    hint = ""
    if isinstance(value, str):
        meant = _MEANT.get(value.lower().replace("-", "").replace(" ", "_"))
        hint = f"; did you mean {meant!r}?" if meant else suggestion(value, STRATEGIES)
    raise ValueError(f"expected one of {', '.join(STRATEGIES)}, found {value!r}{hint}")


def _read_density(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"expected a number above 0 and at most 1, found {value!r}")
    return value


def _check_pattern(pattern: str) -> None:
    if not pattern.strip():
        raise ValueError("expected the name of a module, found a blank text")


def _read_schedule(value: object) -> str:
    """As torch, whatever the case. YAML has no other type for a name that begins with a digit."""
    if isinstance(value, str) and value.lower() in SCHEDULES:
        return value.lower()
    hint = suggestion(value.lower(), SCHEDULES) if isinstance(value, str) else ""
    raise ValueError(f"expected one of {', '.join(SCHEDULES)}, found {value!r}{hint}")


_SCHEDULE = Scalar("one of " + ", ".join(f"`{name}`" for name in SCHEDULES), _read_schedule)
_NAME = Scalar("one of " + ", ".join(f"`{name}`" for name in STRATEGIES), _read_name)
# Which strategies the options belong to.
REPLICATED = (DDP, ZERO1)
_NOT_COPIED = tuple(name for name in STRATEGIES if name != DP)
_OWNERS = {
    "bucket_cap_mb": REPLICATED,
    "static_graph": REPLICATED,
    "gradient_as_bucket_view": REPLICATED,
    "find_unused_parameters": REPLICATED,
    "hook": REPLICATED,
    **dict.fromkeys(OPTIONS, REPLICATED),
    "reshard_after_forward": SHARDED,
    "wrap": SHARDED,
    "offload": SHARDED,
    "reduce_dtype": SHARDED,
    # What changes the forward pass of a module does not reach the copies that DataParallel makes of it.
    "mixed_precision": _NOT_COPIED,
    "activation_checkpointing": _NOT_COPIED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpec:
    """How `run.parallelize(model)` distributes the model. `strategy: fsdp` is short for `strategy: {name: fsdp}`."""

    name: str = declare_key(
        DDP,
        _NAME,
        "`ddp`: each process has the whole model. `fsdp`: parameters, gradients and the optimizer's state are sharded "
        "over all processes. `hsdp`: sharded within each node, and replicated across nodes. `zero1`: as `ddp`, but "
        "each process has a share of the optimizer's state, which takes `run.optimizer(...)`. `tensor`: layers are "
        "divided over all processes, or those of the dimension `tp` of the `mesh`. `pipeline`: the model's parts are "
        "divided over all processes, or those of the dimension `pp`, which takes `run.forward_backward(...)`. `dp`: a "
        "single process, which divides each batch over its GPUs: for comparison, since `ddp` is faster.",
    )
    mixed_precision: MixedPrecision = declare_key(
        None,
        MixedPrecisionKind(),
        "The precision of the model's forward and backward passes; null: that of its parameters. For the optimizer and "
        "in checkpoints parameters stay as they are, and the model's output is fp32. `fp16` scales the loss, which "
        "takes `run.backward(loss)` and `run.optimizer(...)`. `auto`, with `ddp` and `zero1`: `bf16` on hardware that "
        "has it, `fp16` on other. A mapping, with these, from parts of the names of GPUs, `CPU` and `default`: "
        "`{default: bf16, V100: fp16}`, also to `fp32`.",
    )
    activation_checkpointing: ActivationCheckpointing | None = declare_key(
        None,
        ActivationCheckpointingSection(),
        "Which modules compute their activations again in the backward pass, instead of keeping them: `true`, classes "
        "such as `[Block]`, or a section. It takes less memory, and more time.",
    )
    bucket_cap_mb: float | None = declare_key(
        None,
        Nullable(kinds.finite_number(0.001)),
        "`ddp`, `zero1`: the size in MiB of the buckets in which gradients are reduced; null: torch's.",
    )
    static_graph: bool = declare_key(
        False, kinds.boolean(), "`ddp`, `zero1`: whether each step uses the same parameters, in the same order."
    )
    gradient_as_bucket_view: bool = declare_key(
        False, kinds.boolean(), "`ddp`, `zero1`: whether gradients are views of the buckets, which saves their copy."
    )
    find_unused_parameters: bool = declare_key(
        False, kinds.boolean(), "`ddp`, `zero1`: whether some parameters may have no gradient in some steps."
    )
    hook: str | None = declare_key(
        None,
        Nullable(kinds.choice(*HOOKS)),
        "`ddp`, `zero1`: the communication hook by which gradients are reduced; null: none. `bf16` and `fp16` compress "
        "them to 16 bits; gradients beyond 65,504 overflow in `fp16`. `powersgd`: matrices as products of two "
        "that have few columns. `topk`: only the largest, the others are added to those of the next step. "
        "`hierarchical`: whole, first within each node, then across nodes, each process a part of them.",
    )
    matrix_approximation_rank: int = declare_key(
        1, kinds.whole_number(1), "`hook: powersgd`: how many columns the two matrices have."
    )
    start_powersgd_iter: int = declare_key(
        1000,
        kinds.whole_number(0),
        "`hook: powersgd`: how many steps are reduced without compression before it begins; at least 2 with "
        "`use_error_feedback` or `warm_start`.",
    )
    min_compression_rate: float = declare_key(
        2.0,
        kinds.finite_number(0),
        "`hook: powersgd`: matrices that become less than so many times smaller are sent whole.",
    )
    use_error_feedback: bool = declare_key(
        True, kinds.boolean(), "`hook: powersgd`: whether what is lost is added to the gradients of the next step."
    )
    warm_start: bool = declare_key(
        True, kinds.boolean(), "`hook: powersgd`: whether a step begins with the matrices of the step before."
    )
    orthogonalization_epsilon: float = declare_key(
        0.0,
        kinds.finite_number(0),
        "`hook: powersgd`: what is added to norms of columns, such as 1e-8 where gradients may be zero.",
    )
    batch_tensors_with_same_shape: bool = declare_key(
        False, kinds.boolean(), "`hook: powersgd`: whether matrices of the same shape are computed together."
    )
    density: float = declare_key(
        0.01,
        Scalar("number above 0 and at most 1", _read_density),
        "`hook: topk`: the part of the gradients of a bucket that is sent.",
    )
    reshard_after_forward: bool = declare_key(
        True,
        kinds.boolean(),
        "`fsdp`, `hsdp`: true: gathered parameters are freed after the forward pass, and gathered again for the "
        "backward pass (as ZeRO-3). false: they are kept in between (as ZeRO-2): faster, and takes more memory.",
    )
    wrap: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("name of a class"), "list of classes"),
        "`fsdp`, `hsdp`: the classes of the modules that are gathered one at a time, such as `[Block]`; if empty, the "
        "elements of the model's module lists and sequences.",
    )
    offload: bool = declare_key(
        False,
        kinds.boolean(),
        "`fsdp`, `hsdp`: whether shards of parameters, gradients and the optimizer's state are kept in the memory of "
        "the node, where the optimizer steps too; takes `resources.mem`.",
    )
    reduce_dtype: str | None = declare_key(
        None,
        Nullable(kinds.choice(BF16, FP32)),
        "`fsdp`, `hsdp`: the precision in which gradients are reduced; null: fp32 with `mixed_precision`, else that "
        "of the parameters.",
    )

    mesh: MeshSpec | None = declare_key(
        None,
        NullableSection(MeshSpec),
        "How the processes are arranged, such as `{dp: 2, tp: 4}`; null: one dimension.",
    )
    plan: Mapping[str, str] = declare_key(
        {},
        Entries(kinds.choice(*STYLES), "mapping", _check_pattern),
        "With tensor parallelism: how modules are divided, by their names, in which `*` stands for one part: "
        "`{blocks.*.mlp.up: colwise, blocks.*.mlp.down: rowwise}`; if empty, that of the model itself, its "
        "`tensor_plan`. `colwise`: by output features. `rowwise`: by input features, such as those of `colwise` before "
        "it. `colwise_rep`: as `colwise`, and the outputs are gathered. `sequence_parallel`: a norm or dropout, which "
        "is divided with `sequence_parallel: true`. `replicated_with_grad_allreduce`: what each process applies to its "
        "features, such as a norm of each head.",
    )
    sequence_parallel: bool = declare_key(
        False,
        kinds.boolean(),
        "With tensor parallelism: whether what lies between the divided layers is divided too, along the last "
        "dimension but one; takes a plan that has all modules with parameters.",
    )

    schedule: str = declare_key(
        DEFAULT_SCHEDULE,
        _SCHEDULE,
        "With a pipeline: in which order its stages compute microbatches, one of torch's schedules. With `gpipe` and "
        "`1f1b` each process has one stage, with the others two.",
    )
    microbatches: int | None = declare_key(
        None,
        Nullable(kinds.whole_number(1)),
        "With a pipeline: into how many microbatches the batch of a step is divided, each of them further by "
        "`resources.accumulation`; null: one for each process of the pipeline.",
    )
    split: tuple[str, ...] = declare_key(
        (),
        Items(kinds.text("name of a module"), "list of modules"),
        "With a pipeline: the parts of the model that begin a new stage, such as `[blocks.4, blocks.8]`; if empty, "
        "stages have about the same number of parameters.",
    )

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

    def conflicts(self) -> Iterator[Conflict]:
        """Options of other strategies."""
        if self.name not in STRATEGIES:
            return
        yield from self._conflicts_of_mesh()
        for option in fields(self):
            owners = _OWNERS.get(option.name, STRATEGIES)
            if self.name not in owners and getattr(self, option.name) != option.default:
                yield (
                    option.name,
                    f"it has no effect on {self.name!r}; it belongs to {' and '.join(owners)}; leave it out",
                )
        if self.name in REPLICATED:
            yield from hook_conflicts(self)
        if is_by_hardware(self.mixed_precision) and (self.name not in REPLICATED or self.is_sharded):
            yield (
                "mixed_precision",
                "precisions by hardware need gradients that are reduced in float32 whatever they were computed in: "
                "use 'ddp' or 'zero1' without a 'mesh', or one of bf16 and fp16",
            )
        if self.mixed_precision == FP16 and self.reduce_dtype == BF16:
            yield "reduce_dtype", "gradients of 'mixed_precision: fp16' have more bits than bf16: leave it out"

    def _conflicts_of_mesh(self) -> Iterator[Conflict]:
        for dimension, name, is_used, keys in (
            ("tp", TENSOR, self.is_tensor_parallel, ("plan", "sequence_parallel")),
            ("pp", PIPELINE, self.is_pipeline, ("schedule", "microbatches", "split")),
        ):
            for option in fields(self) if not is_used else ():
                if option.name in keys and getattr(self, option.name) != default_of(option):
                    yield (
                        option.name,
                        f"it has no effect without 'mesh: {{{dimension}: 2}}' or 'name: {name}'; leave it out",
                    )
            if self.name == name and self.mesh is not None and getattr(self.mesh, dimension) == 1:
                yield "mesh", f"{name!r} needs a dimension '{dimension}' of more than one process"
        if not (self.is_tensor_parallel or self.is_pipeline):
            return
        if self.name == DP:
            yield "mesh", "'dp' is a single process, which has no other to divide the model with: use 'ddp'"
        if self.name == ZERO1:
            yield "mesh", "'zero1' cannot divide the model, too: use 'fsdp', which also shards the optimizer's state"
        if self.name == HSDP and self.is_pipeline:
            yield "mesh", "'hsdp' arranges shards by nodes, and a pipeline its stages: use 'fsdp' or 'ddp'"
        for option in fields(self):
            if _OWNERS.get(option.name) == REPLICATED and getattr(self, option.name) != option.default:
                yield (
                    option.name,
                    "it has no effect where the model is divided: gradients are reduced otherwise there; leave it out",
                )


@dataclass(frozen=True, slots=True)
class StrategySection(ShorthandSection):
    """The section, which may be written as the name of the strategy, or be null."""

    cls: type = StrategySpec
    key: str = "name"

    @property
    def text(self) -> str:
        """As :attr:`Kind.text`."""
        return f"{_NAME.text}, section, or null"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> StrategySpec | None:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if value is None:
            return None
        spec: StrategySpec = ShorthandSection.read(self, value, at, report)
        return spec

    def write(self, value: StrategySpec | None) -> object:
        """As :meth:`Kind.write`."""
        return None if value is None else ShorthandSection.write(self, value)
