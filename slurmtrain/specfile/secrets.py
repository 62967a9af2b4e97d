"""Keeping secrets out of everything that is recorded: by the name of the variable that holds them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slurmtrain.model.spec.names import is_secret_variable
from slurmtrain.model.spec.plan import REDACTED
from slurmtrain.system.yaml_file import Document

KeyPath = tuple[str, ...]
_FROM_ENVIRONMENT = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)")
_ANCHOR = re.compile(r"&\S+\s+")
# Shorter values would be found by chance in what has nothing to do with them.
_SHORTEST = 4


def redact_assignment(key: str, value: str) -> str:
    """``key=value`` as it may be recorded."""
    path = key.strip().removeprefix("+").split(".")
    hidden = path[0] == "env" and (len(path) == 1 or is_secret_variable(path[-1]))
    return f"{key}={REDACTED}" if hidden else f"{key}={value}"


def without_secrets(text: str, document: Document) -> str:
    """The text of a spec as written, but for the values of secret variables."""
    spans = {span for path, span in document.spans.items() if _is_secret(path) and "${" not in text[slice(*span)]}
    for start, end in sorted(spans, reverse=True):
        value = text[start:end]
        # An anchor stays, for the aliases that name it; a block of text ends with line breaks of what follows.
        anchor = _ANCHOR.match(value)
        ending = value[len(value.rstrip()) :]
        text = f'{text[:start]}{anchor[0] if anchor else ""}"{REDACTED}"{ending}{text[end:]}'
    return text


def _is_secret(path: KeyPath) -> bool:
    if path[:1] == ("env",):
        return len(path) == 2 and is_secret_variable(path[1])
    return len(path) == 2 and path[0] == "sweep" and path[1].startswith("env.") and is_secret_variable(path[1])


def find_leaks(template: Mapping[str, Any], resolved: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Keys outside of secret variables that would record a secret, with the reason: nothing is to be repeated there."""
    for path, value in _leaves(template, ()):
        named = [name for name in _FROM_ENVIRONMENT.findall(value) if is_secret_variable(name)]
        if named and not _is_secret(path):
            yield path, f"this would record the secret {named[0]}; hand it over through 'env'"
    env = resolved.get("env")
    secrets = {
        name: str(value)
        for name, value in (env.items() if isinstance(env, Mapping) else ())
        if is_secret_variable(str(name)) and len(str(value)) >= _SHORTEST and value != REDACTED
    }
    for path, value in _leaves(resolved, ()):
        held = [name for name, secret in secrets.items() if secret in value and not _is_secret(path)]
        if held:
            yield (
                path,
                f"this would record the value of env.{held[0]}, which is a secret; let the script read it from there",
            )


def _leaves(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _leaves(inside, (*at, str(key)))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from _leaves(inside, (*at, str(index)))
    elif isinstance(value, str):
        yield at, value
