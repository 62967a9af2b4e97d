"""What is left out at the beginning and at the end of processes that import much."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.program import program

from slurmtrain.system.interpreter import own_python, without_collection


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_looked_for_afterwards_as_it_was_before_also_where_an_import_fails(before: bool) -> None:
    collected = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(ImportError), without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == before
    finally:
        (gc.enable if collected else gc.disable)()


def test_a_process_that_leaves_quickly_ends_in_order_and_looks_at_nothing_that_lives() -> None:
    with program(
        """
import atexit, gc, sys
from slurmtrain.system.interpreter import leave_quickly
gc.collect()  # and so not again before the end, which would make them fewer
tracked = len(gc.get_objects())
# Nearly all: the import system lets go of a few on the way.
atexit.register(lambda: print(gc.get_freeze_count() > 0.9 * tracked, flush=True))
leave_quickly()
print("here", flush=True)
sys.exit(75)
"""
    ) as process:
        assert [process.line(), process.line()] == ["here", "True"]
        assert process.ended() == (75, "")


LOCALES = {
    "utf-8": {"LC_ALL": "C.UTF-8"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "missing": {"LC_ALL": "tr_TR", "PYTHONUTF8": "0"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_a_command_uses_utf8_in_any_locale(tmp_path: Path, locale: str) -> None:
    place = tmp_path / "wörk 日本"
    place.mkdir()
    (place / "größe.yaml").write_text("name: x\ncommand: echo größe 日本\n", encoding="utf-8")
    command = [sys.executable, "-m", "slurmtrain", "--runs", "rüns", "render", "größe.yaml", "--executor", "local"]
    environ = {**os.environ, **LOCALES[locale]}
    rendered = subprocess.run(command, cwd=place, env=environ, capture_output=True, check=True).stdout
    encoding = "latin-1" if locale == "latin-1" else "utf-8"
    assert "größe".encode(encoding) in rendered
    assert ("日本".encode() if encoding == "utf-8" else b"\\u65e5\\u672c") in rendered


def test_another_process_reads_names_of_files_as_utf8() -> None:
    code = "import sys; print(sys.getfilesystemencoding(), sys.argv[1] == 'größe 日本')"
    environ = {**os.environ, **LOCALES["ascii"]}
    printed = subprocess.run(own_python("-c", code, "größe 日本"), env=environ, capture_output=True, check=True).stdout
    assert printed.split() == [b"utf-8", b"True"]
