"""The values of a spec that are more than a number or a word: how each is read, checked and written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from slurmtrain.model.passwords import has_url_password
from slurmtrain.model.spec.kinds import Entries, Items, KeyPath, Report, Scalar, suggestion, type_name, whole_number
from slurmtrain.model.spec.launcher import split_command
from slurmtrain.model.spec.names import check_param_name, is_secret_param
from slurmtrain.model.written import WrittenNumber

POSITIVE = whole_number(1)
# More than any cluster has: rooms that place ranks go through all nodes of a run.
MOST_NODES = 1_000_000


@dataclass(frozen=True, slots=True)
class Nodes:
    """How many nodes train: at least ``min``, at most ``max``."""

    min: int
    max: int

    def to_dict(self) -> object:
        """The value as written in YAML and JSON."""
        return self.max if self.min == self.max else {"min": self.min, "max": self.max}

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}-{self.max}"


class ParamKind:
    """The kind of a parameter: a scalar, a list of scalars, or a mapping of such. A secret name is refused."""

    text = "text, number, true/false, null, a list of these, or a mapping of such"

    def read(self, value: object, at: KeyPath, report: Report) -> Any:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if isinstance(value, dict):
            return Entries(self, self.text, check_param_name).read(value, at, report)
        if isinstance(value, list | tuple):
            for index, item in enumerate(value):
                item_path = (*at, str(index))
                if isinstance(item, dict | list | tuple):
                    report(
                        item_path, f"a list of parameters holds scalars, found {type_name(item)}; use a mapping instead"
                    )
                else:
                    self._check_scalar(item, item_path, at[-1], report)
            return list(value)
        self._check_scalar(value, at, at[-1], report)
        return value

    def _check_scalar(self, value: object, at: KeyPath, name: str, report: Report) -> None:
        if value is not None and not isinstance(value, bool | int | float | str):
            report(at, f"expected {self.text}, found {type_name(value)}; put it in quotes")
        if isinstance(value, str) and (is_secret_param(name) or has_url_password(value)):
            report(at, "this looks like a secret, and parameters are recorded; pass it through 'env' instead")
        if isinstance(value, float) and not math.isfinite(value):
            report(at, "parameters are recorded as JSON, which has no such number; write it in quotes")

    def write(self, value: Any) -> object:
        """As :meth:`Kind.write`."""
        return value


def read_variable(value: object) -> str:
    """The value of an environment variable as text. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"expected text, found {type_name(value)} ({value!r}); put it in quotes")
    # NUL ends a value in the environment of a process.
    if "\0" in str(value):
        raise ValueError("a NUL character cannot be used here")
    return str(value)


def read_sbatch_value(value: object) -> str | int | bool | None:
    """The value of an sbatch option. Raises ValueError."""
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"expected text, a number, true or false, found {type_name(value)} ({value!r})")
    # As it was written: an account may be called 0123.
    if isinstance(value, WrittenNumber | float):
        return str(value)
    # It becomes a line of the batch script (#SBATCH): a line break would add lines to it.
    if isinstance(value, str) and re.search(r"[\n\r\0]", value):
        raise ValueError("an sbatch option cannot hold a line break")
    return value


def read_setup_line(value: object) -> str:
    """One line of shell. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"expected a line of shell, found {type_name(value)} ({value!r}); put it in quotes")
    if re.search(r"[\0\r]", value):
        raise ValueError("a carriage return or a NUL character cannot be used here")
    return value


SHELL_KEYS = ("setup", "setup_node", "sidecars", "teardown")
"""The keys of the spec that hold lines of shell, where nothing is interpolated."""


class ShellLines(Items):
    """A list of lines of shell, or a block of text (``setup: |``) that has them."""

    def __init__(self) -> None:
        super().__init__(
            Scalar("line of shell", read_setup_line, is_text=True), "list of shell lines, or a block of them"
        )

    def read(self, value: object, at: KeyPath, report: Report) -> tuple[Any, ...]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        # Not splitlines(), which knows more ends of lines than a shell.
        return super().read(value.rstrip("\n").split("\n") if isinstance(value, str) else value, at, report)


def read_node_count(value: object) -> int:
    """A number of nodes. Raises ValueError."""
    count: int = POSITIVE.parse(value)
    if count > MOST_NODES:
        raise ValueError(f"no cluster has as many nodes; expected at most {MOST_NODES}, found {count}")
    return count


def read_node_range(value: object) -> Nodes:
    """``resources.nodes``: a number, or ``{min: N, max: N}``. Raises ValueError."""
    if isinstance(value, dict):
        unknown = [key for key in value if key not in ("min", "max")]
        if unknown or len(value) != 2:
            hint = "".join(suggestion(key, ("min", "max")) for key in unknown[:1])
            raise ValueError(f"expected a whole number of nodes, or {{min: N, max: N}}, found {value!r}{hint}")
        least, most = (read_node_count(value[key]) for key in ("min", "max"))
        if least > most:
            raise ValueError(f"'min' is more than 'max': {least} > {most}")
        return Nodes(least, most)
    count = read_node_count(value)
    return Nodes(count, count)


def check_command(command: str) -> None:
    """Raise ValueError unless a shell could split this command, which is one line."""
    if re.search(r"[\n\r]", command.strip()):
        raise ValueError("a command is one line; fold it with '>-' or put the lines in a script")
    try:
        split_command(command)
    except ValueError as error:
        raise ValueError(f"the quotes of the command do not match ({error}): {command!r}") from None


def check_interface(name: str) -> None:
    """Raise ValueError unless this can name a network interface."""
    # Linux's names have at most 15 characters; =, ^ and the comma have a meaning in NCCL_SOCKET_IFNAME.
    if not re.fullmatch(r"[^\s/=^,]{1,15}", name):
        raise ValueError(f"{name!r} cannot be an interface name; write for example auto or eth0")
