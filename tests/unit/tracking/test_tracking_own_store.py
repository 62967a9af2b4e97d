"""The MLflow store next to the runs is opened where it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from slurmtrain.model.run.root import RunsRoot
from slurmtrain.tracking.own_store import store_address


@pytest.mark.parametrize("name", ["runs", "a?b", "a#b", "a%3Fb?c&d=e", "100% ünï", 'it\'s "x"; @:[1]'])
def test_the_mlflow_store_is_in_the_runs_root_whatever_its_name(tmp_path: Path, name: str) -> None:
    root = RunsRoot(tmp_path / name)
    root.path.mkdir()
    for number, locks in enumerate((True, False)):
        engine = sa.create_engine(store_address(root.mlflow_db, locks=locks), poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE TABLE t{number} (x)")
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == ["mlflow.db"]
    assert root.mlflow_db.is_file()
