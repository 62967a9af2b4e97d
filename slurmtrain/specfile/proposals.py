"""What to write instead: of a value that is a mistake, and of a script that is given where a spec belongs.

A proposed value is one that the spec would be accepted with.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.command_words import in_shell
from slurmtrain.model.experiment.kinds import Entries, Items, KeyPath, Nullable, Section, keys_of, read_all
from slurmtrain.model.experiment.launcher import NODE, choose_launcher
from slurmtrain.model.experiment.slurm_options import SBATCH, SLURM_OPTIONS, advice_on, long_option
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import check_command, value_at
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.yaml_file import parse_value, write_yaml

# How messages say what to write instead.
NAMED = re.compile(
    r"\b(?:write|use|did you mean|put it in quotes|keep one of|leave|remove|belongs (?:under|at)|set|pass it|give it"
    r"|goes into|the keys here are)\b|expected one of "
)
# Messages that say which values are right, but not which one is meant.
_BOUNDS = re.compile(r"of at least |from \d+ to |true or false|number of at least ")
# Values of keys whose kinds have no example.
_EXAMPLES: Mapping[KeyPath, object] = {
    ("command",): "python train.py",
    ("name",): "exp-1",
    ("params",): {"lr": 0.1},
    ("env",): {"NAME": "value"},
    ("slurm",): {"partition": "gpu"},
    ("after",): ["pretrain"],
    ("start_from", "run"): "pretrain",
    ("strategy", "density"): 0.01,
    ("resources", "components", "0"): {"nodes": 1},
    ("tracking", "metrics", "pattern"): r"loss=(?P<loss>\S+)",
    ("tracking", "metrics", "file"): "{run_dir}/metrics.csv",
    ("checkpoint", "keep", "best", "metric"): "loss",
    ("checkpoint", "step"): r"step(\d+)",
}
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)\s*[=:]\s*(.*)", re.DOTALL)
_NOTHING = frozenset({"none", "null", "unlimited", "infinite", "infinity", "inf", "no limit", ""})
# What reading a large spec again for each of many mistakes would take.
_MOST_VALUES, _MOST_MISTAKES = 2_000, 50


class Proposals:
    """Finds what to write instead of the values of a spec that are mistakes."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """``spec``: plain data, interpolated."""
        self._spec = spec
        self._is_large = _count_values(spec) > _MOST_VALUES
        self._made = 0

    def add_to(self, message: str, at: KeyPath) -> str:
        """The message about a mistake at a key, with what to write instead."""
        if NAMED.search(message) or self._is_large or self._made >= _MOST_MISTAKES:
            return message
        self._made += 1
        value = value_at(self._spec, at)
        before = _mistakes_in(self._spec)
        for each in _repairs(value):
            if self._is_right(at, each, message, before):
                return f"{message}; write {flow(each)}"
        if _BOUNDS.search(message):
            return message
        for each in _examples_for_key(at):
            if self._is_right(at, each, message, before):
                return f"{message}; write for example {flow(each)}"
        return f"{message}; leave it out" if self._is_right(at, _ABSENT, message, before) else message

    def _is_right(self, at: KeyPath, value: object, message: str, before: set[tuple[KeyPath, str]]) -> bool:
        """Whether the spec with this value does not have this mistake, nor another one at the key."""
        after = _mistakes_in(_with(self._spec, at, value))
        # What conflicts with other keys is a mistake of its own.
        return (at, message) not in after and not any(path[: len(at)] == at for path, _ in after - before)


def _mistakes_in(spec: object) -> set[tuple[KeyPath, str]]:
    return set(read_all(Section(Spec), spec)[1])


def flow(value: object) -> str:
    """A value on a line of YAML, as a person would write it."""
    return write_yaml(value, flow=True).split("\n")[0]


def parse_or_none(text: str) -> object:
    """What a text is in YAML; None if it is nothing."""
    with contextlib.suppress(ValueError):
        return parse_value(text)
    return None


def _repairs(value: object) -> Iterator[object]:
    """What somebody may have meant who wrote a value, the likeliest first."""
    if isinstance(value, str):
        yield from _repairs_of_text(value.strip())
    elif isinstance(value, bool):
        yield from (str(value).lower(), {"enabled": value})
    elif isinstance(value, int | float):
        yield from (str(value), f"{value}GB")
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        yield [value]
    elif isinstance(value, list) and value:
        words = [each if isinstance(each, str) else flow(each) for each in value]
        yield from (",".join(words), " ".join(words), words)
        yield from ([_assigned(words)] if _assigned(words) else [])
        if all(isinstance(each, Mapping) for each in value):
            yield {key: inner for each in value for key, inner in each.items()}
        if len(value) == 1:
            yield value[0]
    elif isinstance(value, Mapping) and value:
        yield [value]


def _repairs_of_text(text: str) -> Iterator[object]:
    span = re.fullmatch(r"(\d+)\s*(?:-|:|\.\.|to)\s*(\d+)", text)
    if span:
        yield {"min": int(span[1]), "max": int(span[2])}
    if text.lower() in _NOTHING:
        yield None
    if text.lower() in ("yes", "on", "true", "1", "no", "off", "false", "0"):
        yield text.lower() in ("yes", "on", "true", "1")
    if not isinstance(parsed := parse_or_none(text), str):
        yield parsed
    yield text.lower()
    words = re.split(r"\s*[,\s]\s*", text)
    yield from ([_assigned(words)] if _assigned(words) else [])
    yield words
    yield re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Words such as ``A=1`` as a mapping; empty if one of them is none."""
    matches = [_ASSIGNED.fullmatch(word) for word in words]
    return {match[1]: match[2] for match in matches if match} if all(matches) else {}


def _examples_for_key(at: KeyPath) -> Iterator[object]:
    """What a key may have."""
    # Items of a list are alike.
    item = tuple("0" if key.isdecimal() else key for key in at)
    if item in _EXAMPLES:
        yield _EXAMPLES[item]
    if at in SCHEMA:
        yield from _examples_of(SCHEMA[at])
    elif len(at) > 1 and at[:-1] in SCHEMA:
        kind = SCHEMA[at[:-1]]
        yield from _examples_of(kind.kind) if isinstance(kind, Items | Entries) else ()
    yield from ("text", 1)


def _examples_of(kind: Any) -> Iterator[object]:
    kind = kind.kind if isinstance(kind, Nullable) else kind
    for text in re.findall(r"`([^`]+)`", kind.text):
        yield parse_or_none(text)
    if number := re.search(r"at least (\d+)", kind.text):
        yield max(1, int(number[1]))
    if isinstance(kind, Items):
        yield from ([each] for each in _examples_of(kind.kind))
        yield []
    elif isinstance(kind, Entries):
        yield from ({"name": each} for each in _examples_of(kind.kind))
        yield {}
    elif isinstance(kind, Section):
        for name, key in keys_of(kind.cls).items():
            if not key.required:
                yield {name: key.kind.write(key.default)}
            yield from ({name: each} for each in _examples_of(key.kind))


_ABSENT = object()


def _with(data: Any, at: KeyPath, value: object) -> Any:
    """A copy of the data with another value at a key, or without that key."""
    if not at:
        return value
    key, *below = at
    if isinstance(data, list) and key.isdecimal() and int(key) < len(data):
        inner = _with(data[int(key)], tuple(below), value)
        return [*data[: int(key)], *([] if inner is _ABSENT else [inner]), *data[int(key) + 1 :]]
    section = dict(data) if isinstance(data, Mapping) else {}
    inner = _with(section.get(key), tuple(below), value)
    section.pop(key, None) if inner is _ABSENT else section.__setitem__(key, inner)
    return section


def _count_values(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_values, value.values())) + 1
    return sum(map(_count_values, value)) + 1 if isinstance(value, list) else 1


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
    for option, value in _directives(text):
        advice = advice_on(SBATCH, option, value, None)
        if option in _KEYS:
            _set_key(spec, _KEYS[option], _value_of(option, value))
        elif match := _GPUS.search(advice or ""):
            _set_key(spec, "resources.gpus_per_node", parse_value(match[1]))
        elif advice == "":
            _set_key(spec, f"slurm.{option.replace('-', '_')}", value)
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


def _directives(text: str) -> Iterator[tuple[str, str | bool]]:
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


def _set_key(spec: dict[str, Any], key: str, value: object) -> None:
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
