"""Scripts that are given where a spec belongs: what to write instead, also of a batch script with its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.kinds import KeyPath, Section, read_all
from slurmtrain.model.experiment.launcher import NODE, choose_launcher
from slurmtrain.model.experiment.oversights import in_shell
from slurmtrain.model.experiment.sbatch import SBATCH, long_option
from slurmtrain.model.experiment.slurm_options import SLURM_OPTIONS, advice_on
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import check_command
from slurmtrain.system.yaml_file import parse_value, write_yaml

_DIRECTIVE = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
# Options that correspond to a key of the spec.
_KEYS = {
    "chdir": "workdir",
    "cpus-per-task": "resources.cpus_per_proc",
    "gpus-per-node": "resources.gpus_per_node",
    "job-name": "name",
    "mem": "resources.mem",
    "nodes": "resources.nodes",
    "output": "log",
    "ntasks-per-node": "resources.procs_per_node",
    "time": "resources.time",
}
_GPUS = re.compile(r"'resources\.gpus_per_node: ([^']+)'")
# What runs scripts, by their suffix.
_SCRIPTS = {".py": "python", ".sh": "bash"}
# What a training command begins with.
_PROGRAM = re.compile(r"(?:exec |time )*(?:\S*/)?(srun|mpirun|python[\d.]*|torchrun|accelerate|deepspeed|uv|conda)\s")
_OF_SHELL = re.compile(r"[$`|&;<>~*]")


def check_is_spec(path: Path, text: str) -> None:
    """Raise PathError, with what to write instead, if the ``text`` of a file is a script's."""
    is_script = text.startswith("#!") or path.suffix in _SCRIPTS
    if not is_script and (path.suffix in (".yaml", ".yml") or not _DIRECTIVE.search(text)):
        return
    if not _DIRECTIVE.search(text):
        interpreter = _SCRIPTS.get(path.suffix) or ("python" if "python" in text.partition("\n")[0] else "bash")
        command = f"'command: {shlex.join([interpreter, str(path)])}'"
        raise PathError(f"{path} is a script; a spec is a YAML file with a line such as {command}")
    spec = path.with_suffix(".yaml")
    raise PathError(
        f"{path} is a batch script of sbatch; a spec is a YAML file: write this into {spec}, and see what it does with "
        f"'slurmtrain render {spec}':\n\n{as_spec(text, str(path))}"
    )


def as_spec(text: str, name: str) -> str:
    """The YAML of a spec that says what a batch script does, as far as its lines are of a kind that can be told.

    Args:
        text: the script.
        name: its file's.
    """
    spec: dict[str, Any] = _what_runs(text, name)
    rest = []
    for option, value in _options(text):
        advice = advice_on(SBATCH, option, value, None)
        if option in _KEYS:
            _set(spec, _KEYS[option], _value_of(option, value))
        elif match := _GPUS.search(advice or ""):
            _set(spec, "resources.gpus_per_node", parse_value(match[1]))
        elif advice == "":
            _set(spec, f"slurm.{option.replace('-', '_')}", value)
        else:
            rest.append(f"# not translated: --{option}{'' if value is True else f'={value}'}: {advice or 'unknown'}\n")
    # What cannot be a value of its key is left out: the whole must be a spec.
    for _ in range(len(SLURM_OPTIONS)):
        _, wrong = read_all(Section(Spec), spec)
        if not wrong:
            break
        for path, _ in wrong:
            rest.append(f"# not translated: {'.'.join(path)}\n")
            _take_out(spec, path)
    # In a command, ${NAME} would be an interpolation.
    spec["command"] = spec["command"].replace("${", "\\${")
    return write_yaml(spec) + "".join(dict.fromkeys(rest))


def _options(text: str) -> Iterator[tuple[str, str | bool]]:
    """The options of the directives, by their long names."""
    for match in _DIRECTIVE.finditer(text):
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:  # quotes that do not match, which sbatch refuses
            continue
        while words:
            typed = words.pop(0)
            # The value may be the next word.
            if "=" not in typed and words and not words[0].startswith("-"):
                typed = f"{typed} {words.pop(0)}"
            try:
                name, equals, value = long_option(SBATCH, typed).removeprefix("--").partition("=")
            except ValueError:
                continue
            yield name, value if equals else True


def _value_of(option: str, value: str | bool) -> object:
    text = str(value)
    if option == "mem":
        return f"{text}MB" if text.isdecimal() and text != "0" else text if text != "0" else 0
    if option == "nodes" and (span := re.fullmatch(r"(\d+)-(\d+)", text)):
        return {"min": int(span[1]), "max": int(span[2])}
    if option in ("job-name", "chdir", "output", "time"):
        return re.sub(r"[^A-Za-z0-9._-]", "-", text) if option == "job-name" else text
    return parse_value(text)


def _what_runs(text: str, name: str) -> dict[str, Any]:
    """The command of a script, and the lines before it."""
    lines = [line.strip() for line in text.replace("\\\n", " ").split("\n")]
    lines = [line for line in lines if line and not line.startswith("#") and not line.startswith("set ")]
    last = next((index for index in reversed(range(len(lines))) if _PROGRAM.match(lines[index])), None)
    if last is None:
        return {"command": shlex.join(["bash", name])}
    command = _without_srun(lines[last])
    try:
        check_command(command)
    except ValueError:
        return {"command": shlex.join(["bash", name])}
    spec: dict[str, Any] = {"command": command}
    if _OF_SHELL.search(command):
        spec = {"command": in_shell(command)}
        if choose_launcher(command) == NODE:
            spec["launcher"] = NODE
    if lines[:last]:
        spec["setup"] = lines[:last]
    return spec


def _without_srun(line: str) -> str:
    """A line without the srun that it begins with, and that srun's options."""
    words = line.split()
    while words and (PurePath(words[0]).name == "srun" or words[0] in ("exec", "time")):
        is_srun = words.pop(0) not in ("exec", "time")
        while is_srun and words and words[0].startswith("-"):
            option = words.pop(0)
            row = next((row for row in SLURM_OPTIONS.values() if row.letter and option == f"-{row.letter}"), None)
            row = row or SLURM_OPTIONS.get(option.removeprefix("--"))
            if row is not None and row.takes_value == "=" and words:
                words.pop(0)
    return " ".join(words)


def _set(spec: dict[str, Any], key: str, value: object) -> None:
    section, dot, name = key.rpartition(".")
    (spec.setdefault(section, {}) if dot else spec)[name] = value


def _take_out(spec: dict[str, Any], path: KeyPath) -> None:
    section: Mapping[str, Any] | Any = spec
    for key in path[:-1]:
        section = section.get(key, {}) if isinstance(section, dict) else {}
    if isinstance(section, dict) and path and path[-1] in section:
        del section[path[-1]]
    elif path:
        _take_out(spec, path[:-1])
