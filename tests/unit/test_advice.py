"""What messages advise exists: commands, their options, and keys of the spec."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click

import slurmtrain
from slurmtrain.cli import cli
from slurmtrain.model.experiment.slurm_options import OPTIONS
from slurmtrain.specfile.overrides import SCHEMA

PACKAGE = Path(slurmtrain.__file__).parent
KEYS = {".".join(path) for path in SCHEMA}
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS if "." in key}))
# Keys below values that are no sections.
BELOW = re.compile(
    r"resources\.nodes\.(?:min|max)|checkpoint\.every\.(?:steps|minutes)|strategy\.mesh\.\w+|slurm\.(?:sbatch|srun)"
)


@cache
def messages() -> list[tuple[str, str]]:
    """All texts of the package with a blank, each with its place, docstrings aside."""
    # Parsing those alone that may hold advice takes half as long.
    hint = re.compile(rf"['`]slurmtrain |\b(?:{SECTIONS})\.[a-z]")
    return [each for path in sorted(PACKAGE.rglob("*.py")) if hint.search(path.read_text()) for each in _texts(path)]


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_commands_and_options_in_messages_exist() -> None:
    context = click.Context(cli)
    wrong = []
    for place, text in messages():
        for name, rest in re.findall(r"['`]slurmtrain ([a-z]+)\b([^'`]*)", text):
            command = cli.get_command(context, name)
            if command is None:
                wrong.append(f"{place}: slurmtrain {name}")
                continue
            if isinstance(command, click.Group):
                continue
            options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            wrong += [
                f"{place}: {name} {option}" for option in re.findall(r"--[a-z][\w-]*", rest) if option not in options
            ]
    assert wrong == []


def test_keys_in_messages_exist() -> None:
    wrong = []
    for place, text in messages():
        for key in re.findall(rf"(?<![\w.{{}}/-])((?:{SECTIONS})(?:\.(?!md\b)[a-z_]+)+)\b(?![(/])", text):
            is_key = (
                key in KEYS or BELOW.fullmatch(key) or any(key.startswith(f"{each}.") for each in ("params", "env"))
            )
            if not is_key and not (key.startswith("slurm.") and key[6:].replace("_", "-") in OPTIONS):
                wrong.append(f"{place}: {key}")
    assert wrong == []
