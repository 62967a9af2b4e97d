"""Which names a spec may use, and which names mark a value as secret."""

from __future__ import annotations

import re

from slurmtrain.model.passwords import has_url_password
from slurmtrain.model.spec.kinds import type_name

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Parameters are recorded, so a false alarm stops a submission: only names that end in such a word are refused.
_SECRET_PARAM = re.compile(
    r"(?:^|[_.-])(?:pass(?:word|wd|phrase)?|secrets?|tokens?|credentials?|(?:api|access|private|secret|auth)_?keys?)$"
    r"|(?:password|secret|apikey)$",
    re.IGNORECASE,
)
# The value of such a variable is merely not recorded: a false alarm does no harm.
_SECRET_VARIABLE = re.compile(r"(?:TOKEN|KEY|PASSWORD|PASSWD|SECRET|CREDENTIAL)S?$", re.IGNORECASE)
# Characters of a run's name: it is part of file names and of Slurm's job names.
NAME_LIMIT = 64
# The limit for an experiment's name in MLflow (mlflow/utils/validation.py).
_EXPERIMENT_LIMIT = 500


def check_name(name: str) -> None:
    """Raise ValueError unless this can name a run, in a path, a job name and a shell alike."""
    if len(name) > NAME_LIMIT:
        raise ValueError(f"a name has at most {NAME_LIMIT} characters, this one has {len(name)}")
    if not _NAME.fullmatch(name):
        bad = sorted({character for character in name if not re.match(r"[A-Za-z0-9._-]", character)})
        why = f"{' '.join(map(repr, bad))} cannot be used" if bad else "it must begin with a letter or a digit"
        raise ValueError(f"{name!r} cannot name a run: {why}; it consists of letters, digits, '.', '_' and '-'")


def check_experiment_name(name: str) -> None:
    """Raise ValueError unless this can name an experiment of MLflow, which takes any characters."""
    if len(name) > _EXPERIMENT_LIMIT:
        raise ValueError(f"MLflow's names have at most {_EXPERIMENT_LIMIT} characters, this one has {len(name)}")


def is_secret_variable(name: str, value: object = "") -> bool:
    """Whether an environment variable holds a secret, by its ``name`` or ``value``: it is kept out of every file."""
    return bool(_SECRET_VARIABLE.search(name)) or (isinstance(value, str) and has_url_password(value))


def is_secret_param(name: str) -> bool:
    """Whether a parameter of this name holds a secret: it is refused, as parameters are recorded."""
    return bool(_SECRET_PARAM.search(name))


def check_variable_name(name: object) -> None:
    """Raise ValueError unless this can name an environment variable."""
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} cannot name an environment variable")


def check_param_name(name: object, noun: str = "parameter") -> None:
    """Raise ValueError unless this can name a parameter, on the command line and in a path of keys alike.

    Args:
        name: The name.
        noun: The named thing, for the message.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"expected a name, found {type_name(name)} ({name!r}); put it in quotes")
    if re.search(r"[.=\s\[\]{}$]", name):
        raise ValueError(f"a {noun}'s name cannot hold blanks, '.', '=', '$' or brackets")


def check_check_name(name: object) -> None:
    """Raise ValueError unless this can name a preflight check of the user's own."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a check")
