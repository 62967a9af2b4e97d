"""Only the node checks: which nodes they can be asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmtrain.errors import UserError
from slurmtrain.ops.preflight import submit_preflight
from slurmtrain.ops.shared.workspace import Workspace


def test_a_number_of_nodes_is_refused_where_components_have_their_own(workspace: Workspace, tmp_path: Path) -> None:
    spec = tmp_path / "two.yaml"
    spec.write_text("command: 'true'\nresources: {components: [{nodes: 1}, {nodes: 2, procs_per_node: 2}]}\n")
    with pytest.raises(UserError, match=r"--nodes 2 is ambiguous, because .*two.yaml has 'resources.components'"):
        submit_preflight(workspace, spec, (), nodes=2, executor="local")
    assert not workspace.root.path.exists()


def test_more_nodes_than_any_cluster_has_are_refused_at_once(workspace: Workspace) -> None:
    with pytest.raises(UserError, match=r"--nodes: .*; expected at most 1000000, found 9{30}$"):
        submit_preflight(workspace, None, (), nodes=int("9" * 30), executor="local")
    assert not workspace.root.path.exists()
