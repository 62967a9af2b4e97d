"""What is hardly ever meant in a spec: braces without their ``$``, a shell's signs without a shell.

What can only fail is a mistake, anything else is allowed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from slurmtrain.model.experiment import launcher
from slurmtrain.model.experiment.kinds import KeyPath, nearest
from slurmtrain.model.experiment.values import SHELL_KEYS, is_secret_variable, texts_in, value_at

# What commands may have in braces: docs/spec.md.
PLACEHOLDERS = (
    *launcher.PLACEHOLDERS, "resume_from", "resume_dir", "resume_tag", "run_dir", "checkpoint_dir", "run_id", "attempt",
)  # fmt: skip
# Braces as for an interpolation, but without the dollar sign: {params.lr}, or {lr}.
_BRACES = re.compile(r"(?<!\$)\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBERS = re.compile(rf"{_NUMBER}(?:\s*,\s*{_NUMBER})+")
# A variable, and words that only a shell understands, outside of quotes.
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_OPERATOR = re.compile(r"&&|\|\|?|;|&|[0-9]?>>?(?:&[0-9])?|<|.*;")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# What only a shell has: no program has these names, or none that does what is meant.
_BUILTINS = frozenset(
    {".", "alias", "cd", "eval", "exec", "export", "module", "pushd", "set", "source", "ulimit", "umask", "unset"}
)
# Variables that exist, or have their values, only in a job or in a rank.
_OF_JOB = re.compile(
    r"(?:SLURM|SLURMD|SLURMTRAIN|CUDA|ROCR|HIP|NCCL|OMPI|PMI|PET)_\w+|TMPDIR|HOSTNAME|RANDOM|RANK|NODE_RANK|GROUP_RANK"
    r"|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|NNODES|NPROC_PER_NODE"
)
# How similar a name in braces must be to a placeholder to be a slip.
_SLIP = 0.8
_ABSENT = object()


def find_failures(template: Mapping[str, Any]) -> Iterator[str]:
    """What a command has that can only fail: a key of the spec in braces that mean nothing to anybody.

    ``template``: the spec before interpolation: what an interpolation inserts into the command is meant.
    """
    for word in _words(template.get("command", "")):
        # A word with quotes, or a backslash before its braces, is passed on as it is on purpose.
        for name in _BRACES.findall("" if re.search(r"[\"'\\]", word) else word):
            keys = [name] * ("." in name) + [f"params.{name}"]
            key = next((key for key in keys if _has(template, key.split("."))), None)
            if key is not None and name not in PLACEHOLDERS:
                yield (
                    f"nothing replaces {{{name}}}; write ${{{key}}} for the value of that key, or '{{{name}}}', with "
                    "quotes inside of the command, to pass on the braces"
                )


def find_oversights(plain: Mapping[str, Any], variables: Collection[str] = ()) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a spec, as plain data, whose values are hardly meant so, each with a message that says what may be meant.

    ``variables``: names of the variables of this environment.
    """
    for section in ("command", "params", "env", *SHELL_KEYS):
        for path, text in texts_in(plain[section], (section,)):
            for key in dict.fromkeys(_BRACES.findall(text)):
                meant = _meant_by_braces(key, plain, placeholders=section == "command")
                if meant:
                    yield path, f"{{{key}}} is passed on as it is; {meant}"

    def has_now(name: str) -> bool:
        return name in variables and name not in plain["env"] and not is_of_job(name)

    yield from ((("command",), message) for message in _shell_words(plain["command"], has_now))
    for path, text in texts_in(plain["params"], ("params",)):
        if NUMBERS.fullmatch(text):
            name = ".".join(path)
            yield path, f"{text!r} is text; for a run with each number: --sweep {name}={text}; for a list: [{text}]"


def is_of_job(variable: str) -> bool:
    """Whether a variable of this name exists, or has its value, only in a job."""
    return _OF_JOB.fullmatch(variable) is not None


def in_shell(command: str) -> str:
    """A command that lets a shell run this one."""
    return f"bash -c {shlex.quote(command)}"


def of_shell(word: str) -> str:
    """What the first word of a command is, if only a shell can run it; else empty."""
    if word in _BUILTINS:
        return f"{word!r} is no program, but a command of the shell"
    return f"{word!r} sets a variable, which only a shell does" if _ASSIGNMENT.match(word) else ""


def _meant_by_braces(key: str, plain: Mapping[str, Any], *, placeholders: bool) -> str:
    """What a name in braces may stand for, as half a sentence; empty if it can be meant as it is."""
    if placeholders and key in PLACEHOLDERS:
        return ""
    path = key.split(".")
    if len(path) > 1 and _has(plain, path):
        return f"${{{key}}} is replaced by the value of that key"
    if placeholders and _has(plain, ["params", *path]):
        return f"${{params.{key}}} is replaced by the value of that parameter"
    near = nearest(key, PLACEHOLDERS, _SLIP) if placeholders else None
    return f"did you mean {{{near}}}?" if near else ""


def _words(command: str) -> list[str]:
    """The words of a command with their quotes: what is quoted is meant."""
    try:
        return shlex.split(command, posix=False)
    except ValueError:  # a backslash before a quote, which this mode does not know
        return []


def _shell_words(command: str, has_now: Callable[[str], bool]) -> Iterator[str]:
    """What in a command only a shell would understand; ``has_now``: whether a variable has its value already."""
    words = _outside_shell(_words(command))
    operator = next((word for word in words[1:] if _OPERATOR.fullmatch(word)), None)
    if problem := of_shell(words[0]) if words else "":
        yield f"no shell runs the command: {problem}; write {in_shell(command)}, or a script"
        return
    if operator is not None:
        cure = f"write {in_shell(command)}, or a script"
        yield f"no shell runs the command, and {operator!r} is passed on as it is; {cure}"
        return
    for word in words:
        variable = None if word.startswith("'") else _VARIABLE.search(word)
        if variable is not None:
            name = variable[1]
            yield (
                f"no shell runs the command, and {variable[0]} is passed on as it is; write {in_shell(command)} for "
                "its value in the job"
                + (
                    f", or ${{oc.env:{name}}} for its value now"
                    if not is_secret_variable(name) and has_now(name)
                    else ""
                )
            )
        elif word.startswith("~"):
            home = word.startswith("~/") or word == "~"
            instead = f"${{oc.env:HOME}}{word[1:]}" if home else in_shell(command)
            yield f"no shell runs the command, and {word!r} is passed on as it is; write {instead}"


def _outside_shell(words: Sequence[str]) -> list[str]:
    """The words without the text that a shell runs: ``bash -c "..."``."""
    if not words or words[0].rpartition("/")[2] not in launcher.SHELLS:
        return list(words)
    option = next((index for index, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word)), len(words))
    return [*words[: option + 1], *words[option + 2 :]]


def _has(plain: Any, path: Sequence[str]) -> bool:
    return value_at(plain, path, _ABSENT) is not _ABSENT
