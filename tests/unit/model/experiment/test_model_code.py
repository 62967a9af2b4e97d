"""Snapshots of code as data: manifests, what plans say about them, and where paths lead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmtrain.model.experiment.code import (
    CodeFile,
    CodeManifest,
    CodeSnapshot,
    compare_manifests,
    directories_of,
    link_target,
    may_appear_later,
    names_by_directory,
    without_data_directories,
)
from slurmtrain.model.experiment.kinds import KeyPath
from slurmtrain.model.experiment.plan import Plan, make_plan
from slurmtrain.model.experiment.spec import read_spec

HASH = "0" * 64


def file(path: str, digest: str = "d") -> CodeFile:
    return CodeFile(path, "file", digest, 3)


def plan_of(**keys: Any) -> Plan:
    mistakes: list[str] = []
    data = {"name": "n", "command": "python train.py", **keys}
    spec = read_spec(data, lambda at, message: mistakes.append(f"{'.'.join(at)}: {message}"))
    assert not mistakes, mistakes
    return make_plan(spec, workdir="/repo/sub", python="/bin/python", template=data)[0]


def snapshot(**keys: Any) -> CodeSnapshot:
    return CodeSnapshot(**{"hash": HASH, "root": "/repo", "files": 1, "bytes": 3, "beside": {}, **keys})


def test_a_manifest_is_the_same_for_the_same_files_in_any_order_and_is_read_back() -> None:
    files = [file("b"), file("a/c\nd"), CodeFile("l\udcff", "link", "../x", 0)]
    assert CodeManifest.sorted(files).hash == CodeManifest.sorted(reversed(files)).hash
    assert CodeManifest.from_bytes(CodeManifest.sorted(files).to_bytes()) == CodeManifest.sorted(files)
    assert (
        CodeManifest.sorted([file("b")]).hash
        != CodeManifest.sorted([file("b", "e")]).hash
        != CodeManifest.sorted([file("c", "e")]).hash
    )


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "."])
def test_a_manifest_that_leads_out_of_a_tree_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a valid path in a snapshot"):
        CodeManifest.from_bytes(CodeManifest([file(path)]).to_bytes())


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"schema":1,"files":[["a","file","d","3"]]}', b"{", b""])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        CodeManifest.from_bytes(content)


def test_a_comparison_says_what_was_changed_added_and_removed() -> None:
    before = CodeManifest.sorted([file("a"), file("b"), file("c")])
    after = CodeManifest.sorted([file("a"), file("b", "other"), *(file(f"n{i}") for i in range(5))])
    text = compare_manifests(before, after).text
    assert text == "1 changed (b), 5 added (n0, n1, n2 and 2 more), 1 removed (c)"
    assert compare_manifests(before, before).text == "no file differs"


def test_a_spec_without_code_keeps_its_hash_and_a_snapshot_does_not_change_one() -> None:
    plain, spelled = plan_of(), plan_of(code="snapshot")
    assert plain.hash == spelled.hash == replace(plain, code=snapshot()).hash
    assert plain.hash == "687e7c294bba34a90f747d91f3260a7e970b3d068bb88a2afe179945aa6ee928"
    assert plan_of(code="none").hash != plain.hash


def test_a_plan_with_a_snapshot_is_read_back_and_runs_in_the_copy() -> None:
    plan = replace(plan_of(code="snapshot"), code=snapshot(beside={"sub": ["data"]}, import_roots=["src"]))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.working_directory(Path("/runs/r/code")) == Path("/runs/r/code/repo/sub")
    assert replace(plan, code=None).working_directory(Path("/runs/r/code")) == Path("/repo/sub")


@pytest.mark.parametrize(
    "code", [{"snapshot": "../../etc"}, {"snapshot": 5}, {"root": 5}, {"beside": 5}, {"files": "x"}]
)
def test_a_plan_whose_snapshot_is_something_else_is_refused(code: dict[str, Any]) -> None:
    data = replace(plan_of(), code=snapshot()).to_json()
    data["code"] = {**data["code"], **code}
    with pytest.raises((ValueError, TypeError, AttributeError)):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("code", "at", "message"),
    [
        ({"mode": "snapshot", "max_size": 5}, "code.max_size", "5 has no unit; write for example 5GB"),
        ({"mode": "snapshot", "include": "*.so"}, "code.include", "expected a list, found text"),
        ({"mode": "none", "exclude": ["a"]}, "code.exclude", "'exclude' has no effect without a snapshot"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_section_is_named(code: Any, at: str, message: str) -> None:
    mistakes: list[tuple[KeyPath, str]] = []
    read_spec({"name": "n", "command": "c", "code": code}, lambda path, text: mistakes.append((path, text)))
    [(path, text)] = mistakes
    assert ".".join(path) == at
    assert message in text


# --- paths ----------------------------------------------------------------------------------------------------------


def test_directories_with_placeholders_only_are_no_code() -> None:
    paths = [
        "train.py",
        "README.md",
        "data/.gitkeep",
        "out/a/README.md",
        "src/x.py",
        "src/README.md",
        "src/z/.gitignore",
    ]
    assert without_data_directories(paths) == ["train.py", "README.md", "src/x.py", "src/README.md"]
    assert directories_of(["a/b/c"]) == {"", "a", "a/b"}
    assert names_by_directory(["a/b/c", "d"]) == {"": {"a", "d"}, "a": {"b"}, "a/b": {"c"}}


@pytest.mark.parametrize(
    ("path", "target", "leads_to"),
    [
        ("l", "x.py", "x.py"),
        ("a/l", "../x.py", "../x.py"),
        ("a/l", "../../data", "/home/data"),
        ("l", "/data", "/data"),
        ("a/l", "/home/repo/b/x", "../b/x"),
    ],
)  # fmt: skip
def test_links_lead_to_the_copy_where_they_stay_in_the_repository(path: str, target: str, leads_to: str) -> None:
    assert link_target(path, target, "/home/repo") == leads_to


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("data", True),
        ("train.log", True),
        ("new.py", False),
        ("model", False),
        (".git", False),
    ],
)  # fmt: skip
def test_later_entries_never_replace_code(name: str, may: bool) -> None:
    assert may_appear_later(name, {"model.py", "src"}) is may


def test_only_what_was_beside_the_code_stays_where_it_is() -> None:
    code = snapshot(beside={"": ["data"], "sub": ["out"]})
    stays = ("/repo/data/x", "/repo/sub/out", "/elsewhere")
    moves = ("/repo/outputs", "/repo/sub/x", "/repo/out")
    assert all(map(code.stays, stays))
    assert not any(map(code.stays, moves))
