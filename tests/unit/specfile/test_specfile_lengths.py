"""What is too long for a variable, an argument or a batch script is refused at its key, and its neighbour is not."""

from __future__ import annotations

from typing import Any

import pytest

from slurmtrain.model.spec.spec import read_spec, write_spec
from slurmtrain.specfile.recordable import excesses

# The longest variable has 128 KiB, with its name, the sign in between and the NUL at its end.
_LONGEST = (128 << 10) - len("A=") - 1
_WORD = " " + "x" * 999


def refused(**keys: Any) -> list[tuple[str, ...]]:
    mistakes: list[str] = []
    spec = read_spec({"name": "n", "command": "c", **keys}, lambda _, message: mistakes.append(message))
    assert not mistakes
    mistakes_of_length = list(excesses(spec, write_spec(spec)))
    assert all(len(message) < 200 for _, message in mistakes_of_length)
    return [at for at, _ in mistakes_of_length]


@pytest.mark.parametrize(
    ("fits", "exceeds", "at"),
    [
        ({"env": {"A": "x" * _LONGEST}}, {"env": {"A": "x" * (_LONGEST + 1)}}, ("env", "A")),
        ({"env": {"A": "ü" * (_LONGEST // 2)}}, {"env": {"A": "ü" * (_LONGEST // 2 + 1)}}, ("env", "A")),
        ({"command": f"c {'x' * ((128 << 10) - 1)}"}, {"command": f"c {'x' * (128 << 10)}"}, ("command",)),
        ({"command": "c" + _WORD * 1000}, {"command": "c" + _WORD * 1100}, ("command",)),
        (
            {"env": {f"A{i}": "x" * 100_000 for i in range(10)}},
            {"env": {f"A{i}": "x" * 100_000 for i in range(11)}},
            ("env",),
        ),
        ({"setup": ["x" * 1000] * 1000}, {"setup": ["x" * 1000] * 1100}, ("setup",)),
        ({"teardown": ["x" * 1000] * 1000}, {"teardown": ["x" * 1000] * 1100}, ("teardown",)),
        ({"params": {"x": ["f" * 100] * 9000}}, {"params": {"x": ["f" * 100] * 41_000}}, ("params",)),
        ({"params": {"x": {"n" * 250: 1}}}, {"params": {"x": {"n" * 251: 1}}}, ("params", "x")),
        ({"workdir": "w" * 4096}, {"workdir": "w" * 4097}, ("workdir",)),
        ({"slurm": {"comment": "c" * 65_536}}, {"slurm": {"comment": "c" * 65_537}}, ("slurm", "comment")),
        ({"code": {"exclude": ["a" * 500] * 1000}}, {"code": {"exclude": ["a" * 500] * 2200}}, ("code",)),
        (
            {"after": [f"before-{i}" for i in range(1000)]},
            {"after": [f"{'b' * 58}{i:06}" for i in range(17_000)]},
            ("after",),
        ),
    ],
)
def test_a_value_is_refused_once_it_is_too_long(
    fits: dict[str, Any], exceeds: dict[str, Any], at: tuple[str, ...]
) -> None:
    assert refused(**fits) == []
    assert refused(**exceeds) == [at]
