"""The messages that agents of an attempt may publish, and which agents may: all else is dropped. Pure.

A message is a JSON object under a key ``round/name``; the last part of some names is the number of the node that
publishes them. Whoever reads a message can rely on its shape, since only what :func:`problem_of` accepts is kept.

==================  ==========  ======  ===============================================================================
Name                Who         Shared  Meaning
==================  ==========  ======  ===============================================================================
``here/NODE``       NODE        node 0  the node has reached the begin of the round
``unready/NODE``    NODE        no      a command of the spec that runs before its ranks has failed, and how
``begin``           node 0      yes     the port where ranks meet, and the checkpoint that they resume from
``stop``            any node    yes     all ranks have to stop, and why; the first message counts
``until``           node 0      yes     the deadline for stopping
``ended/NODE``      NODE        no      how the round ended there
``next``            node 0      yes     the nodes that have ranks in the next round, or the next stage, with other
                                        nodes, or how the attempt ended
``left/NODE``       NODE        node 0  the node needs the others no more
``paused/NODE``     NODE        no      whether ranks of the node pause, for an evaluation for example
``pace/NODE``       NODE        no      how fast its ranks are
``links/NODE``      NODE        no      the connections of its ranks
``together``        node 0      yes     all ranks are connected
``inquiry/N``       any node    yes     the node suspects a hang; the first message counts
``examined/N/NODE`` NODE        no      the activity of its ranks
``verdict/N``       any node    yes     whether the run hangs; the first message counts
==================  ==========  ======  ===============================================================================

Shared messages are sent to all nodes at once; the others stay at node 0 until a node asks for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from slurmtrain.model.diagnosis.hang import RankState
from slurmtrain.model.interruption.growth import Stage
from slurmtrain.model.run.events.values import UNUSABLE, Reader, is_number, list_of, reader_of
from slurmtrain.model.run.run import CAUSES, GROW

Message: TypeAlias = Mapping[str, Any]
# Why an agent may ask all ranks to stop: whether a run has completed, for example, follows from how its ranks end.
STOP_CAUSES = frozenset({"preempted", "timeout", "node_fail", "crash", "hang", "completed", GROW})
_KEY = re.compile(r"\d{1,9}/([a-z]+)((?:/\d{1,9})*)")
_RANK = re.compile(r"\d{1,9}")
_NODE_0, _ANY, _OWN = "node 0", "any node", "its own node"


def is_shared(key: str) -> bool:
    """Whether all nodes have the message under this ``key`` at hand."""
    kind, numbers = _parse(key)
    return kind is not None and (kind.is_shared or (kind.shared_by_node_0 and numbers == [0]))


def problem_of(key: object, message: object, author: int) -> str | None:
    """What is wrong with a ``message`` that node ``author`` publishes under a ``key``; None if it is in order."""
    kind, numbers = _parse(key)
    if kind is None or len(numbers) != kind.numbers:
        return "there is no such message"
    if (kind.author == _NODE_0 and author != 0) or (kind.author == _OWN and numbers[-1] != author):
        return f"it is not for node {author} to publish"
    if not isinstance(message, dict) or not kind.fits(message):
        return "it has another shape than such messages"
    if kind is _KINDS["stop"] and message["cause"] == "completed" and author != 0:
        return "only node 0 can say that a run is completed"
    # Only node 0 notices that another node is gone, so it may speak in that node's name.
    if kind.names_author and message["node"] != author != 0:
        return f"it is not for node {author} to publish in the name of node {message['node']}"
    return None


def _with(**types: str | Reader) -> Callable[[Message], bool]:
    """A check that a message has exactly these keys, with values of these ``types``: annotations, or their readers."""
    readers = {key: reader_of(type_) if isinstance(type_, str) else type_ for key, type_ in types.items()}

    def fits(message: Message) -> bool:
        return message.keys() == readers.keys() and all(
            read(message[key], []) is not UNUSABLE for key, read in readers.items()
        )

    return fits


_OBJECTS = list_of(reader_of("Mapping[str, Any]"))
_REPORT = _with(
    cause="str", reason="str", failed_at="float | None", cascade="bool", signal="str | None", sure="bool",
    failures=_OBJECTS, evidence="Mapping[str, Any]",
)  # fmt: skip
_STOP = _with(cause="str", why="str", at="float", node="int", signal="str | None")
_NEXT = _with(
    members="Sequence[int] | None", lost="Sequence[int]", report="Mapping[str, Any]", stage="Mapping[str, Any] | None"
)
_ENDED = _with(report="Mapping[str, Any]", states=_OBJECTS)
_STATES = _with(states=_OBJECTS)


def _is_report(report: Message) -> bool:
    """Whether this is what ``ExitReport.to_dict`` returns."""
    if not _REPORT(report) or report["cause"] not in (*CAUSES, GROW):
        return False
    evidence = report["evidence"]
    return isinstance(evidence.get("slurm", {}), dict) and _OBJECTS(evidence.get("xids", ()), []) is not UNUSABLE


def _is_next(message: Message) -> bool:
    """Whether this says what follows a round."""
    if not _NEXT(message) or not _is_report(message["report"]):
        return False
    try:
        return message["stage"] is None or bool(Stage.from_dict(message["stage"]).roster)
    except (KeyError, TypeError, ValueError):
        return False


def _has_states(message: Message) -> bool:
    """Whether its states are what ``RankState.to_dict`` returns."""
    try:
        for state in message["states"]:
            RankState.from_dict(state)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return True


def _is_pace(message: Message) -> bool:
    """Whether these are finished steps, and seconds for each, by rank."""
    return all(
        _RANK.fullmatch(rank) is not None and isinstance(pace, list) and len(pace) == 2 and all(map(is_number, pace))
        for rank, pace in message.items()
    )


_LINKS = _with(ends="Mapping[str, Any]", loaded_s="float | None", started="int")


def _has_links(message: Message) -> bool:
    """Whether these are connections by rank or node: a pair of texts each."""
    return _LINKS(message) and all(
        _RANK.fullmatch(number) is not None
        and isinstance(own, list)
        and all(isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, str) for end in ends) for ends in own)
        for number, own in message["ends"].items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The messages of one name.

    ``author``: who may publish them. ``fits``: checks their shape. ``numbers``: how many follow the name.
    ``is_shared``, ``shared_by_node_0``: whether all nodes get them, if node 0 publishes them or always.
    ``names_author``: their key ``node`` is the node that publishes them.
    """

    author: str
    fits: Callable[[Message], bool]
    numbers: int = 0
    is_shared: bool = False
    shared_by_node_0: bool = False
    names_author: bool = False


_KINDS: Mapping[str, _Kind] = {
    "here": _Kind(author=_OWN, fits=_with(), numbers=1, shared_by_node_0=True),
    "unready": _Kind(author=_OWN, fits=_is_report, numbers=1),
    "left": _Kind(author=_OWN, fits=_with(), numbers=1, shared_by_node_0=True),
    "begin": _Kind(
        author=_NODE_0, fits=_with(port="int", resume_from="str | None", mlflow_run_id="str | None"), is_shared=True
    ),
    "until": _Kind(author=_NODE_0, fits=_with(at="float"), is_shared=True),
    "next": _Kind(author=_NODE_0, fits=_is_next, is_shared=True),
    "stop": _Kind(
        author=_ANY,
        fits=lambda message: _STOP(message) and message["cause"] in STOP_CAUSES,
        is_shared=True,
        names_author=True,
    ),
    "ended": _Kind(
        author=_OWN,
        fits=lambda message: _ENDED(message) and _is_report(message["report"]) and _has_states(message),
        numbers=1,
    ),
    "paused": _Kind(author=_OWN, fits=_with(paused="bool", at="float"), numbers=1),
    "pace": _Kind(author=_OWN, fits=_is_pace, numbers=1),
    "links": _Kind(author=_OWN, fits=_has_links, numbers=1),
    "together": _Kind(author=_NODE_0, fits=_with(), is_shared=True),
    "inquiry": _Kind(
        author=_ANY,
        fits=_with(node="int", why="str", limit_s="float", most_s="float"),
        numbers=1,
        is_shared=True,
        names_author=True,
    ),
    "examined": _Kind(author=_OWN, fits=lambda message: _STATES(message) and _has_states(message), numbers=2),
    "verdict": _Kind(
        author=_ANY, fits=_with(hangs="bool", computing="Sequence[int]", why="str"), numbers=1, is_shared=True
    ),
}


def _parse(key: object) -> tuple[_Kind | None, list[int]]:
    """The kind of messages under a key, None if there is none, and the numbers in the key's name."""
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        return None, []
    return _KINDS.get(match[1]), [int(number) for number in match[2].split("/")[1:]]
