"""What agents may publish for each other: everything that they do publish, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.diagnosis.hang import Phase, RankState
from slurmtrain.model.interruption.exit_report import ExitReport, StopRequest
from slurmtrain.model.run.run import CAUSES
from slurmtrain.runtime.agent.node_round import NodeResult
from slurmtrain.runtime.peers.board import LocalLink, MessageBoard
from slurmtrain.runtime.peers.control_store import ControlStore
from slurmtrain.runtime.peers.messages import STOP_CAUSES, is_shared, problem_of

REPORT = ExitReport(cause="crash", reason="rank 1 exited", failed_at=5.0, evidence={"xids": [{"code": 79}]}).to_dict()
STATE = RankState(1, 1, 10, Phase.TRAINING, 61.0, "S", ("/w/eval.py:9 read",), 0.25).to_dict()
STOP = {"cause": "crash", "why": "rank 1 exited", "at": 5.0, "node": 1, "signal": None}
# One message of each name, as node 1 or node 0 publishes it.
MESSAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "0/here/1": (1, {}),
    "0/left/0": (0, {}),
    "0/begin": (0, {"port": 29400, "resume_from": None, "mlflow_run_id": None}),
    "0/until": (0, {"at": 1.7e9}),
    "0/next": (0, {"members": None, "lost": [2], "report": REPORT, "stage": None}),
    "3/stop": (1, STOP),
    "0/ended/1": (1, {"report": REPORT, "states": [STATE]}),
    "0/paused/1": (1, {"paused": True, "at": 1.7e9}),
    "0/pace/1": (1, {"4": [12, 0.5]}),
    "0/links/1": (1, {"ends": {"4": [["0A:1", "0B:2"]]}, "loaded_s": 1.5, "started": 0}),
    "0/together": (0, {}),
    "0/inquiry/0": (1, {"node": 1, "why": "rank 1 finished no step", "limit_s": 60.0, "most_s": 480.0}),
    "0/examined/0/1": (1, {"states": [STATE]}),
    "0/verdict/0": (1, {"hangs": True, "computing": [], "why": ""}),
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("key", MESSAGES)
def test_messages_of_agents_are_accepted(key: str) -> None:
    author, message = MESSAGES[key]
    assert problem_of(key, json.loads(json.dumps(message)), author) is None


@pytest.mark.parametrize("key", [key for key, (author, _) in MESSAGES.items() if author == 0])
def test_only_node_0_publishes_what_all_nodes_follow(key: str) -> None:
    assert problem_of(key, MESSAGES[key][1], 1) == "it is not for node 1 to publish"


@pytest.mark.parametrize("key", [key for key in MESSAGES if key.endswith("/1")])
def test_a_node_publishes_nothing_of_another_node(key: str) -> None:
    for author in (0, 2):
        assert problem_of(key, MESSAGES[key][1], author) == f"it is not for node {author} to publish"


@pytest.mark.parametrize("key", ["0/stop", "0/inquiry/0"])
def test_a_node_does_not_speak_in_the_name_of_another_one_unless_it_is_node_0(key: str) -> None:
    message = STOP if key == "0/stop" else MESSAGES[key][1]
    assert problem_of(key, message, 5) == "it is not for node 5 to publish in the name of node 1"
    assert problem_of(key, message, 0) is None


@pytest.mark.parametrize("cause", CAUSES)
def test_a_stop_request_never_cancels_a_run_and_only_node_0_completes_one(cause: str) -> None:
    is_refused = problem_of("0/stop", {**STOP, "cause": cause}, 1) is not None
    assert is_refused == (cause not in {"preempted", "timeout", "node_fail", "crash", "hang"})
    by_node_0 = problem_of("0/stop", {**STOP, "cause": cause, "node": 0}, 0) is not None
    assert by_node_0 == (cause not in STOP_CAUSES)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("stop", STOP),
        ("agents/0/stop", STOP),
        ("0/stop/1", STOP),
        ("0/nothing", {}),
        ("0/here", {}),
        ("0/examined/1", {"states": []}),
        (0, STOP),
        (None, None),
        ("0/stop", {}),
        ("0/stop", [STOP]),
        ("0/stop", {**STOP, "more": 1}),
        ("0/stop", {**STOP, "at": float("nan")}),
        ("0/stop", {**STOP, "node": True}),
        ("0/pace/1", {"x": [1, 0.5]}),
        ("0/pace/1", {"4": [1]}),
        ("0/links/1", {"ends": {"4": [["0A:1"]]}, "loaded_s": None, "started": 0}),
        ("0/links/1", {"ends": {"x": []}, "loaded_s": None, "started": 0}),
        ("0/ended/1", {"report": {**REPORT, "cause": "bored"}, "states": []}),
        ("0/ended/1", {"report": {**REPORT, "evidence": {"xids": 5}}, "states": []}),
        ("0/ended/1", {"report": REPORT, "states": [{**STATE, "phase": "asleep"}]}),
        ("0/ended/1", {"report": REPORT, "states": [{**STATE, "rank": float("inf")}]}),
        ("0/examined/0/1", {"states": [{}]}),
    ],
)
def test_what_is_no_message_is_refused(key: object, message: object) -> None:
    assert problem_of(key, message, 1) is not None


@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_whatever_is_accepted_can_be_used(key: str, data: st.DataObject) -> None:
    author, message = MESSAGES[key]
    altered: dict[str, Any] = dict(message)
    if message:
        altered[data.draw(st.sampled_from(sorted(message)))] = data.draw(_JSON)
    if problem_of(key, altered, author) is None:
        _use(key, altered, author)


@given(_JSON, _JSON, st.integers(0, 3))
def test_junk_is_dropped_without_an_exception(key: Any, message: Any, author: int) -> None:
    board = MessageBoard()
    board.put(author, key, message)
    board.put(author, f"0/{key}", message, first=True)
    assert board.shared() == {}


def _use(key: str, message: dict[str, Any], author: int) -> None:
    """Do with a message what agents do."""
    board = MessageBoard()
    board.put(author, key, message)
    round_, name = key.split("/", 1)
    control = ControlStore(LocalLink(board), 0, 3)
    control.begin_round(int(round_), range(3))
    assert control.read(name) == message
    kind = name.partition("/")[0]
    if kind == "stop":
        request = control.stop_request()
        assert isinstance(request, StopRequest)
        assert request.cause in STOP_CAUSES
    elif kind == "ended":
        result = NodeResult.from_dict(message)
        assert result.report.gpu_failed in (True, False)
        assert result.report.slurm_ends_it in (True, False)
        assert result.report.blame
    elif kind == "next":
        assert ExitReport.from_dict(message["report"]).cause in CAUSES
        assert all(type(node) is int for node in [*(message["members"] or ()), *message["lost"]])
    elif kind == "examined":
        assert len([RankState.from_dict(state) for state in message["states"]]) == len(message["states"])
    elif kind == "pace":
        assert len([(int(rank), float(seconds)) for rank, (_, seconds) in message.items()]) == len(message)


def test_each_message_is_either_shared_with_all_nodes_or_stays_at_node_0() -> None:
    shared = {key for key in MESSAGES if is_shared(key)}
    assert shared == {"0/left/0", "0/begin", "0/until", "0/next", "3/stop", "0/inquiry/0", "0/verdict/0", "0/together"}
    assert is_shared("0/here/0")
    assert not is_shared("0/left/1")
