"""Which specs a drill takes, and which runs it makes of them; without a run that trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmtrain.errors import UserError
from slurmtrain.model.experiment.values import NAME_LIMIT
from slurmtrain.ops.shared.workspace import Workspace
from slurmtrain.plugins.drill.drill_runs import DrillOptions, _DrillPlan, run_drill


def options(tmp_path: Path, **keys: Any) -> DrillOptions:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "n" * NAME_LIMIT, "command": "true", **keys}))
    return DrillOptions(path=path, executor="local")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"checkpoint": {"glob": "out/ckpt-*.pt"}}, "begin the pattern with {checkpoint_dir}"),
        ({"params": {"a": 1}, "sweep": {"params.a": [1, 2]}}, "sweep of 2 runs"),
    ],
)
def test_a_spec_that_cannot_be_drilled_is_refused_and_nothing_is_created(
    workspace: Workspace, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        run_drill(workspace, options(tmp_path, **keys), lambda _: None, lambda _: None)
    assert message in str(refused.value)
    assert not workspace.root.path.exists()


def test_runs_are_named_for_their_faults_and_hang_is_tried_only_on_request(tmp_path: Path) -> None:
    plan = _DrillPlan.load(options(tmp_path, requeue={"hang_after": 20}))
    assert list(plan.specs) == [
        "reference", "again", "preempt", "timeout", "rank", "save", "agent", "all", "hang",
    ]  # fmt: skip
    names = [spec.runs[0].plan.spec.name for spec in plan.specs.values()]
    assert all(len(name) == NAME_LIMIT for name in names)
    assert [name.rpartition("-drill-")[2] for name in names] == list(plan.specs)
    assert "hang" not in _DrillPlan.load(options(tmp_path)).specs
    assert list(_DrillPlan.load(replace(options(tmp_path), faults=["hang", "hang"], twice=True)).specs) == [
        "reference", "again", "hang",
    ]  # fmt: skip
