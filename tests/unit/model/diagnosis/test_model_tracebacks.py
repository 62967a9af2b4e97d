"""Which exception ended a program, and where, by what real programs print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmtrain.model.diagnosis.tracebacks import find_fatal, find_raised

POOL = """
import multiprocessing
def work(i):
    raise ValueError(f"bad {i}")
if __name__ == "__main__":
    with multiprocessing.Pool(1) as pool:
        pool.map(work, [1])
"""
GROUP = """
def part():
    raise ValueError("in a group")
try:
    part()
except ValueError as error:
    raise ExceptionGroup("many", [error])
"""
FROM = """
def load():
    try:
        {}["x"]
    except KeyError as error:
        raise RuntimeError("cannot load") from error
load()
"""
HANDLING = """
try:
    {}["x"]
except KeyError:
    cleanup()
"""
IN_LIBRARY = """
import json
def step():
    json.loads("{")
step()
"""
SURVIVED = """
import logging, weakref
class Net:
    def __del__(self):
        raise TypeError("too late")
net = Net()
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("again")
del net
print("Epoch 1: done")
raise OSError(28, "No space left on device", "/data/a.bin")
"""


@pytest.mark.parametrize(
    ("code", "text", "place", "cause"),
    [
        ("def step():\n    raise ValueError('up')\nstep()\n", "ValueError: up", "train.py:2 in step()", ""),
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt", "train.py:1", ""),
        ("x = 1\ndef f(:\n    pass\n", "SyntaxError: invalid syntax", "train.py:2", ""),
        ("import broken\n", "SyntaxError: invalid syntax", "broken.py:1", ""),
        ("import pkg.part\npkg.part.go()\n", "ZeroDivisionError: division by zero", "pkg/part.py:2 in go()", ""),
        (FROM, "RuntimeError: cannot load", "train.py:6 in load()", "from KeyError: 'x'"),
        (HANDLING, "NameError: name 'cleanup' is not defined", "train.py:5", "while handling KeyError: 'x'"),
        (POOL, "ValueError: bad 1", "train.py:4 in work()", ""),
        (GROUP, "ValueError: in a group", "train.py:3 in part()", ""),
        (SURVIVED, "OSError: [Errno 28] No space left on device: '/data/a.bin'", "train.py:13", ""),
        ("class E(Exception): pass\nraise E('Some weights differ:\\n  w1\\n  w2')\n",
         "E: Some weights differ: w1", "train.py:2", ""),
    ],
)  # fmt: skip
def test_the_exception_that_ended_a_script_is_found_with_the_users_line(
    tmp_path: Path, code: str, text: str, place: str, cause: str
) -> None:
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "broken.py").write_text("x = = 1\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "part.py").write_text("def go():\n    1 / 0\n")
    lines = said_by(tmp_path / "train.py")
    for log in (lines, [f"[rank3]: {line}" for line in lines], ["[rank3]:[W1122 12:00:00] noise", *lines]):
        raised = find_raised(log)
        assert raised is not None
        assert (raised.text.replace("__main__.", ""), raised.place(function=True), raised.cause) == (text, place, cause)


def test_an_exception_in_a_library_is_placed_where_the_script_called_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IN_LIBRARY)
    raised = find_raised(said_by(tmp_path / "train.py"))
    assert raised is not None
    assert raised.kind == "json.decoder.JSONDecodeError"
    assert raised.place(function=True) == "train.py:4 in step()"


LOADER = """Traceback (most recent call last):
  File "/home/me/exp/train.py", line 9, in <module>
    for _ in loader: pass
  File "/opt/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 733, in __next__
    data = self._next_data()
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 351, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/exp/data/words.py", line 6, in __getitem__
    raise ValueError("bad sample 17")
ValueError: bad sample 17
"""
SPAWNED = """Traceback (most recent call last):
  File "/home/me/exp/train.py", line 5, in <module>
    mp.spawn(work, nprocs=2)
  File "/opt/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 340, in spawn
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/home/me/exp/train.py", line 3, in work
    raise ValueError(f"bad {i}")
ValueError: bad 1

"""
RICH = """╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /home/me/exp/train.py:6 in <module>                                          │
│                                                                              │
│   5 │   raise ValueError("rich one")                                         │
│ ❱ 6 step()                                                                   │
│                                                                              │
│ /home/me/exp/train.py:5 in step                                              │
╰──────────────────────────────────────────────────────────────────────────────╯
ValueError: rich one
"""


@pytest.mark.parametrize(
    ("log", "text", "place"),
    [
        (LOADER, "ValueError: bad sample 17", "data/words.py:6 in __getitem__()"),
        (SPAWNED, "ValueError: bad 1", "train.py:3 in work()"),
        (RICH, "ValueError: rich one", "train.py:5 in step()"),
    ],
)
def test_what_a_child_raised_is_found_in_the_message_of_its_parents_exception(log: str, text: str, place: str) -> None:
    raised = find_raised(log.splitlines())
    assert raised is not None
    assert (raised.text, raised.place(function=True)) == (text, place)


def test_of_the_mixed_lines_of_several_ranks_the_first_traceback_counts_or_that_of_the_rank() -> None:
    def traceback_of(rank: int, line: int, error: str) -> list[str]:
        lines = ["Traceback (most recent call last):", f'  File "/home/me/exp/train.py", line {line}, in step', error]
        return [f"[rank{rank}]: {each}" for each in lines]

    first, second = traceback_of(1, 7, "KeyError: 'b'"), traceback_of(0, 3, "RuntimeError: Connection closed by peer")
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    for rank, error, text in (
        (None, "", "KeyError: 'b'"),
        (0, "", second[2][9:]),
        (None, second[2][9:], second[2][9:]),
    ):
        raised = find_raised(mixed, error, rank)
        assert raised is not None
        assert raised.text == text
    assert find_raised(mixed, "ValueError: of a log that is gone") is None
    assert find_raised(["step 1", "Traceback (most recent call last):", "cut off"]) is None


def test_a_process_that_a_signal_has_killed_is_placed_by_its_stack(tmp_path: Path) -> None:
    crash = "import ctypes, faulthandler\nfaulthandler.enable()\ndef go():\n    ctypes.string_at(0)\ngo()\n"
    (tmp_path / "train.py").write_text(crash)
    message, stack = find_fatal(said_by(tmp_path / "train.py"))
    assert (message, stack.place(function=True)) == ("Segmentation fault", "train.py:4 in go()")
    thrown = ["terminate called after throwing an instance of 'std::runtime_error'", "  what():  bad shape"]
    assert find_fatal(thrown)[0] == "std::runtime_error: bad shape"
    assert find_fatal(["step 7"])[0] == ""


def said_by(script: Path) -> list[str]:
    """What a script that fails prints."""
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ended.returncode != 0
    return [*ended.stdout.splitlines(), *ended.stderr.splitlines()]
