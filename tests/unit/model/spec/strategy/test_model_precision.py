"""In which precision a process computes, by what it computes on."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.strategy import precision_on

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
