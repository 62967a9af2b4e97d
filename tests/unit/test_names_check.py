"""``scripts/names``: it finds classes named alike, names that say nothing, and parameters that no docstring names."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
from helpers.script_modules import load_script


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The check, for a tree of its own."""
    module = load_script("names")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for tree in module.TREES:
        (tmp_path / tree).mkdir()
    return module


def vague(names: ModuleType, text: str) -> list[str]:
    return [name for _, name in names.vague_bindings(ast.parse(text))]


@pytest.mark.parametrize(
    "text",
    [
        "{} = 1", "for {} in range(3): pass", "with open('x') as {}: pass", "if ({} := 1): pass", "def f({}): pass",
        "def f(*, {}=1): pass", "def {}(): pass", "class A:\n    {}: int = 0",
        "class A:\n    def f(self): self.{} = 1", "a, (b, {}) = 1, (2, 3)",
    ],
)  # fmt: skip
def test_a_name_that_says_nothing_is_found_wherever_it_is_bound(names: ModuleType, text: str) -> None:
    for name in ("said", "one", "_told", "FOUND"):
        assert vague(names, text.format(name)) == [name]


@pytest.mark.parametrize(
    "text",
    [
        "[one for one in range(3)]",
        "{one: one for one in range(3)}",
        "sum(one for one in range(3))",
        "sorted([], key=lambda one: one)",
        "answer.said, found(one)",
        "one_run = 1",
    ],
)
def test_comprehensions_lambdas_and_uses_are_left_alone(names: ModuleType, text: str) -> None:
    assert vague(names, text) == []


def test_a_public_class_that_stands_twice_in_the_package_is_found(names: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "slurmtrain" / "a.py").write_text("class Plan: pass\nclass _Own: pass\nclass Run: pass\n")
    (tmp_path / "slurmtrain" / "b.py").write_text("class _Own: pass\nclass Plan: pass\n")
    (tmp_path / "tests" / "c.py").write_text("class Run: pass\n")
    trees = names.parsed([tmp_path / "slurmtrain"])
    assert list(names.duplicate_classes(trees)) == ["slurmtrain/a.py:1: class Plan stands also at slurmtrain/b.py:2"]


MANY = "def f(first, second, third):\n    '''{}'''\n"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (MANY.format("Do it."), ["first", "second", "third"]),
        (MANY.format("``first``: bytes. ``second``: seconds."), ["third"]),
        (MANY.format("``first`` with ``second``.\n\n    Args:\n        third: a path.\n    "), []),
        ("def f(first, second): pass", []),
        ("def _f(first, second, third): pass", []),
        ("class A:\n    def f(self, first, second): pass", []),
        ("class A:\n    '''``a``, ``b`` and ``c``.'''\n    def __init__(self, a, b, c): pass", []),
        ("class A:\n    def f(self, a, b, *, c): pass", ["a", "b", "c"]),
    ],
)
def test_a_parameter_that_the_docstring_of_a_public_function_leaves_out_is_found(
    names: ModuleType, text: str, missing: list[str]
) -> None:
    findings = list(names.undocumented(ast.parse(text)))
    assert [names for _, _, names in findings] == ([missing] if missing else [])


def test_findings_are_printed_with_their_place_and_make_the_check_fail(
    names: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names.main([]) == 0
    (tmp_path / "slurmtrain" / "a.py").write_text("said = 1\n\n\ndef f(a, b, c): pass\n")
    (tmp_path / "tests" / "b.py").write_text("told = 1\n\n\ndef f(a, b, c): pass\n")
    assert names.main([]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "slurmtrain/a.py:1: the name 'said' says nothing",
        "slurmtrain/a.py:4: the docstring of f does not name a, b, c",
        "tests/b.py:1: the name 'told' says nothing",
    ]


def test_programs_without_a_suffix_are_checked_and_migrations_are_not(names: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "scripts" / "program").write_text("#!/usr/bin/env python3\nsaid = 1\n")
    (tmp_path / "scripts" / "shell").write_text("#!/bin/sh\nsaid = 1\n")
    (tmp_path / "slurmtrain" / "migrations").mkdir()
    (tmp_path / "slurmtrain" / "migrations" / "0001.py").write_text("said = 1\n")
    paths = [tmp_path / "scripts", tmp_path / "slurmtrain"]
    assert list(names.file_findings(paths)) == ["scripts/program:2: the name 'said' says nothing"]
