"""Hooks, settings and fixtures for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import selection
from helpers.postgres_server import PostgresServer, postgres_server
from helpers.where_time_goes import WhereTimeGoes
from hypothesis import HealthCheck, settings

from slurmtrain.model.urls import DatabaseUrl

# Machines are shared, so the duration of an example means nothing.
settings.register_profile(
    "shared",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("TEST_EXAMPLES", "25")),
)
settings.load_profile("shared")

# A shell makes background commands ignore Ctrl-C, and their children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every agent imports numpy with torch, and the threads of its BLAS spin for a sixth of a second each time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent
# The slowest files: in a parallel run, a slow file that started last would delay the end. Those of a cluster mostly
# wait and the others mostly compute, so that both kinds at the same time keep all cores busy.
LONGEST = (
    # Not long, if it is among the first: workers of loaders that are forked from a process which has run thousands of
    # tests take torch's 5 s each to end.
    "unit/runtime/training/test_runtime_loader.py",
    "cluster/test_slurm_runs.py",
    "local/test_runs.py",
    "cluster/test_slurm_interruptions.py",
    "local/test_faults.py",
    "cluster/test_slurm_ledger.py",
    "local/test_launchers.py",
    "cluster/test_slurm_asking.py",
    "local/test_stops.py",
    "cluster/test_slurm_packs.py",
    "local/test_docs_examples.py",
    "cluster/test_slurm_chains.py",
    "local/test_drill.py",
    "cluster/test_slurm_network.py",
    "local/test_kill_and_resume.py",
    "cluster/test_slurm_kills.py",
    "local/test_locks.py",
    "cluster/test_slurm_requeues.py",
    "local/test_experiments.py",
    "cluster/test_slurm_arrays.py",
    "cluster/test_slurm_search.py",
    "local/test_hangs.py",
    "local/test_experiments_gpt.py",
    "cluster/test_slurm_chaos.py",
    "unit/cli/test_cli_kills.py",
    "cluster/test_slurm_launchers.py",
    "local/test_mlflow_server.py",
    "cluster/test_slurm_strangers.py",
    "local/test_checkpoint_commands.py",
    "cluster/test_slurm_forks.py",
    "local/test_trainers.py",
    "cluster/test_slurm_code.py",
    "unit/cli/test_cli_full_disk.py",
    "cluster/test_slurm_privacy.py",
    "unit/cli/test_cli_conditions.py",
    "cluster/test_slurm_locks.py",
    "local/test_forks.py",
    "cluster/test_slurm_stops.py",
    "local/test_privacy.py",
    "cluster/test_slurm_trainers.py",
    "local/test_code.py",
    "cluster/test_slurm_lost_files.py",
    "unit/runtime/checkpoint/test_checkpoint_kills.py",
    "local/test_tour.py",
    "local/test_odd_names.py",
    "local/test_repeat.py",
    "unit/runtime/checkpoint/test_formats_of_trainers.py",
    "local/test_ui.py",
    "local/test_script_metrics.py",
    "unit/plugins/test_export.py",
    "local/test_own_checkpoints.py",
    "unit/model/run/test_model_events.py",
    "unit/test_fuzz.py",
    "unit/runtime/checkpoint/test_runtime_saver_states.py",
    "unit/ops/test_ops_untrusted_files.py",
    "local/test_python_docs.py",
    "local/test_deleted_runs.py",
    "unit/cli/test_cli.py",
    "unit/runtime/training/test_runtime_child_signals.py",
    "local/test_top.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that ``scripts/test`` sets."""
    parser.addoption("--where-time-goes", action="store_true", help="print the time of tests by folder and file")
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Select tests, and measure them, as options ask for it."""
    # Until the last test is known all that is made stays: looking for garbage meanwhile, and later again among the
    # modules and ten thousand tests, takes a tenth of the time of a test run.
    gc.disable()
    config.pluginmanager.register(selection.Selection(config))
    if config.getoption("--where-time-goes"):
        config.pluginmanager.register(WhereTimeGoes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest files."""
    places = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Look for garbage again, but seldom among what lasts."""
    # Both together move all objects to the oldest generation. What is frozen for good would keep sessions from doing so
    # after their own imports, which then take half again as long.
    gc.freeze()
    gc.unfreeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The names of directories for the files of whoever runs a test, none of which is there yet."""
    home = tmp_path_factory.mktemp("homes")
    return (home / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _a_clean_environment(monkeypatch: pytest.MonkeyPatch, _homes: Iterator[Path]) -> None:
    """Ignore the configuration and cache of whoever runs the tests; this interpreter is the ``python`` of commands."""
    for name in list(os.environ):
        if name.startswith(("SLURMTRAIN_", "MLFLOW_")):
            monkeypatch.delenv(name)
    home = next(_homes)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "no-config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server, started by the first test of this process that needs it."""
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def registry_address(request: pytest.FixtureRequest, tmp_path: Path) -> Path | DatabaseUrl:
    """Where an empty registry of the runs in ``tmp_path`` may be made: a file, or a schema on a server."""
    if request.param == "sqlite":
        return tmp_path / "registry.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.registry(tmp_path)
