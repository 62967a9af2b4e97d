"""Text of others on a terminal: nothing in it controls the terminal, or hides what is printed."""

from __future__ import annotations

import ast
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurmtrain.cli
from slurmtrain.cli.output import printable, printable_log


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 0.1, ünï 速 🚀 \u0645\u06cc\u200c\u062e", "loss 0.1, ünï 速 🚀 \u0645\u06cc\u200c\u062e"),
        ("a\tb", "a       b"),
        ("\x1b[1;31merror\x1b[0m", "error"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
        ("a\nerror: b\r", "a\\nerror: b\\r"),
        ("\x9b2J \x85 \x7f", "\\x9b2J \\x85 \\x7f"),
        ("\u202egnp.exe\u2066 \u2028", "\\u202egnp.exe\\u2066 \\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_is_invisible_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\x1b[1;31merror\x1b[0m: x", "\x1b[1;31merror\x1b[0m: x"),
        ("\x1b[32mgreen", "\x1b[32mgreen\x1b[0m"),
        ("\tindented", "        indented"),
        (" 10%\r 20%\r 30%\r", " 30%"),
        ("\x1b[2J\x1b[1;1H\x1b[?1049hx", "x"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "xlink"),
        ("\x1bP+q\x1b\\x\x1b_Ga=T\x1b\\", "x"),
        ("\x1b]0;open end", "\\x1b]0;open end"),
        ("\x1bc \x9b2J \u202e", "\\x1bc \\x9b2J \\u202e"),
    ],
)
def test_a_line_of_a_log_keeps_its_colours_alone(line: str, shown: str) -> None:
    assert printable_log(line) == shown


@given(st.text(st.characters(codec=None)))
def test_no_text_leaves_a_control_character_or_a_line_break(text: str) -> None:
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in printable(text))
    without_colours = printable_log(text).replace("\x1b[", "")
    assert not any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in without_colours)


def test_commands_print_in_no_other_way() -> None:
    modules = [path for path in Path(slurmtrain.cli.__path__[0]).rglob("*.py") if path.name != "output.py"]
    assert len(modules) > 10
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            used = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert used not in ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"), path
