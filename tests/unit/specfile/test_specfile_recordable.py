"""What a spec may record: no secrets, and no more than fits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from helpers.specfiles import BASE, SWEPT, Load, Mistakes, only_run

from slurmtrain.errors import SpecError
from slurmtrain.model.experiment.spec import read_spec
from slurmtrain.specfile import SpecFile
from slurmtrain.specfile.recordable import excesses, secret_in_shell


def recorded_text(loaded: SpecFile) -> str:
    """All that submit would write of a spec."""
    runs = [[json.dumps(run.plan.to_json(), ensure_ascii=False), *run.overrides] for run in loaded.runs]
    return json.dumps([loaded.text, runs])


@pytest.mark.parametrize(
    "env",
    [
        "env: {API_TOKEN: hunter2, A: 1}", "env:\n  API_TOKEN: hunter2\n  A: 1",
        "env:\n  API_TOKEN: 'hunter2'  # mine\n  A: 1", 'env:\n  API_TOKEN: "hunt\\x65r2"\n  A: 1',
        "env:\n  API_TOKEN: >-\n    hunter2\n  A: 1", "env:\n  API_TOKEN: |-\n    hunter2\n\n  A: 1",
        "env: {API_TOKEN: &x hunter2, OTHER_TOKEN: *x, A: 1}", "env: {A: 1, <<: {API_TOKEN: hunter2}}",
        "env:\n  ? API_TOKEN\n  : hunter2\n  A: 1",
    ],
)  # fmt: skip
def test_a_secret_is_in_neither_plan_nor_template_nor_spec_text(load: Load, env: str) -> None:
    loaded = load(f"name: x\n{env}\ncommand: python train.py\n")
    run = only_run(loaded)
    assert set(run.secrets.values()) == {"hunter2"}
    assert run.plan.spec.env["A"] == "1"
    written = recorded_text(loaded)
    assert "hunter2" not in written
    assert "hunt\\\\x65r2" not in written
    again = yaml.safe_load(loaded.text)
    assert (again["name"], again["command"]) == ("x", "python train.py")
    assert again["env"]["A"] == 1
    assert again["env"]["API_TOKEN"] == "<redacted>"


URL = "postgresql://ann:hunter2@db/runs"


@pytest.mark.parametrize(
    "env",
    [
        f"env: {{DB: '{URL}', A: 1}}",
        f"env:\n  DB: {URL}\n  A: 1  # not {URL}",
        'env:\n  DB: "postgresql:\\x2f\\x2fann:hunter2@db/runs"\n  A: 1',
        "env:\n  DB: >-\n    postgresql://ann:hunter2@db/runs\n  A: 1",
    ],
)
def test_a_url_with_a_password_is_a_secret_of_env(load: Load, env: str) -> None:
    loaded = load(f"name: x\n{env}\ncommand: python train.py\n")
    assert only_run(loaded).secrets == {"DB": URL}
    assert "hunter2" not in recorded_text(loaded)
    assert yaml.safe_load(loaded.text)["env"] == {"DB": "<redacted>", "A": 1}


def test_a_url_with_a_password_that_comes_from_a_variable_stays_a_reference(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASS", "hunter2")
    loaded = load(BASE + "env: {DB: 'postgresql://ann:${oc.env:PGPASS}@db/runs'}\n")
    assert only_run(loaded).secrets == {"DB": URL}
    assert "hunter2" not in recorded_text(loaded)
    assert "${oc.env:PGPASS}" in loaded.text


def test_a_url_with_a_password_in_a_sweep_is_not_recorded(load: Load) -> None:
    loaded = load(BASE + f"env: {{DB: x}}\nsweep:\n  env.DB: ['{URL}', '{URL}3']\n")
    assert [run.secrets for run in loaded.runs] == [{"DB": URL}, {"DB": f"{URL}3"}]
    assert "hunter2" not in recorded_text(loaded)


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (f"command: python train.py --db {URL}\n", "command"),
        (BASE + f"setup: ['export DB={URL}']\n", "setup.0"),
        (BASE + f"params: {{db: '{URL}'}}\n", "params.db"),
        (BASE + f"tracking: {{plugins: {{x: {{uri: '{URL}'}}}}}}\n", "tracking.plugins.x.uri"),
        (BASE + f"tracking: {{mlflow: {{uri: '{URL}'}}}}\n", "tracking.mlflow.uri"),
        (BASE + f"sidecars: ['push {URL}']\n", "sidecars.0"),
    ],
)
def test_a_url_with_a_password_is_refused_where_it_would_be_recorded(mistakes: Mistakes, spec: str, key: str) -> None:
    [mistake] = mistakes(spec)
    assert mistake[1] == key
    assert "hunter2" not in str(mistake)


@pytest.mark.parametrize("override", [f"tracking.mlflow.uri={URL}", f"params.db={URL}", f"resources.nodes={URL}"])
def test_a_url_with_a_password_in_an_argument_is_not_shown(load: Load, override: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(BASE, override)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("override", ["env.API_TOKEN=hunter2", "env={API_TOKEN: hunter2}", "+env.API_TOKEN=hunter2"])
def test_a_secret_of_an_override_is_not_recorded(load: Load, override: str) -> None:
    loaded = load(BASE, override)
    assert only_run(loaded).secrets == {"API_TOKEN": "hunter2"}
    assert "hunter2" not in recorded_text(loaded)


def test_secrets_of_a_sweep_are_not_recorded(load: Load) -> None:
    for loaded in (
        load(BASE + "env: {API_TOKEN: x}\nsweep:\n  env.API_TOKEN: [hunter2, hunter3]\n"),
        load(BASE + "env: {API_TOKEN: x}\n", sweep=["env.API_TOKEN=hunter2,hunter3"]),
    ):
        assert [run.secrets["API_TOKEN"] for run in loaded.runs] == ["hunter2", "hunter3"]
        assert "hunter" not in recorded_text(loaded)


@pytest.mark.parametrize(
    "reader",
    [
        "params: {x: '${env.API_TOKEN}'}", "name: '${env.API_TOKEN}'", "env: {B: '${env.API_TOKEN}'}",
    ],
)  # fmt: skip
def test_a_secret_that_another_key_repeats_is_refused_or_left_out(load: Load, reader: str) -> None:
    key, _, value = reader.partition(": ")
    text = BASE + (
        f"env: {{API_TOKEN: hunter2, {value[1:]}\n" if key == "env" else f"{reader}\nenv: {{API_TOKEN: hunter2}}\n"
    )
    try:
        written = recorded_text(load(text))
    except SpecError as error:
        written = str(error)
    assert "hunter2" not in written


def test_a_mistake_beside_a_secret_does_not_print_it(mistakes: Mistakes) -> None:
    [(where, _, message)] = mistakes(BASE, "env.A-TOKEN=hunter2")
    assert "hunter2" not in where + message


def test_a_secret_from_the_environment_is_read_where_it_is_needed(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    loaded = load(BASE + "env: {API_TOKEN: '${oc.env:MY_TOKEN}'}\n")
    assert only_run(loaded).secrets == {"API_TOKEN": "hunter2"}
    assert "hunter2" not in recorded_text(loaded)
    assert "${oc.env:MY_TOKEN}" in loaded.text


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
        "module load cuda/12.4", "export HF_TOKEN=$(cat ~/.cache/huggingface/token)", 'export HF_TOKEN="$MY_TOKEN"',
        "export HF_TOKEN=`pass hf`", "export HF_TOKEN=", "export TOKENIZERS_PARALLELISM=false",
        "export HF_HOME=/scratch/hf_cache",
        f"git checkout {HEX}",
        "",
    ],
)  # fmt: skip
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


# The longest variable has 128 KiB, with its name, the sign in between and the NUL at its end.
_LONGEST = (128 << 10) - len("A=") - 1
_WORD = " " + "x" * 999


def refused(**keys: Any) -> list[tuple[str, ...]]:
    mistakes: list[str] = []
    spec = read_spec({"name": "n", "command": "c", **keys}, lambda _, message: mistakes.append(message))
    assert not mistakes
    mistakes_of_length = list(excesses(spec))
    assert all(len(message) < 200 for _, message in mistakes_of_length)
    return [at for at, _ in mistakes_of_length]


@pytest.mark.parametrize(
    ("fits", "exceeds", "at"),
    [
        ({"env": {"A": "x" * _LONGEST}}, {"env": {"A": "x" * (_LONGEST + 1)}}, ("env", "A")),
        ({"env": {"A": "ü" * (_LONGEST // 2)}}, {"env": {"A": "ü" * (_LONGEST // 2 + 1)}}, ("env", "A")),
        ({"command": f"c {'x' * ((128 << 10) - 1)}"}, {"command": f"c {'x' * (128 << 10)}"}, ("command",)),
        ({"command": "c" + _WORD * 1000}, {"command": "c" + _WORD * 1100}, ("command",)),
        (
            {"env": {f"A{i}": "x" * 100_000 for i in range(10)}},
            {"env": {f"A{i}": "x" * 100_000 for i in range(11)}},
            ("env",),
        ),
        ({"setup": ["x" * 1000] * 1000}, {"setup": ["x" * 1000] * 1100}, ("setup",)),
        ({"teardown": ["x" * 1000] * 1000}, {"teardown": ["x" * 1000] * 1100}, ("teardown",)),
        ({"params": {"x": ["f" * 100] * 9000}}, {"params": {"x": ["f" * 100] * 41_000}}, ("params",)),
    ],
)
def test_a_value_is_refused_once_it_is_too_long(
    fits: dict[str, Any], exceeds: dict[str, Any], at: tuple[str, ...]
) -> None:
    assert refused(**fits) == []
    assert refused(**exceeds) == [at]
