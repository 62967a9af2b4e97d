"""Keys of a spec that are written as options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from slurmtrain.cli import cli


@pytest.mark.parametrize("command", ["submit", "render"])
@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ("--nodes", "write resources.nodes=... to set that key of the spec"),
        ("--gpus", "write resources.gpus_per_node=... to set that key of the spec"),
        ("--partition=spot", "write slurm.partition=... to set that key of the spec"),
        ("--requeue.max-failures", "write requeue.max_failures=... to set that key of the spec"),
        ("--lr", "write params.lr=... to set a parameter"),
        ("--params.lr=0.1", "write params.lr=... to set a parameter"),
        ("--array", "write --sweep params.lr=0.1,0.3"),
        ("-N2", "keys of the spec are set as in resources.nodes=2"),
        ("--test-only", "'slurmtrain render SPEC' prints what would be submitted"),
        ("--sweeep", "did you mean --sweep?"),
    ],
)
def test_an_option_that_there_is_not_is_told_what_to_write(command: str, option: str, cure: str) -> None:
    result = CliRunner().invoke(cli, [command, "exp.yaml", option, "2"])
    name = option.partition("=")[0][: 2 if not option.startswith("--") else None]
    assert result.output.endswith(f"Error: no such option {name}; {cure}\n")
    assert result.exit_code == 2


def test_a_spec_without_a_command_is_told_how_to_submit_it() -> None:
    result = CliRunner().invoke(cli, ["exp.yaml"])
    assert result.output.endswith("no such command 'exp.yaml'; 'slurmtrain submit exp.yaml' submits a spec\n")
