"""How long what a user writes may be: what Linux passes to a program, and Slurm in a batch script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.model.spec.kinds import KeyPath
from slurmtrain.model.spec.launcher import split_command
from slurmtrain.model.spec.spec import Spec
from slurmtrain.model.spec.values import SHELL_KEYS

# MAX_ARG_STRLEN of Linux: bytes of one variable, or one argument, with the NUL at its end.
_LONGEST = 128 << 10
# All variables and arguments of a program have a quarter of its stack's limit, usually 2 MiB (execve(2)); what a
# site and the launcher set needs the rest.
_TOTAL = 1 << 20
# A batch script has at most 4 MB (MaxScriptSize); journals and trackers repeat the parameters.
_SETUP, _PARAMS = 1 << 20, 4 << 20
# Linux's longest path (PATH_MAX), for all other text: names, paths, patterns. An option of sbatch may list nodes.
_TEXT, _OPTION = 4096, 64 << 10
# For all other keys together, as JSON: commands read them, journals and trackers repeat them.
_REST = 1 << 20
# MLflow's limit for the names of params.
_NAME = 250
# Keys with limits of their own.
_OWN = ("env", "command", "params", *SHELL_KEYS)
_INSTEAD = "write it to a file, and name that file here"


def excesses(spec: Spec, plain: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys whose values are too long for their use, each with a message.

    ``plain``: the spec as plain data, which may lack the values of secrets.
    """
    variables = {name: len(name.encode()) + _size(value) + 2 for name, value in spec.env.items()}
    for name, size in variables.items():
        if size > _LONGEST:
            yield ("env", name), f"a variable can have {_LONGEST:,} bytes, this has {size:,}; {_INSTEAD}"
    words = [_size(word) + 1 for word in split_command(spec.command)]
    if any(size > _LONGEST for size in words):
        yield ("command",), f"an argument can have {_LONGEST:,} bytes, one has {max(words):,}; {_INSTEAD}"
    elif sum(words) + sum(variables.values()) > _TOTAL:
        key = "command" if sum(words) > sum(variables.values()) else "env"
        total = sum(words) + sum(variables.values())
        yield (key,), f"'command' and 'env' can have {_TOTAL:,} bytes together, they have {total:,}; {_INSTEAD}"
    for key in SHELL_KEYS:
        size = sum(_size(line) + 1 for line in getattr(spec, key))
        if size > _SETUP:
            yield (key,), f"the lines can have {_SETUP:,} bytes together, they have {size:,}; call a script"
    params = len(json.dumps(spec.params))
    if params > _PARAMS:
        yield ("params",), f"parameters can have {_PARAMS:,} characters as JSON, these have {params:,}; {_INSTEAD}"
    yield from _long_names(spec.params, ("params",))
    rest = {key: value for key, value in plain.items() if key not in _OWN}
    size = len(json.dumps(rest))
    if size > _REST:
        longest = max(rest, key=lambda key: len(json.dumps(rest[key])))
        yield (longest,), f"all of this can have {_REST:,} characters as JSON, it has {size:,}; shorten it"
    elif size > _TEXT:
        yield from _long_texts(rest, ())


def _long_names(params: Mapping[str, Any], at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for name, value in params.items():
        if len(name) > _NAME:
            yield at, f"a name here can have {_NAME} characters, {name[:20]}... has {len(name):,}; shorten it"
        if isinstance(value, Mapping):
            yield from _long_names(value, (*at, name))


def _long_texts(value: object, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            if len(key) > _TEXT:
                yield at, f"a key here can have {_TEXT:,} characters, {key[:20]}... has {len(key):,}; shorten it"
            else:
                yield from _long_texts(inside, (*at, key))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from _long_texts(inside, (*at, str(index)))
    elif isinstance(value, str):
        limit = _OPTION if at[:1] == ("slurm",) else _TEXT
        if len(value) > limit:
            yield at, f"a text here can have {limit:,} characters, this has {len(value):,}; shorten it"


def _size(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))
