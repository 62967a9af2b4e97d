"""The section `strategy`: what suits what, meshes, pipelines, precisions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment.spec import Spec, read_spec, write_spec
from slurmtrain.model.experiment.strategy import (
    ActivationCheckpointing,
    MeshSpec,
    StrategySpec,
    even_split,
    precision_on,
)


def read(strategy: object, **resources: Any) -> tuple[Spec, list[tuple[str, str]]]:
    """The spec with this strategy, and its mistakes: the key of each, and the message."""
    mistakes: list[tuple[str, str]] = []
    data = {"name": "x", "command": "true", "strategy": strategy, "resources": resources}
    spec = read_spec(data, lambda at, message: mistakes.append((".".join(at), message)))
    return spec, mistakes


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        (None, None),
        ("fsdp", StrategySpec(name="fsdp")),
        ({"name": "ddp", "bucket_cap_mb": 5}, StrategySpec(name="ddp", bucket_cap_mb=5)),
        ({"activation_checkpointing": True}, StrategySpec(activation_checkpointing=ActivationCheckpointing())),
        (
            {"name": "zero1", "activation_checkpointing": ["Block"]},
            StrategySpec(name="zero1", activation_checkpointing=ActivationCheckpointing(wrap=("Block",))),
        ),
        (
            {"activation_checkpointing": {"save": ["mm"]}},
            StrategySpec(activation_checkpointing=ActivationCheckpointing(save=("mm",))),
        ),
        (
            {"name": "zero1", "mixed_precision": {"default": "bf16", "V100": "fp16"}},
            StrategySpec(name="zero1", mixed_precision={"default": "bf16", "V100": "fp16"}),
        ),
        ({"mesh": {"tp": 1}}, StrategySpec(name="ddp", mesh=MeshSpec(dp=-1, tp=1))),
    ],
)  # fmt: skip
def test_a_strategy_is_a_name_or_a_section(written: Any, strategy: StrategySpec | None) -> None:
    spec, mistakes = read(written)
    assert (spec.strategy, mistakes) == (strategy, [])
    assert read(write_spec(spec)["strategy"])[0].strategy == strategy


@pytest.mark.parametrize(
    ("strategy", "resources", "key", "message"),
    [
        ("zero3", {}, "strategy", "found 'zero3'; did you mean 'fsdp'?"),
        ({"name": "ZeRO-2"}, {}, "strategy.name", "did you mean '{name: fsdp, reshard_after_forward: false}'?"),
        (True, {}, "strategy", "found True"),
        ("fsdp", {"mixed": True}, "resources", "use 'strategy: ddp' or 'zero1'"),
        ({"hook": "powersgd"}, {"mixed": True}, "resources", "with 'hook: powersgd' processes wait"),
        ({"static_graph": True}, {"mixed": True}, "resources", "different numbers of microbatches"),
        ({"mesh": {"tp": 0}}, {}, "strategy.mesh.tp", "of at least 1, found 0: or -1 for the rest"),
        ({"mesh": {"dp": -1, "tp": -1}}, {}, "strategy.mesh.tp", "only one size can be -1: the rest"),
        ({"mesh": {"dp": 2, "tp": 3}}, {"nodes": 4}, "strategy", "'mesh': dp 2 x tp 3 are not 4 processes"),
        ({"mesh": {"tp": 3}}, {"nodes": 4}, "strategy", "'mesh': tp 3 do not divide 4 processes"),
        ({"name": "pipeline", "schedule": "1f1f"}, {"nodes": 4}, "strategy.schedule", "did you mean '1f1b'?"),
        ({"name": "ddp", "microbatches": 8}, {"nodes": 4}, "strategy.microbatches", "without 'mesh: {pp: 2}'"),
        (
            {"name": "pipeline", "microbatches": 2},
            {"nodes": 4},
            "strategy",
            "and 'microbatches' is 2: raise it",
        ),
        (
            {"name": "pipeline", "schedule": "LoopedBFS", "split": ["a", "b"]},
            {"nodes": 2},
            "strategy",
            "'split' makes 3 stages, but 'schedule: loopedbfs' needs 4",
        ),
        ({"name": "tensor", "mesh": {"dp": 4}}, {"nodes": 4}, "strategy.mesh", "'tensor' needs a dimension 'tp'"),
        ({"name": "zero1", "mesh": {"tp": 2}}, {"nodes": 4}, "strategy.mesh", "'zero1' cannot divide the model"),
        ({"mesh": {"tp": 2}, "hook": "bf16"}, {"nodes": 4}, "strategy.hook", "no effect on a divided model"),
        ({"name": "fsdp", "plan": {"a": "rowwise"}}, {}, "strategy.plan", "no effect without 'mesh: {tp: 2}'"),
        ({"name": "tensor", "plan": {"a": "rows"}}, {}, "strategy.plan.a", "expected one of colwise, colwise_rep"),
        ({"name": "fsdp", "static_graph": True}, {}, "strategy.static_graph", "only on ddp and zero1"),
        ({"mixed_precision": {"V100": "fp16"}}, {}, "strategy.mixed_precision", "add an entry 'default'"),
        (
            {"name": "fsdp", "mixed_precision": {"default": "bf16"}},
            {},
            "strategy.mixed_precision",
            "use 'ddp' or 'zero1' without a 'mesh'",
        ),
        ({"hook": "topk", "mixed_precision": "auto"}, {}, "strategy.hook", "would stay in the hook's buffers"),
        (
            {"name": "fsdp", "mixed_precision": "fp16", "reduce_dtype": "bf16"},
            {},
            "strategy.reduce_dtype",
            "'mixed_precision: fp16' have more bits than bf16",
        ),
        ({"name": "fsdp", "offload": True}, {}, "strategy", "'offload' keeps the shards in the memory of the node"),
        ("dp", {"procs_per_node": 4}, "strategy", "'dp' is a single process, but there are 4: set 'resources.nodes'"),
        (
            {"name": "dp", "mesh": {"dp": 1, "tp": -1}},
            {},
            "strategy.mesh",
            "so there is no other to divide the model with",
        ),
        ("hsdp", {"procs_per_node": 4}, "strategy", "there is only one: use 'fsdp', or raise 'resources.nodes'"),
        ({"hook": "hierarchical"}, {"procs_per_node": 2}, "strategy", "there is only one node: leave it out"),
        ({"hook": "hierarchical"}, {"nodes": 2}, "strategy", "each node has only one process: leave it out"),
        ("hsdp", {"nodes": 2}, "strategy", "which has only one process: use 'ddp' or 'fsdp'"),
        ({"name": "hsdp", "mesh": {"pp": 2}}, {"nodes": 2, "procs_per_node": 2}, "strategy.mesh", "'fsdp' or 'ddp'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_key(strategy: Any, resources: dict[str, Any], key: str, message: str) -> None:
    [(at, text)] = read(strategy, **resources)[1]
    assert at == key
    assert message in text


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"hook": "powersgd", "start_powersgd_iter": 1}, "start_powersgd_iter", "so that this is at least 2"),
        ({"hook": "powersgd", "start_powersgd_iter": 0, "warm_start": False}, "start_powersgd_iter", "at least 2"),
        ({"hook": "powersgd", "density": 0.1}, "density", "it has no effect without 'hook: topk'"),
        ({"hook": "topk", "matrix_approximation_rank": 2}, "matrix_approximation_rank", "without 'hook: powersgd'"),
        ({"warm_start": False}, "warm_start", "without 'hook: powersgd'"),
        ({"hook": "topk", "density": 0}, "density", "expected a number from 1e-06 to 1, found 0"),
        ({"hook": "topk", "static_graph": True}, "static_graph", "needs its buckets before the first step"),
        ({"name": "fsdp", "density": 0.1}, "density", "only on ddp and zero1"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_options_of_a_hook_is_named_with_its_key(
    options: dict[str, Any], key: str, message: str
) -> None:
    [(at, text)] = read({"name": "ddp", **options}, nodes=2, procs_per_node=2)[1]
    assert at == f"strategy.{key}"
    assert message in text


def test_an_elastic_run_may_have_a_single_node_with_hsdp_and_memory_allows_offload() -> None:
    resources = {"nodes": {"min": 1, "max": 2}, "procs_per_node": 2, "mem": "4GB"}
    assert read({"name": "hsdp", "offload": True}, **resources)[1] == []


SIZES = st.sampled_from((1, 2, 3))


@given(
    sizes=st.fixed_dictionaries({"pp": SIZES, "dp": SIZES, "tp": SIZES}), rest=st.sampled_from(("pp", "dp", "tp", ""))
)
def test_the_sizes_of_a_mesh_multiply_to_the_processes_or_are_refused(sizes: dict[str, int], rest: str) -> None:
    product = math.prod(sizes.values())
    mesh = MeshSpec(**{**sizes, **({rest: -1} if rest else {})})
    assert mesh.sizes(product) == MeshSpec(**sizes)
    left = product // sizes[rest] if rest else product
    for world_size in range(1, 2 * product):
        if world_size % left if rest else world_size != product:
            with pytest.raises(ValueError, match=f"{world_size} processes"):
                mesh.sizes(world_size)


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=7), data=st.data())
def test_the_largest_stage_is_as_small_as_possible_and_none_is_empty_in_vain(
    sizes: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(sizes)))

    def largest(begins: Sequence[int]) -> int:
        return max(sum(sizes[begin:end]) for begin, end in itertools.pairwise((*begins, len(sizes))))

    begins = even_split(sizes, stages)
    assert (begins[0], len(begins), begins) == (0, stages, sorted(set(begins)))
    if len(sizes) - sizes.count(0) < stages:
        return
    assert all(sum(sizes[begin:end]) for begin, end in itertools.pairwise((*begins, len(sizes))))
    others = itertools.combinations(range(1, len(sizes)), stages - 1)
    assert largest(begins) == min(largest((0, *other)) for other in others)


BY_GPU = {"default": "bf16", "v100": "fp16", "V100-SXM3": "fp32", "CPU": "fp32"}


@pytest.mark.parametrize(
    ("mixed", "hardware", "has_bf16", "precision"),
    [
        (None, "Tesla V100-SXM2-16GB", False, "fp32"),
        ("bf16", "Tesla V100-SXM2-16GB", False, "bf16"),
        ("auto", "NVIDIA A100-SXM4-80GB", True, "bf16"),
        ("auto", "Tesla T4", False, "fp16"),
        (BY_GPU, "NVIDIA A100-SXM4-80GB", True, "bf16"),
        (BY_GPU, "Tesla V100-SXM2-16GB", False, "fp16"),
        (BY_GPU, "Tesla V100-SXM3-32GB", False, "fp32"),
        (BY_GPU, "CPU", True, "fp32"),
    ],
)
def test_the_longest_part_of_the_name_decides_and_auto_asks_the_hardware(
    mixed: Any, hardware: str, has_bf16: bool, precision: str
) -> None:
    assert precision_on(mixed, hardware, has_bf16=has_bf16) == precision
