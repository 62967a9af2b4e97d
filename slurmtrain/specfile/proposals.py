"""What to write instead: of a value that is a mistake, and of a script that is given where a spec belongs.

A proposed value is one that the spec would be accepted with.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.command_words import in_shell
from slurmtrain.model.experiment.kinds import Entries, Items, KeyPath, Nullable, Section, keys_of, read_all
from slurmtrain.model.experiment.launcher import NODE, choose_launcher
from slurmtrain.model.experiment.slurm_options import SBATCH, advice_on, long_option
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import check_command, value_at
from slurmtrain.specfile.overrides import SCHEMA
from slurmtrain.system.yaml_file import parse_value, write_yaml

# How messages say what to write instead.
_NAMED = re.compile(
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
# Larger specs, and further mistakes, get no proposals: the spec is read again for each try.
_MOST_CHARACTERS = 50_000
MOST_MISTAKES = 50
_ABSENT = object()


def add_proposal(message: str, at: KeyPath, spec: Mapping[str, Any]) -> str:
    """The message about a mistake, with what to write instead.

    Most messages say it themselves. For the others, what may be meant is tried in the spec, then examples of what the
    key takes, and whether it can be left out.

    Args:
        message: The message.
        at: The key that it is about.
        spec: Plain data, interpolated.
    """
    if _NAMED.search(message) or len(repr(spec)) > _MOST_CHARACTERS:
        return message
    before = _mistakes_in(spec)

    def is_right(value: object) -> bool:
        after = _mistakes_in(_with(spec, at, value))
        # What conflicts with other keys is a mistake of its own.
        return (at, message) not in after and not any(path[: len(at)] == at for path, _ in after - before)

    for each in filter(is_right, _repairs(value_at(spec, at))):
        return f"{message}; write {_flow(each)}"
    if _BOUNDS.search(message):
        return message
    for each in filter(is_right, _examples_for_key(at)):
        return f"{message}; write for example {_flow(each)}"
    return f"{message}; leave it out" if is_right(_ABSENT) else message


def _mistakes_in(spec: object) -> set[tuple[KeyPath, str]]:
    return set(read_all(Section(Spec), spec)[1])


def _flow(value: object) -> str:
    """A value on a line of YAML, as a person would write it."""
    return write_yaml(value, flow=True).split("\n")[0]


def _parsed(text: str) -> object:
    """The value of a text in YAML; None if it is not YAML."""
    with contextlib.suppress(ValueError):
        return parse_value(text)
    return None


def _repairs(value: object) -> Iterator[object]:
    """What somebody may have meant who wrote a value, the likeliest first."""
    if isinstance(value, str):
        text = value.strip()
        if span := re.fullmatch(r"(\d+)\s*(?:-|:|\.\.|to)\s*(\d+)", text):
            yield {"min": int(span[1]), "max": int(span[2])}
        if not isinstance(parsed := _parsed(text), str):
            yield parsed
        yield from (text.lower(), re.split(r"\s*[,\s]\s*", text), re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._"))
    elif isinstance(value, bool):
        yield from (str(value).lower(), {"enabled": value})
    elif isinstance(value, int | float):
        yield from (str(value), f"{value}GB", *([int(value)] if value == value // 1 else []), [value])
    elif isinstance(value, list) and value:
        words = [each if isinstance(each, str) else _flow(each) for each in value]
        yield from (",".join(words), " ".join(words), words, value[0])
        if all(isinstance(each, Mapping) for each in value):
            yield {key: inner for each in value for key, inner in each.items()}
    elif isinstance(value, Mapping) and value:
        yield [value]


def _examples_for_key(at: KeyPath) -> Iterator[object]:
    """Values that a key may have."""
    # Items of a list are alike.
    item = tuple("0" if key.isdecimal() else key for key in at)
    if item in _EXAMPLES:
        yield _EXAMPLES[item]
    if at in SCHEMA:
        yield from _examples_of(SCHEMA[at])
    elif len(at) > 1 and isinstance(kind := SCHEMA.get(at[:-1]), Items | Entries):
        yield from _examples_of(kind.kind)
    yield from ("text", 1)


def _examples_of(kind: Any) -> Iterator[object]:
    kind = kind.kind if isinstance(kind, Nullable) else kind
    yield from map(_parsed, re.findall(r"`([^`]+)`", kind.text))
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
# A line that trains, and its command without what starts that on each node.
_TRAINS = re.compile(
    r"(?:(?:exec|time|(?:\S*/)?(?:srun|mpirun))\s(?:.*?\s)?)?"
    r"(?P<command>(?:\S*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|uv|conda)\s.*)"
)
_PRINTS = re.compile(r"echo\s[^|&;<>]*")
_OF_SHELL = re.compile(r"[$`|&;<>~*]")
# A word of a shell, with its quotes and brackets.
_VALUE = r"""(?>"(?:\\.|[^"\\])*"|'[^']*'|\$?\((?:[^()]|\([^()]*\))*\)|\S)++"""
# Options of launchers that say where ranks run, and how many.
_PLACE = re.compile(
    r"\s--?(?P<name>nnodes|nproc[-_]per[-_]node|node[-_]rank|master[-_]addr|master[-_]port|rdzv[-_]\w+|num[-_]machines"
    r"|num[-_]processes|machine[-_]rank|main[-_]process[-_](?:ip|port)|num[-_]gpus|num[-_]nodes|hostfile)"
    rf"(?:=|\s+)(?P<value>{_VALUE})"
)
_VALUE_OF = re.compile(rf"={_VALUE}")
_ASSIGNMENTS = re.compile(rf"(?P<export>export\s+)?(?:[A-Za-z_]\w*(?:=(?:{_VALUE})?|(?=\s|$))\s*)+")
# Variables that slurmtrain sets in every rank.
_SET_IN_RANKS = frozenset({"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK",
                           "OMP_NUM_THREADS"})  # fmt: skip
# The order of keys in a proposed spec.
_ORDER = ("name", "command", "launcher", "workdir", "log", "resources", "slurm", "setup")


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
        f"{path} is a batch script for sbatch; a spec is a YAML file: write this into {spec}, and check it with "
        f"'slurmtrain render {spec}':\n\n{_as_spec(text, str(path))}"
    )


def _as_spec(text: str, name: str) -> str:
    """The YAML of a spec that says what a batch script does, as far as its lines are of a kind that can be told."""
    spec, ranks, rest = _script_command(text, name)
    for option, value in _directives(text):
        advice = advice_on(SBATCH, option, value, None)
        if option in ("requeue", "no-requeue"):
            spec = _with(spec, ("requeue", "enabled"), option == "requeue")
        elif option in _KEYS:
            spec = _with(spec, tuple(_KEYS[option].split(".")), _value_of(option, value))
        elif match := _GPUS.search(advice or ""):
            spec = _with(spec, ("resources", "gpus_per_node"), parse_value(match[1]))
        elif advice == "":
            spec = _with(spec, ("slurm", option.replace("-", "_")), value)
        else:
            rest.append(f"# not translated: --{option}{'' if value is True else f'={value}'}: {advice or 'unknown'}\n")
    if ranks is not None:
        spec["resources"] = _resources_of_launcher(spec.get("resources", {}), ranks)
    # What cannot be a value of its key is left out: the whole must be a spec.
    # Several times, since a key that is gone may bring up another mistake.
    for _ in _KEYS:
        for path, _ in read_all(Section(Spec), spec)[1]:
            rest.append(f"# not translated: {'.'.join(path)}\n")
            spec = _with(spec, path[:2], _ABSENT)
    # In a command, ${NAME} would be an interpolation.
    spec["command"] = spec["command"].replace("${", "\\${")
    ordered = {key: spec[key] for key in (*_ORDER, *spec) if key in spec}
    return write_yaml(ordered) + "".join(dict.fromkeys(rest))


def _directives(text: str) -> Iterator[tuple[str, str | bool]]:
    """The options of a batch script's directives, by their long names."""
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
            with contextlib.suppress(ValueError):
                name, equals, value = long_option(SBATCH, typed).removeprefix("--").partition("=")
                yield name, value if equals else True


def _value_of(option: str, value: str | bool) -> object:
    text = str(value)
    if option == "mem" and text.isdecimal():
        return f"{text}MB" if int(text) else 0
    if option == "nodes" and (span := re.fullmatch(r"(\d+)-(\d+)", text)):
        return {"min": int(span[1]), "max": int(span[2])}
    if option == "job-name":
        return re.sub(r"[^A-Za-z0-9._-]", "-", text)
    return text if option in ("chdir", "mem", "output", "time") else parse_value(text)


def _script_command(text: str, name: str) -> tuple[dict[str, Any], int | None, list[str]]:
    """The command of a script, which is its last line that trains, and the lines before it as ``setup``.

    Then how many ranks its launcher starts on a node, 0 if that is not known, None if it has no launcher; and a comment
    for each line that is left out.
    """
    lines = [line.strip() for line in text.replace("\\\n", " ").split("\n")]
    lines = [line for line in lines if line and not line.startswith(("#", "set "))]
    for index in reversed(range(len(lines))):
        if match := _TRAINS.fullmatch(lines[index]):
            command = " ".join(match["command"].split())
            with contextlib.suppress(ValueError):
                check_command(command)
                return _spec_of_lines(command, lines[:index])
            break
    return {"command": shlex.join(["bash", name])}, None, []


def _spec_of_lines(command: str, setup: list[str]) -> tuple[dict[str, Any], int | None, list[str]]:
    """The keys for a command and the lines before it, without what says where ranks run and how many."""
    ranks = None
    if choose_launcher(command) == NODE:
        places = {match["name"].replace("-", "_"): match["value"] for match in _PLACE.finditer(command)}
        count = places.get("nproc_per_node") or places.get("num_gpus") or ""
        ranks = int(count) if count.isdecimal() else 0
        command = _PLACE.sub("", command)
    kept = _needed_lines(setup, command)
    is_shells = _OF_SHELL.search(command)
    spec = {
        "command": in_shell(command) if is_shells else command,
        **({"launcher": NODE} if is_shells and ranks is not None else {}),
        **({"setup": kept} if kept else {}),
    }
    return spec, ranks, [f"# not needed: {line}\n" for line in setup if line not in kept]


def _needed_lines(setup: list[str], command: str) -> list[str]:
    """The lines without those that print, or set only what slurmtrain sets, and without what only such lines read."""
    kept = [line for line in setup if not _PRINTS.fullmatch(line)]
    kept = [line for line in kept if not (names := _assigned(line)) or not names <= _SET_IN_RANKS]
    before: list[str] = []
    while len(kept) != len(before):
        before = kept
        texts = [*before, command]
        # A line stays if it sets no variables, or if one of the texts, itself aside, has their names.
        kept = [
            line
            for line in before
            if line.startswith("export")
            or not (names := _assigned(line))
            or any(re.search(rf"\b(?:{'|'.join(names)})\b", text) for text in texts if text != line)
        ]
    return kept


def _assigned(line: str) -> set[str]:
    """The variables that a line sets; none if it does anything else."""
    if not _ASSIGNMENTS.fullmatch(line) or not re.match(r"export\s|\w+=", line):
        return set()
    return {word.partition("=")[0] for word in _VALUE_OF.sub("=", line.removeprefix("export")).split()}


def _resources_of_launcher(resources: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The resources of a script whose launcher starts the ranks: its tasks had the CPUs of all of these."""
    tasks, cpus, gpus = (resources.get(key) for key in ("procs_per_node", "cpus_per_proc", "gpus_per_node"))
    own = {key: value for key, value in resources.items() if key != "procs_per_node"}
    per_gpu = str(gpus or "").rpartition(":")[2]
    count = ranks or (int(per_gpu) if per_gpu.isdecimal() else 0)
    if count and isinstance(cpus, int):
        own["cpus_per_proc"] = max(1, cpus * (tasks if isinstance(tasks, int) else 1) // count)
    return {**own, "procs_per_node": ranks} if ranks and str(ranks) != per_gpu else own
