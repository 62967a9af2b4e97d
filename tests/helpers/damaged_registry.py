"""A runs root whose registry is to be damaged, and what commands then answer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner

from slurmtrain.cli.status_commands import show_command, status_command
from slurmtrain.config import Config
from slurmtrain.model.run.layout import run_id
from slurmtrain.ops.shared.observe import rebuild
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.registry import queries
from slurmtrain.registry.cells import Sent
from slurmtrain.registry.ingest import ingest
from slurmtrain.registry.store import Store

IDS = [run_id(1_700_000_000_000 + number, number) for number in range(12)]
SENT = Sent("mlflow", "uri", "id", step=5, revision=9)


@dataclass(frozen=True)
class Root:
    """A runs root, whose registry knows all runs and what trackers have of them."""

    runs: Path

    @property
    def registry(self) -> Path:
        return self.runs / "registry.db"

    @property
    def beside(self) -> list[str]:
        """What lies beside the registry and begins with its name; no locks."""
        names = (path.name for path in self.runs.iterdir())
        return sorted(name for name in names if "registry.db" in name and not name.endswith(".lock"))

    def open(self, warn: Callable[[str], None] | None = None) -> Workspace:
        config = Config(runs=self.runs, executor=None, registry=self.registry, mlflow_uri=None)
        return Workspace(config, warn=warn)

    def status(self) -> tuple[list[dict[str, Any]], str]:
        """The runs that ``status --json`` prints, less what only the registry knows, and what it says on stderr."""
        arguments = ["--runs", str(self.runs), "--all", "--json"]
        result = CliRunner().invoke(status_command, arguments, standalone_mode=False, catch_exceptions=False)
        runs = json.loads(result.stdout)["runs"]
        return [{key: run[key] for key in run.keys() - {"mirrored", "trackers"}} for run in runs], result.stderr

    def show(self, run: str) -> dict[str, Any]:
        """What ``show --json`` prints."""
        arguments = ["--runs", str(self.runs), run, "--json"]
        result = CliRunner().invoke(show_command, arguments, standalone_mode=False, catch_exceptions=False)
        shown: dict[str, Any] = json.loads(result.stdout)["run"]
        return shown

    def check(self) -> None:
        """Assert that the registry's file is sound, and holds what the run directories say."""
        with TemporaryDirectory() as elsewhere, Store(self.registry) as store, Store(Path(elsewhere) / "r.db") as fresh:
            store.check()
            with fresh.begin() as transaction:
                ingest(transaction, [self.open().root.run(each) for each in IDS], dead=False)
            assert store.load_all(IDS) == fresh.load_all(IDS)
            assert store.ask(lambda db: queries.offsets(db, IDS)) == fresh.ask(lambda db: queries.offsets(db, IDS))
            assert sorted(store.sent()) == IDS

    def rebuild(self) -> list[str]:
        """Rebuild the registry; returns the warnings."""
        warnings: list[str] = []
        rebuild(self.open(warnings.append))
        return warnings

    def execute(self, *statements: str) -> None:
        with sqlite3.connect(self.registry) as connection:
            for statement in statements:
                connection.execute(statement)
