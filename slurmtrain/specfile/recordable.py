"""What a spec may record: no secrets, which have names of their kind or are passwords in URLs, and no more than fits.

How long a value may be follows from what Linux passes to a program, and from what Slurm takes as a batch script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.model.experiment.kinds import KeyPath
from slurmtrain.model.experiment.launcher import split_command
from slurmtrain.model.experiment.plan import REDACTED
from slurmtrain.model.experiment.spec import Spec
from slurmtrain.model.experiment.values import SHELL_KEYS, is_secret_variable, texts_in, value_at
from slurmtrain.model.urls import has_url_password, without_url_passwords
from slurmtrain.system.yaml_file import YamlDocument

_FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")
_ANCHOR = re.compile(r"&\S+\s+")
# Shorter values occur elsewhere by chance.
_SHORTEST = 4
# A variable that a shell line sets to text of its own, rather than to what a command, file or variable contains.
_LITERAL = re.compile(r"(?:^|[\s;&|(])([A-Za-z_][A-Za-z0-9_]*)=(?![\"']?[$`])[\"']?[^\s\"';&|]")
# What tokens of widespread services look like: Hugging Face, GitHub, AWS, Weights & Biases.
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b"
    r"|wandb\b.*\b[0-9a-f]{40}\b"
)


# Where passwords in URLs are secrets, and where they are refused as the spec is read.
_CHECKED = ("env", "params", "tracking")


def redact_assignment(key: str, value: str) -> str:
    """``key=value`` as it may be recorded."""
    return f"{key}={REDACTED if _is_hidden(key, value) else without_url_passwords(value)}"


def _is_hidden(key: str, value: Any) -> bool:
    path = key.strip().removeprefix("+").split(".")
    return path[0] == "env" and (len(path) == 1 or is_secret_variable(path[-1], value))


def recorded_value(key: str, value: Any) -> Any:
    """The value of a key of the spec, as it may be recorded."""
    return REDACTED if _is_hidden(key, value) else value


def without_secrets(text: str, document: YamlDocument) -> str:
    """The text of a spec with the values of secret variables replaced, and everything else as written."""
    spans = set()
    for path, span in document.spans.items():
        # As written, and without YAML's escapes and folds.
        written, value = text[slice(*span)], value_at(document.data, path)
        is_secret = _is_secret(path, written) or (isinstance(value, str) and _is_secret(path, value))
        if is_secret and "${" not in written:
            spans.add(span)
    # Replaced from the end, so that the positions of the others stay valid.
    for start, end in sorted(spans, reverse=True):
        value = text[start:end]
        # The anchor is kept for the aliases that name it. The span of a block of text includes line breaks after it.
        anchor = _ANCHOR.match(value)
        ending = value[len(value.rstrip()) :]
        text = f'{text[:start]}{anchor[0] if anchor else ""}"{REDACTED}"{ending}{text[end:]}'
    # In comments.
    return without_url_passwords(text)


def _is_secret(path: KeyPath, value: str) -> bool:
    if path[:1] == ("env",):
        return len(path) == 2 and is_secret_variable(path[1], value)
    within = path[1:] if path[0] == "sweep" else ()
    return any(part == "env" or part.startswith("env.") for part in within) and is_secret_variable(path[-1], value)


def is_exposed(path: KeyPath, value: Any) -> bool:
    """Whether an override of this key contains a secret itself, rather than a reference to a variable that does."""
    variables = value if path == ("env",) and isinstance(value, Mapping) else {path[-1]: value}
    return path[0] == "env" and any(
        is_secret_variable(str(name), text) and "${" not in str(text) for name, text in variables.items()
    )


def secret_in_shell(line: str) -> str | None:
    """What in a line of shell looks like a secret: the name of a variable, or ``a token``. None if nothing does."""
    names = [name for name in _LITERAL.findall(line) if is_secret_variable(name)]
    return names[0] if names else "a token" if _TOKENS.search(line) else None


def find_leaks(template: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys that would record a secret, with the reason: they take it from the environment, or repeat its value."""
    for path, value in texts_in(template):
        names = [name for name in _FROM_ENVIRONMENT.findall(value) if is_secret_variable(name)]
        if names and not _is_secret(path, value):
            yield path, f"this would record the secret {names[0]}; pass it through 'env'"
    env = resolved.get("env")
    secrets = {
        name: str(value)
        for name, value in (env.items() if isinstance(env, Mapping) else ())
        if is_secret_variable(str(name), value) and len(str(value)) >= _SHORTEST and value != REDACTED
    }
    for path, value in texts_in(resolved):
        repeated = [name for name, secret in secrets.items() if secret in value and not _is_secret(path, value)]
        if repeated:
            name = repeated[0]
            yield (
                path,
                f"this would record the value of env.{name}, a secret; let the script read it from the environment",
            )
        elif path[0] not in _CHECKED and has_url_password(value):
            yield (
                path,
                "this would record the password in a URL; put the URL under 'env', where secret values are never "
                "recorded, and let the script read it from there",
            )


# MAX_ARG_STRLEN of Linux: bytes of one variable, or one argument, with the NUL at its end.
_LONGEST = 128 << 10
# All variables and arguments of a program have a quarter of its stack's limit, usually 2 MiB (execve(2)); what a
# site and the launcher set needs the rest.
_TOTAL = 1 << 20
# A batch script has at most 4 MB (MaxScriptSize); journals and trackers repeat the parameters.
_SETUP, _PARAMS = 1 << 20, 4 << 20
_INSTEAD = "write it to a file and name that file here"


def excesses(spec: Spec) -> Iterator[tuple[KeyPath, str]]:
    """Keys of a ``spec`` whose values are too long for their use, each with a message."""
    variables = {name: len(name.encode()) + _bytes_of(value) + 2 for name, value in spec.env.items()}
    for name, size in variables.items():
        if size > _LONGEST:
            yield ("env", name), f"a variable can have {_LONGEST:,} bytes, this has {size:,}; {_INSTEAD}"
    words = [_bytes_of(word) + 1 for word in split_command(spec.command)]
    if any(size > _LONGEST for size in words):
        yield ("command",), f"an argument can have {_LONGEST:,} bytes, one has {max(words):,}; {_INSTEAD}"
    elif sum(words) + sum(variables.values()) > _TOTAL:
        key = "command" if sum(words) > sum(variables.values()) else "env"
        total = sum(words) + sum(variables.values())
        yield (key,), f"'command' and 'env' can have {_TOTAL:,} bytes together, they have {total:,}; {_INSTEAD}"
    for key in SHELL_KEYS:
        size = sum(_bytes_of(line) + 1 for line in getattr(spec, key))
        if size > _SETUP:
            yield (key,), f"the lines can have {_SETUP:,} bytes together, they have {size:,}; call a script"
    params = len(json.dumps(spec.params))
    if params > _PARAMS:
        yield ("params",), f"parameters can have {_PARAMS:,} characters as JSON, these have {params:,}; {_INSTEAD}"


def _bytes_of(text: str) -> int:
    return len(text.encode(errors="surrogateescape"))
