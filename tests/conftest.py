"""Hooks, settings and fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared, so the duration of an example means nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# A shell makes background commands ignore Ctrl-C, and their children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).resolve().parent
# The slowest files, slowest first: in a parallel run, a slow file that started last would delay the end.
LONGEST = (
    "cluster/test_slurm_interruptions.py",
    "cluster/test_slurm_chaos.py",
    "cluster/test_slurm_runs.py",
    "local/test_runs.py",
    "cluster/test_slurm_ledger.py",
    "local/test_faults.py",
    "local/test_trainers.py",
    "cluster/test_slurm_network.py",
    "cluster/test_slurm_asking.py",
    "cluster/test_slurm_drill.py",
    "local/test_kill_and_resume.py",
    "local/test_drill.py",
    "local/test_stops.py",
    "local/test_experiments.py",
    "cluster/test_slurm_kills.py",
    "cluster/test_slurm_stops.py",
    "unit/runtime/checkpoint/test_checkpoint_kills.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def _a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignore the configuration and cache of whoever runs the tests; this interpreter is the ``python`` of commands."""
    for name in list(os.environ):
        if name.startswith(("SLURMTRAIN_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
