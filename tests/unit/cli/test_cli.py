"""The command line: exit codes, messages, completion, text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.preloaded import Called, shared

from slurmtrain.cli import SECTIONS, cli, formatting, main


def call(*arguments: str, cwd: Path, **env: str) -> Called:
    return shared().call(*arguments, cwd=cwd, env={**os.environ, "SLURMTRAIN_RUNS": str(cwd / "runs"), **env})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "this file does not exist"),
        ("", "the file is empty"),
        ("a: [1\n", "this is not YAML"),
        ("command: python x.py\nresource: {nodes: 2}\n", "did you mean 'resources'?"),
        ("command: python x.py\nresources: {nodes: two}\n", "expected a whole number"),
        ("command: python x.py\nresources: {nodes: -1}\n", "of at least 1, found -1"),
        ("command: python x.py\nresources: {time: 12:00:00}\n", "put it in quotes"),
        ("command: python x.py\nresources: {mem: 4}\n", "has no unit"),
        ("command: python x.py\nslurm: {partion: a}\n", "did you mean 'partition'?"),
        ("command: python x.py\nname: 'a/b'\n", "cannot be the name of a run"),
        ("command: python x.py\nname: '   '\n", "a blank text"),
        (f"command: python x.py\nname: {'n' * 300}\n", "at most 64 characters"),
        ('command: python "x.py\n', "quotes of the command do not match"),
        ("command: python x.py\nparams: {a: [{b: 1}]}\n", "a list of parameters holds scalars"),
        ("command: python x.py\nparams: {a: '${params.b}'}\n", "refers to a key that does not exist"),
        ("command: python x.py\ncheckpoint: {every: {steps: 1, minutes: 1}}\n", "exclude each other"),
        ("command: python x.py\nworkdir: /no/such/place\n", "/no/such/place does not exist"),
        ("command: python x.py\nresources: {gpus_per_node: 64}\n", "not available with this executor"),
        ("command: python x.py\nnetwork: {interface: eth7}\n", "not available with this executor"),
    ],
)
def test_bad_input_gets_one_clear_message_and_creates_nothing(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "exp.yaml").write_text(content)
    completed = call("submit", "exp.yaml", "--executor", "local", cwd=tmp_path)
    assert completed.code == 2
    assert message in completed.stderr
    assert "Traceback" not in completed.stderr
    assert completed.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_render_says_who_starts_the_ranks_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("command: torchrun train.py\n")
    completed = call("render", "exp.yaml", "--json", cwd=tmp_path)
    assert json.loads(completed.stdout)["runs"][0]["plan"]["spec"]["launcher"] == "node"
    assert "'torchrun' starts ranks on its own, so it is started once per node" in completed.stderr


def test_render_shows_what_each_executor_does(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(
        "command: python x.py --name 'a b'\nsetup: |\n  export A=1\n  export B=2\nresources: {procs_per_node: 2}\n"
    )
    slurm, local = (call("render", "exp.yaml", "--executor", name, cwd=tmp_path).stdout for name in ("slurm", "local"))
    assert "#SBATCH --ntasks-per-node=1\n" in slurm
    assert "# on this machine\n" in local
    assert f"# 2 processes:\ncd {tmp_path}" in local
    assert "/python x.py --name 'a b'\n" in local
    assert all("\nexport A=1\n" in text and "\nexport B=2\n" in text for text in (slurm, local))
    [run] = json.loads(call("render", "exp.yaml", "--executor", "local", "--json", cwd=tmp_path).stdout)["runs"]
    assert run["batch_script"] is None
    assert run["local_script"] in local


def test_a_python_on_path_that_is_not_slurmtrains_own_is_pointed_out(tmp_path: Path) -> None:
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.symlink_to("/bin/true")
    (tmp_path / "exp.yaml").write_text("command: python -c pass\ntracking: {mlflow: {enabled: false}}\n")
    path = f"{other.parent}{os.pathsep}{os.environ['PATH']}"
    completed = call("submit", "exp.yaml", "--executor", "local", "--wait", cwd=tmp_path, PATH=path)
    assert completed.code == 0, completed.stderr
    assert f"warning: 'python' in the command is {other}" in completed.stderr


def test_submitting_to_slurm_without_sbatch_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text("command: python x.py\n")
    completed = call("submit", "exp.yaml", "--executor", "slurm", cwd=tmp_path, PATH="/nowhere")
    assert (completed.code, "there is no sbatch on this machine's PATH" in completed.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["show", "logs", "wait", "resume", "rerun", "cancel"])
def test_a_run_that_does_not_exist_is_named(tmp_path: Path, command: str) -> None:
    completed = call(command, "nosuch", cwd=tmp_path)
    assert completed.code == 2
    assert "there is no run 'nosuch'" in completed.stderr


def test_a_word_that_begins_several_ids_lists_them(tmp_path: Path) -> None:
    for run_id in ("0aaaaaaaaa", "0aaaaaaaab"):
        directory = tmp_path / "runs" / run_id
        (directory / "journal").mkdir(parents=True)
        created = {"t": 1.0, "kind": "created", "name": "n", "executor": "local"}
        (directory / "journal" / "created.jsonl").write_text(json.dumps(created) + "\n")
    completed = call("show", "0aaaa", cwd=tmp_path)
    assert completed.code == 2
    assert "0aaaaaaaaa (n), 0aaaaaaaab (n)" in completed.stderr
    assert json.loads(call("show", "0aaaaaaaab", "--json", cwd=tmp_path).stdout)["run"]["id"] == "0aaaaaaaab"
    assert json.loads(call("show", "n", "--json", cwd=tmp_path).stdout)["run"]["id"] == "0aaaaaaaab"
    assert json.loads(call("show", "@last", "--json", cwd=tmp_path).stdout)["run"]["id"] == "0aaaaaaaab"


def test_status_without_runs_creates_nothing(tmp_path: Path) -> None:
    completed = call("status", "--json", cwd=tmp_path)
    assert json.loads(completed.stdout)["runs"] == []
    assert list(tmp_path.iterdir()) == []


def test_completion_names_runs_and_commands(tmp_path: Path) -> None:
    assert "_SLURMTRAIN_COMPLETE" in call("completion", "bash", cwd=tmp_path).stdout
    completed = call(cwd=tmp_path, _SLURMTRAIN_COMPLETE="bash_complete", COMP_WORDS="slurmtrain sta", COMP_CWORD="1")
    assert "plain,status" in completed.stdout


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    code = f"{sys.executable} -m slurmtrain completion bash | true; exit ${{PIPESTATUS[0]}}"
    completed = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "Traceback" not in completed.stderr
    assert "BrokenPipe" not in completed.stderr


def test_an_error_has_its_traceback_with_debug_only(tmp_path: Path) -> None:
    assert "Traceback" in call("submit", "--debug", "none.yaml", "--executor", "local", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (0, "0s"), (59.9, "59s"), (61, "1m01s"), (3600, "1h00m"), (90_000, "1d01h")]
)
def test_a_length_of_time_has_two_units(seconds: float | None, shown: str) -> None:
    assert formatting.duration(seconds) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")])
def test_a_size_has_a_unit_of_1024(count: float, shown: str) -> None:
    assert formatting.size(count) == shown


@pytest.mark.parametrize(
    ("word", "instead"),
    [("ls", "status"), ("ps", "status"), ("stop", "cancel"), ("rm", "delete"), ("gc", "prune"), ("init", "render")],
)
def test_the_words_of_other_programs_lead_to_the_right_command(word: str, instead: str) -> None:
    result = CliRunner().invoke(cli, [word])
    assert result.exit_code == 2
    assert f"no such command '{word}'; " in result.output
    assert f"'slurmtrain {instead}" in result.output


def test_an_interruption_within_the_definition_of_a_class_is_one_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def start(*_: object, **__: object) -> None:
        type("Imported", (), {"field": Interrupted()})

    monkeypatch.setattr(cli, "main", start)
    with pytest.raises(SystemExit) as left:
        main(["status"])
    assert (left.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_the_help_has_every_command_in_the_section_of_what_it_is_for() -> None:
    sections = cli.sections()
    assert list(sections) == list(SECTIONS)
    listed = [name for names in sections.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(cli.places)
    text = CliRunner().invoke(cli, ["--help"]).output
    positions = [text.index(f"\n{title}:\n") for title in sections]
    assert positions == sorted(positions)
    assert all(f"\n  {name} " in text for name in listed)


def test_a_plug_ins_command_without_a_section_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "places", {**cli.places, "brew": ("kitchen", "Make coffee.")})
    *_, (title, names) = cli.sections().items()
    assert (title, names) == ("More commands", ["brew"])
