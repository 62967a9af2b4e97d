"""What keeps this node's clock: answers as the kernel and the services give them, and none."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.site import PATIENCE_S
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.runtime.preflight.facts import measure
from slurmtrain.runtime.preflight.facts.measure import (
    Timex,
    ask_kernel,
    read_chrony,
    read_discipline,
    read_kernel,
)

# chronyd 4.3: one that follows a server, one whose server does not answer, and one with "local stratum 8".
CHRONY = (
    "7F000001,127.0.0.1,9,1795270348.409004557,-0.000001490,-0.000000250,0.000001629,0.030,-0.004,0.285,"
    "0.000006596,0.000001872,1.0,Normal\n"
)
CHRONY_ASTRAY = (
    "00000000,,0,0.000000000,0.000000000,0.000000000,0.000000000,0.000,0.000,0.000,1.000000000,1.000000000,0.0,"
    "Not synchronised\n"
)
CHRONY_ALONE = (
    "7F7F0101,,8,1795270338.199221243,0.000000000,0.000000000,0.000000000,0.000,0.000,0.000,0.000000000,"
    "0.000000000,0.0,Normal\n"
)
CHRONY_GONE = "506 Cannot talk to daemon\n"
Commands = Callable[..., None]


# --- the kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "error_us", "disciplined", "bound_ms", "description"),
    [
        (0, 12345, True, 12.345, "error at most 12.3 ms by the kernel"),
        # A leap second is no error.
        *((state, 500, True, 0.5, "error at most 0.5 ms by the kernel") for state in (1, 2, 3, 4)),
        (0, 16_000_000, False, None, None),
        (5, 16_000_000, False, None, None),
        (5, 2_500_000, None, 2500, "error at most 2.5 s by the kernel, which does not report it as synchronised"),
    ],
)
def test_the_kernel_calls_a_clock_synchronised_not_or_leaves_it_in_doubt(
    state: int, error_us: int, disciplined: bool | None, bound_ms: float | None, description: str | None
) -> None:
    answer = read_kernel(state, error_us)
    assert answer is not None
    assert (answer["disciplined"], answer["bound_ms"], answer["source"]) == (disciplined, bound_ms, "adjtimex")
    assert description in (None, answer["description"])


def test_a_kernel_that_cannot_be_asked_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ask_kernel() or {"source": "adjtimex"})["source"] == "adjtimex"
    for library in (SimpleNamespace(adjtimex=lambda _: -1), object()):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        assert ask_kernel() is None


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_long) != 8, reason="the layout is that of 64-bit Linux")
def test_the_kernel_fills_the_structure_as_it_is_laid_out() -> None:
    assert ctypes.sizeof(Timex) == 208
    timex = Timex(modes=0)
    earliest = int(time.time())
    if ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) < 0:
        pytest.skip("adjtimex is forbidden here")
    assert earliest <= timex.seconds <= time.time()
    assert 9_000 <= timex.tick <= 11_000
    assert timex.maxerror >= 0


# --- what services print ----------------------------------------------------------------------------------------


ITSELF, NOBODY = "follows only this clock itself", "follows no source"


@pytest.mark.parametrize(
    ("text", "disciplined", "bound_ms", "description"),
    [
        # Of correction, dispersion and half the delay.
        (CHRONY, True, 0.00666, "error at most 0.00666 ms, chrony follows 127.0.0.1"),
        (CHRONY_ASTRAY, False, None, f"chrony {NOBODY}"),
        (CHRONY_ALONE, False, None, f"chrony {ITSELF}"),
    ],
)
def test_chrony_says_whether_it_keeps_the_clock_and_how_well(
    text: str, disciplined: bool, bound_ms: float | None, description: str
) -> None:
    answer = read_chrony(text)
    assert answer is not None
    assert (answer["disciplined"], answer["description"]) == (disciplined, description)
    assert answer["bound_ms"] == (None if bound_ms is None else pytest.approx(bound_ms, rel=1e-3))


@pytest.mark.parametrize("text", [CHRONY_GONE, "", *(CHRONY.replace("0.000001872", x) for x in ("nan", "-"))])
def test_output_that_is_not_chronys_is_no_answer(text: str) -> None:
    assert read_chrony(text) is None


_CELLS = st.text(alphabet='0123456789.-+eEnaif,"= \nabcleapstratum', max_size=80)


@given(
    st.one_of(
        st.text(),
        _CELLS,
        st.lists(st.sampled_from(CHRONY.split(",")) | st.text(max_size=5), min_size=14, max_size=14).map(",".join),
    )
)
def test_any_text_gives_a_whole_answer_or_none(text: str) -> None:
    discipline = read_chrony(text)
    if discipline is not None:
        assert set(discipline) == {"disciplined", "source", "description", "bound_ms"}
        assert discipline["source"] == "chrony"
        assert discipline["disciplined"] in (True, False)
        assert discipline["description"]
        json.dumps(discipline, allow_nan=False)


# --- who is believed --------------------------------------------------------------------------------------------

SYNCHRONISED, IN_DOUBT, ASTRAY = read_kernel(0, 5000), read_kernel(5, 5000), read_kernel(5, 16_000_000)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    """Give this machine these commands and no others, and a kernel that says this.

    Those that answer have time to, on a busy machine too; one that sleeps has as much as it is given.
    """
    output = measure._output

    def patiently(command: Sequence[str], timeout_s: float) -> str:
        script = tmp_path / command[0]
        hangs = script.exists() and b"sleep" in script.read_bytes()
        return output(command, timeout_s if hangs else PATIENCE_S)

    def have(kernel: dict[str, Any] | None, **scripts: str) -> None:
        for name, script in scripts.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(measure, "_SYSTEM_PATHS", ())
        monkeypatch.setattr(measure, "ask_kernel", lambda: kernel)
        monkeypatch.setattr(measure, "_output", patiently)

    return have


def printing(text: str) -> str:
    return f"while read -r line; do echo \"$line\"; done <<'END'\n{text}END"


def test_a_kernel_that_calls_the_clock_synchronised_is_enough(commands: Commands, tmp_path: Path) -> None:
    commands(SYNCHRONISED, chronyc=f"echo asked > {tmp_path}/asked")
    assert read_discipline() == SYNCHRONISED
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("kernel", [None, IN_DOUBT, ASTRAY], ids=["none", "in doubt", "denies"])
def test_chrony_is_believed_where_the_kernel_does_not_call_the_clock_synchronised(
    commands: Commands, kernel: dict[str, Any] | None
) -> None:
    commands(kernel, chronyc=f"echo '{CHRONY_GONE.strip()}'; exit 1")
    alone = read_discipline()
    if kernel is IN_DOUBT:
        assert (alone["disciplined"], alone["source"], alone["bound_ms"]) == (True, "adjtimex", 5.0)
    else:
        nothing = {"disciplined": None, "source": "none", "description": "no time service answers", "bound_ms": None}
        assert alone == (kernel or nothing)
    commands(kernel, chronyc=printing(CHRONY))
    assert read_discipline() == read_chrony(CHRONY)
    commands(kernel, chronyc=printing(CHRONY_ASTRAY))
    assert read_discipline() == read_chrony(CHRONY_ASTRAY)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("exec /bin/sleep 600", id="hangs"),
        pytest.param(printing(CHRONY) + "\nexit 1", id="fails"),
        pytest.param("printf '\\377\\376'", id="no text"),
        pytest.param(None, id="cannot be executed"),
    ],
)
def test_a_command_that_hangs_or_fails_is_skipped(commands: Commands, tmp_path: Path, script: str | None) -> None:
    commands(None, chronyc=script or "")
    if script is None:
        (tmp_path / "chronyc").write_bytes(b"\x7fELF")
    assert read_discipline()["source"] == "none"


def test_chrony_is_asked_in_the_language_that_is_read_and_without_input(commands: Commands) -> None:
    language, arguments = '[ "$LC_ALL" = C ]', '[ "$*" = "-n -c tracking" ]'
    commands(None, chronyc=f"{language} && {arguments} && ! read -r line && {printing(CHRONY)}")
    assert read_discipline()["disciplined"] is True
