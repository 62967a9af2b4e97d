"""What a look at the script and its Python tells before anything is created."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import make_test_plan

from slurmtrain.errors import NotAvailable, PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.ops.submit.command_script import (
    check_script,
    check_shell_script,
    note_profile,
    note_script,
    notes_on_shell,
)

ABSENT = "zz_absent_package"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python with nothing but what it comes with, which writes down that it was started."""
    path = tmp_path / "bare/bin/python"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\necho started >> {tmp_path}/starts\nexec {sys.executable} -IS "$@"\n')
    path.chmod(0o755)
    return path


def starts(path: Path) -> int:
    """How often that Python was started."""
    file = path / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def plan_for(path: Path, python: Path | str, text: str, **keys: Any) -> Plan:
    """A plan that runs a script with this text in this directory."""
    (path / "train.py").write_text(text)
    plan = make_test_plan(**{"command": "python train.py", **keys})
    return replace(plan, workdir=str(path), python=str(python))


def test_a_script_whose_python_lacks_what_it_imports_first_is_refused_on_this_machine(
    tmp_path: Path, python: Path
) -> None:
    plan = plan_for(tmp_path, python, "import os\nimport torch\n")
    with pytest.raises(NotAvailable) as raised:
        check_script(plan, "local")
    assert str(raised.value) == (
        f"train.py, line 2, imports torch, which is not installed for {python}; activate the environment of "
        f"{sys.executable}, which has it"
    )


@pytest.mark.parametrize(
    ("text", "executor", "keys", "expected"),
    [
        pytest.param(
            f"import {ABSENT}\n", "slurm", {}, f"train.py, line 1, imports {ABSENT}, which is not "
            "installed for {python}; install it there, or activate the environment that has it; "
            "ignore this if the nodes have it",
            id="on Slurm, as nodes may have another Python",
        ),
        pytest.param(
            "import torch\n", "local", {"setup": ["module load torch"]}, "train.py, line 1, imports torch, which "
            "is not installed for {python}; activate the environment of {own}, which has it; ignore this if 'setup' "
            "adds it",
            id="with lines of setup",
        ),
        pytest.param(
            "import os\nos.environ['A'] = 'b'\nimport torch\n", "local", {}, "train.py, line 3, imports torch, which "
            "is not installed for {python}; activate the environment of {own}, which has it",
            id="torch behind other code",
        ),
    ],
)  # fmt: skip
def test_what_may_be_there_after_all_is_a_note(
    tmp_path: Path, python: Path, text: str, executor: str, keys: dict[str, Any], expected: str
) -> None:
    plan = plan_for(tmp_path, python, text, **keys)
    check_script(plan, executor)
    [note] = note_script(plan, executor)
    assert note.startswith(expected.format(python=python, own=sys.executable))


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.path.insert(0, 'x')\nimport {absent}\n",
        "try:\n    import {absent}\nexcept ImportError:\n    pass\n",
        "import json\n",
    ],
)
def test_what_may_work_is_neither_refused_nor_noted(tmp_path: Path, python: Path, text: str) -> None:
    plan = plan_for(tmp_path, python, text.format(absent=ABSENT))
    check_script(plan, "local")
    assert note_script(plan, "local") == []


def test_a_script_without_a_session_is_noted_if_its_steps_are_to_be_traced(tmp_path: Path, python: Path) -> None:
    steps = {"steps": [1, 2]}
    [note] = note_profile(plan_for(tmp_path, python, "import json\n", profile=steps))
    assert note.startswith("'profile.steps' traces the steps of slurmtrain.session(), which train.py itself does not")
    assert (
        note_profile(plan_for(tmp_path, python, "with slurmtrain.session() as run:\n    pass\n", profile=steps)) == []
    )
    assert note_profile(plan_for(tmp_path, python, "import json\n", profile="nsys")) == []
    assert note_profile(plan_for(tmp_path, python, "import json\n")) == []


@pytest.mark.parametrize("module", ["torch.py", "torch/__init__.py", "torch.cpython-311-x86_64-linux-gnu.so"])
def test_a_module_beside_the_script_is_there(tmp_path: Path, python: Path, module: str) -> None:
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).touch()
    check_script(plan_for(tmp_path, python, "import torch\n"), "local")
    assert starts(tmp_path) == 0


@pytest.mark.parametrize("where", ["spec", "spec, relative to the directory of the command", "environment"])
def test_the_path_of_the_ranks_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / f"lib/{ABSENT}.py").touch()
    env = {} if where == "environment" else {"PYTHONPATH": "lib" if "relative" in where else str(tmp_path / "lib")}
    if where == "environment":
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    check_script(plan_for(tmp_path, sys.executable, f"import {ABSENT}\n", env=env), "local")
    isolated = plan_for(tmp_path, sys.executable, f"import {ABSENT}\n", command="python -I train.py", env=env)
    with pytest.raises(NotAvailable):
        check_script(isolated, "local")


def test_a_wrapper_sees_the_variables_of_the_spec(tmp_path: Path, python: Path) -> None:
    (tmp_path / f"{ABSENT}.py").touch()
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$ZZ_LIB exec {sys.executable} "$@"\n')
    (tmp_path / "sub").mkdir()
    text = f"import {ABSENT}\n"
    check_script(plan_for(tmp_path / "sub", python, text, env={"ZZ_LIB": str(tmp_path)}), "local")
    with pytest.raises(NotAvailable):
        check_script(plan_for(tmp_path / "sub", python, text), "local")


def test_a_module_is_looked_for_in_the_directory_of_the_command_too(tmp_path: Path, python: Path) -> None:
    (tmp_path / "training").mkdir()
    check_script(plan_for(tmp_path, python, "", command="python -m training.main"), "local")
    # The Python that is named is asked.
    check_script(plan_for(tmp_path, python, "import torch\n", command=f"{sys.executable} train.py"), "local")
    with pytest.raises(NotAvailable):
        check_script(plan_for(tmp_path, sys.executable, "import torch\n", command=f"{python} train.py"), "local")
    with pytest.raises(NotAvailable, match=rf"neither .* nor {tmp_path} has a module {ABSENT}"):
        check_script(plan_for(tmp_path, python, "", command=f"python -m {ABSENT}.main"), "local")


def test_in_a_container_nothing_is_looked_at_and_a_pipe_is_not_read(tmp_path: Path, python: Path) -> None:
    plan = plan_for(tmp_path, python, "import torch\n", slurm={"srun": ["--container-image=x"]})
    (tmp_path / "train.py").unlink()
    check_script(plan, "slurm")
    assert note_script(plan, "slurm") == []
    os.mkfifo(tmp_path / "train.py")
    check_script(replace(make_test_plan(command="python train.py"), workdir=str(tmp_path), python=str(python)), "local")


@pytest.mark.parametrize("content", ["exit 1", "echo nonsense", "echo '[]'", "kill -9 $$"])
def test_a_python_that_does_not_answer_is_not_judged(tmp_path: Path, python: Path, content: str) -> None:
    python.write_text(f"#!/bin/sh\n{content}\n")
    plan = plan_for(tmp_path, python, "import torch\n")
    check_script(plan, "local")
    assert note_script(plan, "local") == []


def test_a_python_is_asked_once_for_what_it_has_and_again_when_its_packages_change(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    (library / "zz_first.py").touch()
    python.write_text(python.read_text().replace("-IS", "-S"))
    monkeypatch.setenv("PYTHONPATH", str(library))
    for _ in range(3):
        _forget_this_process()
        check_script(plan_for(tmp_path, python, "import zz_first\n"), "local")
    assert starts(tmp_path) == 1
    (library / "zz_first.py").unlink()
    _forget_this_process()
    with pytest.raises(NotAvailable):
        check_script(plan_for(tmp_path, python, "import zz_first\n"), "local")
    (library / "zz_first.py").touch()
    _forget_this_process()
    check_script(plan_for(tmp_path, python, "import zz_first\n"), "local")


def test_a_damaged_answer_is_asked_for_again(tmp_path: Path, python: Path) -> None:
    (tmp_path / "zz.py").touch()
    plan = plan_for(tmp_path, python, "import json\nimport zz_none\n")
    for content in ('{"path": 3, "present": ["zz_none"]}', '{"present": 4}', "[1]"):
        _forget_this_process()
        for file in (Path(os.environ["XDG_CACHE_HOME"]) / "slurmtrain").glob("python-*"):
            kept = file.read_text()
            file.write_text(kept[: kept.index('"answer"')] + f'"answer": {content}}}')
        with pytest.raises(NotAvailable):
            check_script(plan, "local")


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pyhton train.py", "there is no program pyhton; did you mean 'python'?"),
        ("zz-none", "there is no program zz-none; install it, or activate the environment that has it"),
        # What is not installed is no suggestion either.
        ("deepsped x", "there is no program deepsped; install it, or activate the environment that has it"),
        ("./gone.sh", "there is no program {path}/gone.sh"),
        ("./train.py --lr 1", "{path}/train.py is not executable; write python before it"),
        ("cd x", "'cd' is a shell command, not a program; write bash -c 'cd x', or a script"),
        ("A=1 x", "'A=1' sets a variable, and only a shell can do that; write bash -c 'A=1 x', or a script"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused_on_this_machine(
    tmp_path: Path, command: str, message: str
) -> None:
    plan = plan_for(tmp_path, sys.executable, "", command=command)
    with pytest.raises(PathError) as raised:
        check_script(plan, "local")
    assert str(raised.value) == message.format(path=tmp_path)
    check_script(plan, "slurm")
    assert note_script(plan, "slurm") == [f"{message.format(path=tmp_path)}; ignore this if the nodes have it"]


def test_a_program_on_the_path_of_the_spec_is_there(tmp_path: Path) -> None:
    (tmp_path / "zz-own").touch(0o755)
    check_script(plan_for(tmp_path, sys.executable, "", command="zz-own", env={"PATH": str(tmp_path)}), "local")


@pytest.mark.parametrize("command", ["python " + "a" * 5000 + ".py", "/dev/null/x", "a" * 5000, "x/" * 3000])
def test_paths_that_no_machine_has_are_refused(tmp_path: Path, command: str) -> None:
    with pytest.raises(PathError):
        check_script(plan_for(tmp_path, sys.executable, "", command=command), "local")


def _forget_this_process() -> None:
    from slurmtrain.ops.submit import command_script

    command_script._absent.cache_clear()


# --- launchers in scripts ---------------------------------------------------------------------------------------------


def plan_of_shell(path: Path, text: str, **keys: Any) -> Plan:
    """A plan that runs a shell script with this text in this directory, on two ranks."""
    (path / "train.sh").write_text(text)
    resources = {"nodes": 1, "procs_per_node": 2}
    return replace(make_test_plan(**{"command": "bash train.sh", "resources": resources, **keys}), workdir=str(path))


def test_a_shell_script_that_starts_ranks_itself_is_refused_unless_the_spec_says_who_does(tmp_path: Path) -> None:
    text = "set -e\ntorchrun --standalone --nproc_per_node=2 train.py\n"
    plan = plan_of_shell(tmp_path, text)
    with pytest.raises(NotAvailable) as raised:
        check_shell_script(plan)
    problem = str(raised.value)
    assert problem.startswith("train.sh, line 2, calls torchrun, which starts ranks itself")
    assert "set 'launcher: node'" in problem
    own = plan_of_shell(tmp_path, text, launcher="ranks")
    check_shell_script(own)
    assert [*notes_on_shell(own)] == [problem]
    check_shell_script(plan_of_shell(tmp_path, text, launcher="node"))
    assert [*notes_on_shell(plan_of_shell(tmp_path, text, launcher="node"))] == []
    check_shell_script(plan_of_shell(tmp_path, "python train.py\n"))


def test_a_script_that_is_missing_too_long_or_no_text_is_not_looked_at(tmp_path: Path) -> None:
    for text in ("torchrun x.py\n\0", "torchrun x.py\n" + "#" * (1 << 20)):
        check_shell_script(plan_of_shell(tmp_path, text))
    check_shell_script(replace(make_test_plan(command="bash none.sh"), workdir=str(tmp_path)))


def test_a_script_per_node_that_asks_for_its_task_is_told_of_its_node(tmp_path: Path) -> None:
    text = "torchrun --node_rank $SLURM_PROCID train.py\n"
    [note] = notes_on_shell(plan_of_shell(tmp_path, text, launcher="node"))
    assert "train.sh, line 1, reads SLURM_PROCID" in note
    assert "SLURM_NODEID" in note
