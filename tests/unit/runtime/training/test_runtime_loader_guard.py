"""The guard that ranks without a session get when they import torch."""

from __future__ import annotations

import importlib
import multiprocessing
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.program import program

from slurmtrain.runtime.training import loader_guard
from slurmtrain.runtime.training.child_signals import ChildGuard

PROJECT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader_guard, "_kept", [])
    # The next test starts processes that know nothing of this guard.
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_config", dict(vars(process)["_config"]))
    yield
    loader_guard._kept.clear()


def test_torch_finds_the_guard_among_its_entry_points() -> None:
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = declared["torch.backends"]["slurmtrain"].partition(":")
    assert getattr(importlib.import_module(module), name) is loader_guard.guard_loaders


def test_a_rank_is_guarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMTRAIN_ATTEMPT_DIR", "/somewhere")
    loader_guard.guard_loaders()
    loader_guard.guard_loaders()
    assert [type(each) for each in loader_guard._kept] == [ChildGuard]


def test_what_goes_wrong_does_not_keep_a_script_from_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no guard")

    monkeypatch.setenv("SLURMTRAIN_ATTEMPT_DIR", "/somewhere")
    monkeypatch.setattr("slurmtrain.runtime.training.child_signals.ChildGuard", fail)
    loader_guard.guard_loaders()
    assert loader_guard._kept == []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_leaves_the_guarding_to_its_parent_even_while_it_is_starting(method: str, tmp_path: Path) -> None:
    text = f"""
import multiprocessing, os
os.environ["SLURMTRAIN_ATTEMPT_DIR"] = "/somewhere"
from slurmtrain.runtime.training import loader_guard
loader_guard.guard_loaders()  # as when torch is imported by a module that children import too
at_import = len(loader_guard._kept)

def report():
    loader_guard.guard_loaders()
    print(at_import, len(loader_guard._kept), flush=True)

if __name__ == "__main__":
    loader_guard._kept.clear()
    child = multiprocessing.get_context({method!r}).Process(target=report)
    child.start()
    child.join()
"""
    with program(text, tmp_path / "rank.py") as process:
        assert process.line() == ("1 0" if method == "fork" else "0 0")
        assert process.ended() == (0, "")
