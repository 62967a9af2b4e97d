"""Sending metrics and params to an MLflow run, without losing the others where the store refuses one of them.

A refused batch is divided until the names that the store does not take are alone. An answer that says nothing about the
content, for example because the server is down or the disk full, ends the sending: the rest is sent again next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from slurmtrain.tracking.to_mlflow.names import flat_name, is_in_the_way, legal_name

# Error codes of MLflow (mlflow/exceptions.py) that are about what was sent.
_REFUSALS = frozenset({"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "REQUEST_LIMIT_EXCEEDED"})
# What MLflow's store in files answers, among other things, if one name is the directory of another.
_UNEXPECTED = "INTERNAL_ERROR"


class Sendable(Protocol):
    """Something to send."""

    @property
    def name(self) -> str:
        """Its name in the run."""


S = TypeVar("S", bound=Sendable)


@dataclass(slots=True)
class Sender(Generic[S]):
    """Sends batches of one kind to one MLflow run.

    ``make``: MLflow's entity for an item under a name. ``log``: sends entities. ``failure``: what ``log`` raises.
    ``present``: the names that the run has there already. ``refused``: the names that the store does not take, and why:
    they are not sent again.
    """

    make: Callable[[S, str], Any]
    log: Callable[[list[Any]], None]
    failure: tuple[type[Exception], ...]
    present: Callable[[], Iterable[str]]
    refused: dict[str, str] = field(default_factory=dict)
    _accepted: dict[str, str] = field(default_factory=dict)

    def send(self, items: Sequence[S]) -> None:
        """Send a batch, except what the store refuses. Raises ``failure`` if the store cannot take anything now."""
        items = [item for item in items if item.name not in self.refused]
        if not items:
            return
        names = dict.fromkeys(item.name for item in items)
        try:
            self.log([self.make(item, self._stored(item.name)) for item in items])
        except self.failure as error:
            if len(names) == 1:
                self._send_one_name(items, error)
                return
            if not self._is_about_content(error, list(names)):
                raise
            first = set(list(names)[: len(names) // 2])
            self.send([item for item in items if item.name in first])
            self.send([item for item in items if item.name not in first])
        else:
            self._accepted.update({name: self._stored(name) for name in names})

    def _send_one_name(self, items: Sequence[S], error: Exception) -> None:
        """Send items of one name that the store does not take under its usual name: under another, or one by one."""
        name = items[0].name
        if not self._is_about_content(error, [name]):
            raise error
        try:
            self.log([self.make(item, flat_name(name)) for item in items])
            self._accepted[name] = flat_name(name)
        except self.failure as other:
            if not is_refusal(other):
                raise
            if len(items) == 1:
                self.refused[name] = first_line(other)
                return
            self.send(items[:1])
            self.send(items[1:])

    def _is_about_content(self, error: Exception, names: Sequence[str]) -> bool:
        """Whether sending less may help: the store refuses something, or one name is in the way of another."""
        if is_refusal(error):
            return True
        if getattr(error, "error_code", "") != _UNEXPECTED:
            return False
        stored = {self._stored(name) for name in names}
        others = {*self.present(), *self._accepted.values(), *stored}
        return any(is_in_the_way(name, others - {name}) for name in stored)

    def _stored(self, name: str) -> str:
        """The name under which the store takes a name, as far as is known."""
        return self._accepted.get(name) or legal_name(name)


def is_refusal(error: Exception) -> bool:
    """Whether an error of MLflow's is about what was sent."""
    return getattr(error, "error_code", "") in _REFUSALS


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
