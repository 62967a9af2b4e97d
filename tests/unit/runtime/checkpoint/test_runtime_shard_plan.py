"""What stands around a tensor's bytes is what torch.save writes there."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.runtime.checkpoint.shard_plan import can_be_framed, torch_frame

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=numbers) * 3).to(dtype)


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 1000))
def test_a_framed_tensor_loads_as_it_was(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = random_tensor(dtype, shape, seed)
    frame = torch_frame(dtype, tensor.shape)
    content = frame.prefix + bytes_of(tensor) + frame.suffix
    assert frame.length == len(content)
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert (loaded.dtype, loaded.shape) == (dtype, tensor.shape)
    assert bytes_of(loaded) == bytes_of(tensor)


def test_a_frame_differs_from_what_torch_saves_in_checksums_alone() -> None:
    tensor = torch.arange(1000.0)
    frame, saved = torch_frame(tensor.dtype, tensor.shape), io.BytesIO()
    torch.save(tensor, saved)
    content = frame.prefix + bytes_of(tensor) + frame.suffix
    different = [at for at, (one, other) in enumerate(zip(content, saved.getvalue(), strict=True)) if one != other]
    assert len(different) <= 60
    assert all(at >= len(frame.prefix) + frame.size for at in different)


def test_data_begins_where_it_is_aligned() -> None:
    assert {len(torch_frame(torch.float32, torch.Size([n])).prefix) % 64 for n in (1, 7, 1000, 10**6)} == {0}


@pytest.mark.parametrize(
    ("value", "framed"),
    [
        (torch.ones(3), True),
        (torch.nn.Parameter(torch.ones(3)), True),
        (torch.ones(3).to_sparse(), False),
        (3.0, False),
        ([torch.ones(1)], False),
    ],
)
def test_only_plain_dense_tensors_are_framed(value: object, framed: bool) -> None:
    assert can_be_framed(value) is framed
