"""Which words of a command name files."""

from __future__ import annotations

import shlex

import pytest

from slurmtrain.model.spec.command_files import paths_read, paths_written


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
