"""What a command reads and writes, and what its script imports."""

from __future__ import annotations

import shlex

import pytest

from slurmtrain.model.experiment.command_words import (
    DIRECTORY,
    FILE,
    UNKNOWN,
    paths_read,
    paths_written,
    result_places,
    script_imports,
)


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("--data data/train.bin", "data/train.bin"),
        ("--data=data/train.bin", "data/train.bin"),
        ("--config configs/small.yaml", "configs/small.yaml"),
        ("configs/small.yaml", "configs/small.yaml"),
        ("--train-file train.jsonl --lr 0.1", "train.jsonl"),
        ("data.path=data/x.parquet", "data/x.parquet"),
        ("--data ./data", "./data"),
        ("--verbose --vocab ../vocab.txt", "../vocab.txt"),
        ("--deepspeed ds_config.json", "ds_config.json"),
        ("--weights weights/start.pt", "weights/start.pt"),
        ("--job.config_file ./train_configs/llama3_8b.toml", "./train_configs/llama3_8b.toml"),
    ],
)
def test_a_file_that_is_read_is_recognized(words: str, path: str) -> None:
    assert [each.path for each in paths_read(["python", *shlex.split(words)])] == [path]


@pytest.mark.parametrize(
    "words",
    [
        "--out out.json",
        "--output_dir ./out",
        "--output-file results.csv",
        "--save_path model.pt",
        "--save-to ./x.pt",
        "--log-file train.txt",
        "--ckpt_path last.pt",
        "--checkpoint x.pt",
        "--resume last.pt",
        "--outputDir ./out",
        "--metrics-file m.jsonl",
        "--export ./onnx.zip",
        "-o x.json",
        "--data out/data.bin",
        "results.json",
        "logs/run.yaml",
        "hydra.run.dir=./here",
        "--model meta-llama/Llama-3.2-1B",
        "--dataset stanfordnlp/imdb",
        "--data /scratch/data.bin",
        "--data ~/data.bin",
        "--data s3://bucket/data.bin",
        "--data data/*.bin",
        "--data {run_dir}/data.bin",
        "--data $DATA/data.bin",
        "--mime text/plain",
        "--lr 0.1",
        "--name a.b",
        "--weights yolov8n.pt",
        "--pred ./preds",
        "--db runs.db",
        "-a resnet50 --dist-url tcp://127.0.0.1:29500 /imagenet",
        "--model_name_or_path gpt2 --dataset_name wikitext --per_device_train_batch_size 8",
        "fit --trainer.max_epochs 3 --model.lr 1e-3",
        "-c 'open(\"a.csv\")'",
        "--version 1.0 --host api.example.org",
        "--regex '.*.txt'",
        "--files a.csv,b.csv",
        "--json '{\"a\": 1}'",
        "data.csv",
        "lr=0.1",
        "-1.5",
        "--x ''",
        "--flag",
    ],
)
def test_what_may_be_something_else_is_left_alone(words: str) -> None:
    assert list(paths_read(["python", *shlex.split(words)])) == []


@pytest.mark.parametrize(
    ("words", "option", "path"),
    [
        ("--output_dir out", "--output_dir", "out"),
        ("--output-dir=out", "--output-dir", "out"),
        ("--out out/here", "--out", "out/here"),
        ("-o out", "-o", "out"),
        ("--save checkpoints/gpt2 --load checkpoints/gpt2", "--save", "checkpoints/gpt2"),
        ("--output_dir /scratch/out", "--output_dir", "/scratch/out"),
        ("--save_path model.pt", "--save_path", "model.pt"),
        ("--checkpoint-dir ckpt --lr 1", "--checkpoint-dir", "ckpt"),
        ("--trainer.default_root_dir x --default_root_dir y", "--default_root_dir", "y"),
        ("hydra.run.dir=out", "hydra.run.dir", "out"),
        ("train.output_dir=out", "train.output_dir", "out"),
        ("--outputDir out", "--outputDir", "out"),
    ],
)
def test_a_place_for_results_is_recognized(words: str, option: str, path: str) -> None:
    assert [*map(tuple, paths_written(["python", *shlex.split(words)]))] == [(option, path)]


@pytest.mark.parametrize(
    "words",
    [
        "--output_dir {run_dir}/out",
        "--output_format json",
        "--save_steps 500",
        "--save_strategy steps",
        "--log_dir runs",
        "--logging_dir tb",
        "--data_dir data",
        "--cache_dir cache",
        "--model_path model",
        "--output json",
        "--out 128",
        "--save true",
        "--save_file False",
        "--output_dir",
        "--output_dir --verbose",
    ],
)
def test_what_two_runs_can_share_is_left_alone(words: str) -> None:
    assert list(paths_written(["python", *shlex.split(words)])) == []


ROOT, WORKDIR = "/home/me/repo", "/home/me/repo/sub"


@pytest.mark.parametrize(
    ("words", "places"),
    [
        ("--output-dir out", [("sub/out", DIRECTORY)]),
        ("--output_dir=out/v1.5", [("sub/out/v1.5", DIRECTORY)]),
        ("--savedir a --workdir b", [("sub/a", DIRECTORY), ("sub/b", DIRECTORY)]),
        ("--out out/", [("sub/out", DIRECTORY)]),
        ("--out out/{run_id}/last", [("sub/out", DIRECTORY)]),
        ("--save best.pt", [("sub/best.pt", FILE)]),
        ("--save ckpts", [("sub/ckpts", UNKNOWN)]),
        ("-o ../out/", [("out", DIRECTORY)]),
        ("--output-dir ../../shared", [("../shared", DIRECTORY)]),
        ("--out x.csv --out x.csv", [("sub/x.csv", FILE)]),
    ],
)
def test_places_are_named_by_options(words: str, places: list[tuple[str, str]]) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == places


@pytest.mark.parametrize(
    "words",
    ["--output-dir .", "--output-dir ..", "--output-dir ../../../x", "--output-dir {run_dir}/out", "--out /abs/x",
     "--output-dir ~/x", "--config c.yaml", "--data data"],
)  # fmt: skip
def test_what_is_elsewhere_or_the_working_directory_itself_is_no_place(words: str) -> None:
    assert result_places(["python", "train.py", *words.split()], None, WORKDIR, ROOT) == []


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("out/ckpt-*.pt", "sub/out"),
        ("out/run-?/ckpt-*.pt", "sub/out"),
        ("a/b/{name}/last.pt", "sub/a/b"),
        ("*.pt", None),
        ("{checkpoint_dir}/x-*", None),
        ("/scratch/x-*", None),
    ],
)
def test_a_pattern_of_checkpoints_names_its_directory(pattern: str, path: str | None) -> None:
    assert result_places(["python"], pattern, WORKDIR, ROOT) == ([(path, DIRECTORY)] if path else [])


def imports(text: str) -> list[tuple[str, int, bool]]:
    return [tuple(each) for each in script_imports(text.encode())]


def test_the_first_import_that_python_does_not_come_with_is_certain() -> None:
    text = '"""A script."""\nfrom __future__ import annotations\nimport os, sys\nimport numpy as np\nimport torch.nn\n'
    assert imports(text) == [("numpy", 4, True), ("torch", 5, False)]


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.environ['A'] = '1'\n",
        "import sys\nsys.path.insert(0, '/elsewhere')\n",
        "def f():\n    pass\nf()\n",
        "if True:\n    raise SystemExit\n",
    ],
)
def test_after_other_code_nothing_is_certain(before: str) -> None:
    [(package, _, certain)] = imports(before + "import torch\n")
    assert (package, certain) == ("torch", False)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "def main():\n    import torch\n",
        "from . import torch\n",
        "import os.path, json\n",
        "this is no Python\n",
        "",
    ],
)
def test_what_may_not_be_imported_at_all_does_not_count(text: str) -> None:
    assert imports(text) == []


@pytest.mark.parametrize("source", [b"\x00", b"\xff\xfe", b"(" * 10_000, b"# coding: nonsense\nimport torch\n"])
def test_what_no_python_can_read_has_no_imports(source: bytes) -> None:
    assert script_imports(source) == []


@pytest.mark.filterwarnings("error")
def test_what_python_warns_of_in_a_script_is_not_printed() -> None:
    assert imports("import torch\nx = '\\d'\ny = 1 is 1\n") == [("torch", 1, True)]


def test_several_names_in_one_import_come_in_their_order() -> None:
    assert imports("import numpy, torch\nfrom torch import nn\n") == [
        ("numpy", 1, True),
        ("torch", 1, False),
        ("torch", 2, False),
    ]
