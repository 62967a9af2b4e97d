"""The runs of a scaling study: which keys of a spec each of them sets. Pure.

A spec says how large its batch is, in samples of all processes or of each: ``strong`` scaling keeps the number of all,
``weak`` scaling the number of each.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmtrain.errors import UserError
from slurmtrain.model.experiment.kinds import Section, suggestion
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.strategy import BF16, DP, FP16, FP32, FSDP, SHARDED, STRATEGIES, StrategySpec
from slurmtrain.model.experiment.values import value_at, write_node_memory

STRONG, WEAK = "strong", "weak"
TOTAL, PROCESS = "total", "process"
Setting = Mapping[str, Any]
"""What a run sets, by the key of the spec."""

# What scripts call the batch; not the batch of an evaluation.
_BATCH = re.compile(r"(?:.*_)?(?:batch|batch_?size|bsz?)(?:_per_\w+)?", re.IGNORECASE)
_OTHER_BATCH = re.compile(r"(?:^|_)(?:eval|evaluation|val|valid|validation|test|num|n)(?:_|$)", re.IGNORECASE)
_OF_PROCESS = re.compile(r"(?:^|_)(?:per|micro|local)(?:_|$)|_per_", re.IGNORECASE)
# The literature has names of its own for these kinds of FSDP.
_ZERO = {"zero2": False, "zero3": True}
_PRECISIONS = (BF16, FP16, FP32)


@dataclass(frozen=True, slots=True)
class BatchKey:
    """The key of a spec that holds the batch size, of all processes or of each.

    ``counts``: ``total`` or ``process``.
    """

    key: str
    counts: str = TOTAL

    def __str__(self) -> str:
        return f"{self.key}, the samples of {'all processes' if self.counts == TOTAL else 'each process'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """What a study varies."""

    nodes: Sequence[int] = ()
    procs: Sequence[int] = ()
    """Numbers of processes per node, with as many GPUs each as in the spec."""
    strategies: Sequence[str] = ()
    hardware: bool = False
    """Whether it compares the kinds of nodes in ``resources.components``."""
    batch: str | None = None
    """``strong`` or ``weak``; None: strong, as far as the key of the batch is known."""
    batch_key: str | None = None
    """The key of the batch; None: it is looked for among ``params``."""
    batch_of: str | None = None
    """What the key counts, ``total`` or ``process``; None: its name says so."""


def find_batch(params: Mapping[str, Any], key: str | None = None, counts: str | None = None) -> BatchKey | None:
    """The key of the batch; None if no parameter is called like one.

    Args:
        params: The parameters of the spec.
        key: The key as the user has named it; None: it is looked for.
        counts: ``total`` or ``process``; None: the name decides.

    Raises:
        UserError: Several parameters may be meant.
    """
    if key is None:
        names = [
            name
            for name, value in params.items()
            if _positive_number(value) is not None and _BATCH.fullmatch(name) and not _OTHER_BATCH.search(name)
        ]
        names = ["batch_size"] if "batch_size" in names else names
        if len(names) > 1:
            candidates = " and ".join(f"params.{name}" for name in names)
            raise UserError(f"{candidates} may each be the batch size: name one with --batch-key")
        if not names:
            return None
        key = f"params.{names[0]}"
    by_name = PROCESS if _OF_PROCESS.search(key.rpartition(".")[2]) else TOTAL
    return BatchKey(key, counts or by_name)


def _positive_number(value: object) -> int | None:
    """A positive whole number, also as text; None for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def batch_size(content: Mapping[str, Any], batch: BatchKey) -> int:
    """The batch size in a spec.

    Args:
        content: The spec as plain data.
        batch: Its key.

    Raises:
        UserError: The spec has no such key, or its value is not a number of samples.
    """
    missing = object()
    value = value_at(content, batch.key.split("."), missing)
    if value is missing:
        near = suggestion(batch.key, [f"params.{name}" for name in content.get("params") or {}])
        raise UserError(f"--batch-key: the spec has no key {batch.key!r}{near}")
    size = _positive_number(value)
    if size is None:
        raise UserError(f"--batch-key: {batch.key} is {value!r}, which is not a number of samples")
    return size


def study_settings(spec: Spec, content: Mapping[str, Any], request: StudyRequest) -> list[Setting]:
    """What each run of a study sets, in order.

    Args:
        spec: The spec.
        content: The same as plain data.
        request: What to vary.

    Raises:
        UserError: The request cannot be met.
    """
    if request.hardware:
        settings = list(_of_hardware(spec, request))
    else:
        settings = list(_of_sizes(spec.resources, request))
        if request.strategies:
            chosen = [strategy_section(word, spec.strategy) for word in request.strategies]
            pairs = itertools.product(chosen, settings)
            settings = [_with_strategy(setting, section, spec.resources) for section, setting in pairs]
            # Without GPUs, dp is one process in all sizes.
            settings = [each for number, each in enumerate(settings) if each not in settings[:number]]
    if len(settings) < 2:
        raise UserError(
            "a study needs two points at least: --nodes 1,2,4, --procs 1,2,8, --strategies ddp,fsdp or --hardware"
        )
    batch = find_batch(spec.params, request.batch_key, request.batch_of)
    if batch is None:
        if request.batch or request.batch_of:
            mode = f"--batch {request.batch}" if request.batch else f"--batch-of {request.batch_of}"
            raise UserError(
                f"{mode} needs the key of the batch size, and no parameter of the spec is called like one (such as "
                "params.batch_size): name it with --batch-key"
            )
        return settings
    size = batch_size(content, batch)
    at_first = spec.resources.most_ranks.world_size
    return [_with_batch(setting, spec, batch, (size, at_first), request.batch or STRONG) for setting in settings]


def _with_batch(setting: Setting, spec: Spec, batch: BatchKey, at: tuple[int, int], mode: str) -> Setting:
    """A setting with the batch that belongs to its number of processes. ``at``: the spec's batch and processes."""
    size, at_first = at
    processes = size_of_setting(setting, spec.resources)
    # The key follows the number of processes only where one of the two is what stays.
    if (mode == STRONG) == (batch.counts == TOTAL):
        return setting
    factors = (size, processes, at_first) if mode == WEAK else (size, at_first, processes)
    scaled, left = divmod(factors[0] * factors[1], factors[2])
    if left or not scaled:
        raise UserError(
            f"{batch.key}={size} on {at_first} processes is no whole number of samples on {processes} ({mode} "
            f"scaling): choose another, such as {batch.key}={factors[2] * max(1, size // factors[2])}"
        )
    return {**setting, batch.key: scaled}


def size_of_setting(setting: Setting, resources: ResourcesSpec) -> int:
    """How many processes a run has with this ``setting``; ``resources``: what the spec says."""
    components = setting.get("resources.components", resources.components)
    if components:
        return resources.most_ranks.world_size
    nodes = int(setting.get("resources.nodes", resources.nodes.max))
    return nodes * int(setting.get("resources.procs_per_node", resources.local_world_size))


# --- sizes ------------------------------------------------------------------------------------------------------------


def _of_sizes(resources: ResourcesSpec, request: StudyRequest) -> Iterator[Setting]:
    if resources.components and (request.nodes or request.procs):
        raise UserError(
            "the spec has resources.components, whose nodes differ: --hardware compares them, and --nodes and --procs "
            "need a spec with resources.nodes"
        )
    for nodes, procs in itertools.product(request.nodes or (None,), request.procs or (None,)):
        setting = {} if nodes is None else {"resources.nodes": nodes}
        yield setting if procs is None else {**setting, **_of_procs(resources, procs)}


def _of_procs(resources: ResourcesSpec, procs: int) -> Setting:
    """So many processes per node, with the GPUs of as many in the spec."""
    gpus, at_first = resources.gpus_per_node, resources.local_world_size
    if not gpus:
        return {"resources.procs_per_node": procs}
    count, left = divmod(gpus * procs, at_first)
    if left or not count:
        raise UserError(
            f"--procs {procs}: the spec has {gpus} GPUs for {at_first} processes per node, and {procs} would have no "
            "whole number of them"
        )
    return {"resources.procs_per_node": procs, "resources.gpus_per_node": count}


# --- strategies -------------------------------------------------------------------------------------------------------


def strategy_section(word: str, base: StrategySpec | None) -> dict[str, Any]:
    """The section ``strategy`` for a word such as ``fsdp``, ``zero2`` or ``ddp+bf16``.

    Args:
        word: The strategy, and after a plus its precision.
        base: The spec's own strategy, whose precision and activation checkpointing also hold for the others.

    Raises:
        UserError: There is no such strategy.
    """
    name, plus, precision = word.partition("+")
    if name not in STRATEGIES and name not in _ZERO:
        names = [*STRATEGIES, *_ZERO]
        near = suggestion(name, names) or f"; there are {', '.join(names)}"
        raise UserError(f"--strategies: there is no strategy {name!r}{near}")
    if plus and precision not in _PRECISIONS:
        raise UserError(f"--strategies: {word!r}: the precision after '+' is bf16, fp16 or fp32")
    section: dict[str, Any] = {"name": FSDP if name in _ZERO else name}
    if name in _ZERO:
        section["reshard_after_forward"] = _ZERO[name]
    if base is not None and section["name"] != DP:
        section |= _options_of_base(base, section["name"])
    if plus:
        section["mixed_precision"] = None if precision == FP32 else precision
    return section


def _with_strategy(setting: Setting, section: Mapping[str, Any], resources: ResourcesSpec) -> Setting:
    """A setting with a strategy: dp is one process for all GPUs of a node. Raises UserError if there are more nodes."""
    if section["name"] != DP:
        return {"strategy": section, **setting}
    if int(setting.get("resources.nodes", resources.nodes.max)) > 1:
        raise UserError("--strategies: dp is a single process on one node: leave --nodes out, or dp")
    gpus = setting.get("resources.gpus_per_node", resources.gpus_per_node)
    return {"strategy": section, **setting, "resources.procs_per_node": 1, "resources.gpus_per_node": gpus}


def _options_of_base(base: StrategySpec, name: str) -> dict[str, Any]:
    """The options of the spec's strategy that another one of this name has, too."""
    plain = Section(StrategySpec).write(base)
    options = ["mixed_precision", "activation_checkpointing"]
    if name == base.name:
        options = [option for option in plain if option not in ("name", "reshard_after_forward")]
    elif name in SHARDED and base.name in SHARDED:
        options += ["wrap", "offload", "reduce_dtype"]
    return {option: plain[option] for option in options if base.is_set(option)}


def describe_strategy(strategy: StrategySpec | None) -> str:
    """A strategy as a word, such as ``zero2`` or ``ddp+bf16``; with further options, these in brackets."""
    if strategy is None:
        return "ddp"
    name = strategy.name
    if name == FSDP and not strategy.reshard_after_forward:
        name = "zero2"
    mixed = strategy.mixed_precision
    word = f"{name}+{mixed}" if isinstance(mixed, str) else name
    plain = Section(StrategySpec).write(strategy)
    named = ("name", "reshard_after_forward") if strategy.name == FSDP else ("name",)
    ignored = (*named, "mixed_precision") if isinstance(mixed, str) else named
    more = [option for option in plain if option not in ignored and strategy.is_set(option)]
    shown = (
        f"{option}={plain[option]}" if not isinstance(plain[option], Mapping | list) else option for option in more
    )
    return f"{word} ({', '.join(shown)})" if more else word


# --- hardware ---------------------------------------------------------------------------------------------------------

ONE_KIND, MIXED, BY_SPEED = "equal", "mixed", "by speed"
"""Kinds of hardware: all nodes alike; nodes that differ, with equal shares of each batch; with shares by speed."""


def hardware_kind(resources: ResourcesSpec) -> str:
    """Which of the three a run asks for."""
    if resources.mixed:
        return BY_SPEED
    return MIXED if resources.components else ONE_KIND


def _of_hardware(spec: Spec, request: StudyRequest) -> Iterator[Setting]:
    """One process of the first component, as many of its nodes as there are nodes, and all components in both ways."""
    if request.nodes or request.procs or request.strategies:
        raise UserError("--hardware compares the nodes that the spec has: leave --nodes, --procs and --strategies out")
    resources = spec.resources
    if not resources.components:
        raise UserError(
            "--hardware compares the kinds of nodes in 'resources.components', and the spec has none "
            "(docs/mixed-hardware.md)"
        )
    component, own = resources.by_component()[0]
    alike: dict[str, Any] = {
        "resources.components": None, "resources.mixed": False, "resources.cpus_per_proc": own.cpus_per_proc,
        **({"resources.gpu_type": own.gpu_type} if own.gpu_type else {}),
        **({"resources.mem": write_node_memory(own.mem)} if own.mem is not None else {}),
        **{f"slurm.{name}": value for name, value in component.slurm.items()},
    }  # fmt: skip
    procs, gpus = own.local_world_size, own.gpus_per_node
    for nodes, of_node, with_gpus in ((1, 1, max(1, gpus // procs) if gpus else 0), (resources.nodes.max, procs, gpus)):
        sizes = {"resources.nodes": nodes, "resources.procs_per_node": of_node, "resources.gpus_per_node": with_gpus}
        yield {**alike, **sizes}
    # Equal shares on nodes that differ are what preflight refuses by default.
    yield {"resources.mixed": False, "preflight.hardware": "warn"}
    yield {"resources.mixed": True}
