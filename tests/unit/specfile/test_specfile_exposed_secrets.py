"""Warnings of secrets that other users could read, or that would be recorded."""

from __future__ import annotations

import pytest
from helpers.specfiles import BASE, SWEPT, Load

from slurmtrain.specfile.recordable import secret_in_shell

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("export HF_TOKEN=hunter2", "HF_TOKEN"),
        ("export A=1 MY_API_KEY='hunter2'; true", "MY_API_KEY"),
        ('DB_PASSWORD="hunter2" ./login.sh', "DB_PASSWORD"),
        ("test -n x && export AWS_SECRET=x", "AWS_SECRET"),
        ("huggingface-cli login --token hf_abcdefghijklmnopqrstuvwx", "a token"),
        ("git clone https://ghp_abcdefghijklmnopqrstuvwxyz0123456789@github.com/a/b", "a token"),
        ("aws configure set aws_access_key_id AKIAIOSFODNN7EXAMPLE", "a token"),
        (f"wandb login {HEX}", "a token"),
    ],
)
def test_a_line_of_shell_with_a_secret_is_recognized(line: str, secret: str) -> None:
    assert secret_in_shell(line) == secret


@pytest.mark.parametrize(
    "line",
    [
        "module load cuda/12.4",
        "export HF_TOKEN=$(cat ~/.cache/huggingface/token)",
        'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=`pass hf`",
        "export HF_TOKEN=",
        "export TOKENIZERS_PARALLELISM=false",
        "export HF_HOME=/scratch/hf_cache",
        f"git checkout {HEX}",
        "",
    ],
)
def test_a_line_of_shell_without_a_secret_is_left_alone(line: str) -> None:
    assert secret_in_shell(line) is None


def test_a_secret_in_setup_is_reported_once_with_its_line(load: Load) -> None:
    loaded = load(SWEPT + "setup:\n  - module load cuda\n  - export HF_TOKEN=hunter2\nsweep: {params.lr: [1, 2]}\n")
    [warning] = loaded.warnings
    line = (SWEPT + "setup:\n  - module load cuda\n").count("\n") + 1
    assert (warning.where.rpartition(":")[2], warning.key) == (str(line), "setup.1")
    assert "HF_TOKEN" in warning.message
    assert "'env'" in warning.message
    assert "hunter2" not in str(warning)


@pytest.mark.parametrize("override", ["env.API_TOKEN=hunter2", "env={API_TOKEN: hunter2}"])
def test_a_secret_on_the_command_line_is_reported(load: Load, override: str) -> None:
    [warning] = load(BASE, override).warnings
    assert warning.where.startswith("command line (env")
    assert "hunter2" not in str(warning)


@pytest.mark.parametrize("override", ["env.API_TOKEN=${oc.env:HOME}", "env={A: 1}", "env.A=1", "params.lr=2"])
def test_other_overrides_are_not_reported(load: Load, override: str) -> None:
    assert load(SWEPT, override).warnings == ()
