"""Loading a spec, and the mistakes of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.specfiles import PYTHON, Load, Mistakes

from slurmtrain.errors import SpecError
from slurmtrain.specfile import SpecFile, load_spec


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Write a spec to ``exp.yaml`` and load it."""

    def load(text: str, *overrides: str, sweep: Sequence[str] = (), cwd: Path = tmp_path) -> SpecFile:
        path = tmp_path / "exp.yaml"
        path.write_text(text)
        return load_spec(path, overrides, sweep, cwd=cwd, python=PYTHON)

    return load


@pytest.fixture
def mistakes(load: Load, tmp_path: Path) -> Mistakes:
    """The mistakes of a spec as (where, key, message); the place in the file is the bare number of the line."""

    def mistakes(text: str, *overrides: str, sweep: Sequence[str] = ()) -> list[tuple[str, str, str]]:
        with pytest.raises(SpecError) as raised:
            load(text, *overrides, sweep=sweep)
        assert raised.value.exit_code == 2
        file = f"{tmp_path / 'exp.yaml'}:"
        return [(mistake.where.removeprefix(file), mistake.key, mistake.message) for mistake in raised.value.mistakes]

    return mistakes
