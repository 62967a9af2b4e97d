"""The words of a command: files, imports, and what is hardly ever meant so."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers.simulated_run import make_test_plan

from slurmtrain.model.experiment.command_words import (
    DIRECTORY,
    FILE,
    NUMBERS,
    PLACEHOLDERS,
    UNKNOWN,
    find_oversights,
    paths_read,
    paths_written,
    result_places,
    script_imports,
)
from slurmtrain.model.experiment.launcher import NodePlace, NodeRanks
from slurmtrain.model.run.layout import RunDir
from slurmtrain.runtime.environment.ranks import facts_for_command


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("--data data/train.bin", "data/train.bin"),
        ("--config configs/small.yaml", "configs/small.yaml"),
        ("configs/small.yaml", "configs/small.yaml"),
        ("data.path=data/x.parquet", "data/x.parquet"),
        ("--data ./data", "./data"),
        ("--weights weights/start.pt", "weights/start.pt"),
    ],
)  # fmt: skip
def test_a_file_that_is_read_is_recognized(words: str, path: str) -> None:
    assert [each.path for each in paths_read(["python", *shlex.split(words)])] == [path]


@pytest.mark.parametrize(
    "words",
    [
        "--out out.json", "--output-file results.csv", "--ckpt_path last.pt", "--resume last.pt",
        "--metrics-file m.jsonl", "--data out/data.bin", "results.json", "logs/run.yaml", "hydra.run.dir=./here",
        "--model meta-llama/Llama-3.2-1B", "--dataset stanfordnlp/imdb", "--data /scratch/data.bin",
        "--data s3://bucket/data.bin", "--data data/*.bin", "--data {run_dir}/data.bin", "--mime text/plain",
        "--weights yolov8n.pt", "--pred ./preds", "-a resnet50 --dist-url tcp://127.0.0.1:29500 /imagenet",
        "-c 'open(\"a.csv\")'", "--files a.csv,b.csv", "data.csv", "--flag",
    ],
)  # fmt: skip
def test_what_may_be_something_else_is_left_alone(words: str) -> None:
    assert list(paths_read(["python", *shlex.split(words)])) == []


@pytest.mark.parametrize(
    ("words", "option", "path"),
    [
        ("--output_dir out", "--output_dir", "out"),
        ("-o out", "-o", "out"),
        ("--save checkpoints/gpt2 --load checkpoints/gpt2", "--save", "checkpoints/gpt2"),
        ("--output_dir /scratch/out", "--output_dir", "/scratch/out"),
        ("hydra.run.dir=out", "hydra.run.dir", "out"),
    ],
)  # fmt: skip
def test_a_place_for_results_is_recognized(words: str, option: str, path: str) -> None:
    assert [*map(tuple, paths_written(["python", *shlex.split(words)]))] == [(option, path)]


@pytest.mark.parametrize(
    "words",
    [
        "--output_dir {run_dir}/out", "--output_format json", "--save_steps 500", "--log_dir runs", "--data_dir data",
        "--save true", "--output_dir", "--output_dir --verbose",
    ],
)  # fmt: skip
def test_what_two_runs_can_share_is_left_alone(words: str) -> None:
    assert list(paths_written(["python", *shlex.split(words)])) == []


ROOT, WORKDIR = "/home/me/repo", "/home/me/repo/sub"


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("--output-dir out", [("sub/out", DIRECTORY)]),
        ("--savedir a --workdir b", [("sub/a", DIRECTORY), ("sub/b", DIRECTORY)]),
        ("--out out/{run_id}/last", [("sub/out", DIRECTORY)]),
        ("--save best.pt", [("sub/best.pt", FILE)]),
        ("--save ckpts", [("sub/ckpts", UNKNOWN)]),
        ("-o ../out/", [("out", DIRECTORY)]),
        ("--output-dir ../../shared", [("../shared", DIRECTORY)]),
        ("--out x.csv --out x.csv", [("sub/x.csv", FILE)]),
    ],
)  # fmt: skip
def test_places_are_named_by_options(words: str, places: list[tuple[str, str]]) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == places


@pytest.mark.parametrize(
    "words",
    [
        "--output-dir .", "--output-dir ..", "--output-dir ../../../x", "--output-dir {run_dir}/out", "--out /abs/x",
        "--output-dir ~/x", "--config c.yaml", "--data data",
    ],
)  # fmt: skip
def test_what_is_elsewhere_or_the_working_directory_itself_is_no_place(words: str) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == []


def imports(text: str) -> list[tuple[str, int, bool]]:
    return [tuple(each) for each in script_imports(text.encode())]


def test_the_first_import_that_python_does_not_come_with_is_certain() -> None:
    text = '"""A script."""\nfrom __future__ import annotations\nimport os, sys\nimport numpy as np\nimport torch.nn\n'
    assert imports(text) == [("numpy", 4, True), ("torch", 5, False)]


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", "def main():\n    import torch\n",
        "this is no Python\n", "",
    ],
)  # fmt: skip
def test_what_may_not_be_imported_at_all_does_not_count(text: str) -> None:
    assert imports(text) == []


@pytest.mark.parametrize("source", [b"\x00", b"\xff\xfe", b"(" * 10_000, b"# coding: nonsense\nimport torch\n"])
def test_what_no_python_can_read_has_no_imports(source: bytes) -> None:
    assert script_imports(source) == []


def oversights(**keys: Any) -> list[tuple[str, str]]:
    return [(".".join(path), message) for path, message in find_oversights(make_test_plan(**keys).content)]


@pytest.mark.parametrize(
    "command",
    [
        "python x.py --resume {resume_from}", "python x.py --json {a.b}", "python x.py --lr ${oc.env:LR}",
        "torchrun x.py --n {nodes} {run_dir}", "bash -c 'python a.py && python b.py | tee $LOG'",
        "python a.py --sep '|' --re '^a$' --cost '$5'", "grep -c 'a;' b", 'echo "a\\""',
    ],
)  # fmt: skip
def test_other_braces_and_what_is_quoted_are_left_alone(command: str) -> None:
    assert oversights(command=command, checkpoint={"glob": "*.pt"}) == []


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("python x.py --out {run_dri}", "did you mean {run_dir}?"),
        ("python x.py --n {node}", "did you mean {nodes}?"),
    ],
)
def test_braces_that_are_a_slip_are_told_with_what_is_meant(command: str, meant: str) -> None:
    [(key, message)] = oversights(command=command, params={"lr": 0.1})
    assert (key, message.partition("; ")[2]) == ("command", meant)


def test_the_placeholders_are_those_that_are_filled_in() -> None:
    place = NodePlace(
        node_rank=0, ranks=NodeRanks((1,)), interface="", address="", master_addr="", master_port=1, hostfile=""
    )
    assert {*facts_for_command(RunDir(Path("/x")), 1, None, place)} == {*PLACEHOLDERS}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python a.py && python b.py", "'&&'"),
        ("python a.py | tee log", "'|'"),
        ("python a.py > log", "'>'"),
        ("python a.py; python b.py", "'a.py;'"),
        ("python a.py --lr $LR", "'$LR'"),
        ("python a.py --data ~/data", "'~/data'"),
    ],
)  # fmt: skip
def test_what_only_a_shell_understands_is_told_once(command: str, shown: str) -> None:
    [(key, message)] = oversights(command=command)
    assert key == "command"
    assert message.startswith(f"the command does not run in a shell, and {shown} is passed on as it is; ")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("cd there; python a.py", "'cd' is a shell command, not a program"),
        ("A=1 python x.py", "'A=1' sets a variable, and only a shell can do that"),
    ],
)  # fmt: skip
def test_a_command_that_begins_with_a_word_of_the_shell_is_told_in_a_shell(command: str, why: str) -> None:
    [(_, message)] = oversights(command=command)
    assert message == f"the command does not run in a shell: {why}; write bash -c '{command}', or a script"


@pytest.mark.parametrize("text", ["0.1,0.3", "1, 2,3", "1e-3,3e-4", "-1,.5"])
def test_numbers_with_commas_are_told_to_be_text_and_no_other_texts(text: str) -> None:
    [(key, message)] = oversights(params={"model": {"lr": text}})
    assert key == "params.model.lr"
    assert f"--sweep params.model.lr={text}" in message
    assert f"for a list: [{text}]" in message
    assert oversights(params=dict(zip("abcde", ("0.1", "a,b", "1,2,x", "1,", "data/a,1"), strict=True))) == []


def test_a_very_long_number_is_read_only_once() -> None:
    # If each of its digits were tried as the end of the number, this would take hours.
    assert not NUMBERS.fullmatch("1" * 100_000)
    assert NUMBERS.fullmatch("1," + "1" * 100_000)
