"""Which network nodes agree on, and what they do about one that fails."""

from __future__ import annotations

import pytest
from helpers.participants import election, finding, run_all, statuses
from helpers.simulated_preflight import FAST, LONG_S, SLOW, SimulatedPreflight, address, fast, slow

from slurmtrain.runtime.preflight import coordinator, participant

# --- networks ---------------------------------------------------------------------------------------------------


def test_if_one_node_is_cut_off_from_the_fast_network_the_slow_one_is_elected_with_a_warning() -> None:
    preflight = SimulatedPreflight(4)
    preflight.isolate(FAST, 2)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {outcome.interface for outcome in outcomes} == {"slow0"}
    assert outcomes[3].address == address(SLOW, 3)
    assert statuses(outcomes, "network") == ["pass", "pass", "warn", "pass"]
    assert finding(outcomes[2], "network").summary == (
        "slow0 on 127.3.0.0/16, 1 Gbit/s; fast0 on 127.2.0.0/16, 100 Gbit/s would be better, but apart from n0, n1, n3 "
        "on 127.2.0.0/16: n0 cannot reach n2: 127.2.0.3: No route to host"
    )
    record = election(outcomes[0])
    assert [outcome["proved"] for outcome in record["networks"]] == [False, True]
    assert len(record["networks"][0]["problems"]) == 6
    assert record["elected"] == 1


def test_a_node_that_is_cut_off_on_every_network_is_blamed() -> None:
    preflight = SimulatedPreflight(4)
    preflight.isolate(FAST, 2)
    preflight.isolate(SLOW, 2)
    outcomes = run_all(preflight)
    assert statuses(outcomes, "network") == ["pass", "pass", "fail", "pass"]
    for outcome in outcomes:
        assert outcome.blamed == ["n2"]
        assert outcome.master is None
        assert (outcome.problem or "").startswith(
            "n2: network: apart from n0, n1, n3 on 127.2.0.0/16: n0 cannot reach n2"
        )
    assert election(outcomes[0])["elected"] is None


@pytest.mark.parametrize("ways", [[(1, 3), (3, 1)], [(1, 3)]], ids=["both", "one-way"])
def test_a_pair_that_does_not_reach_each_other_is_named_and_neither_is_blamed(ways: list[tuple[int, int]]) -> None:
    preflight = SimulatedPreflight(4)
    for source, target in ways:
        preflight.block(FAST, source, target)
        preflight.block(SLOW, source, target)
    outcomes = run_all(preflight)
    assert statuses(outcomes, "network") == ["pass", "fail", "pass", "fail"]
    for outcome in outcomes:
        assert outcome.blamed == []
        assert outcome.master is None
        assert (outcome.problem or "").startswith("n1, n3: network: n1 cannot reach n3: 127.2.0.4: No route to host")


@pytest.mark.parametrize(("nodes", "cut_off"), [(6, [1, 4]), (48, [37])])
def test_nodes_that_are_cut_off_from_all_others_are_blamed_though_few_have_probed_them(
    nodes: int, cut_off: list[int]
) -> None:
    preflight = SimulatedPreflight(nodes)
    for network in (FAST, SLOW):
        for node in cut_off:
            preflight.isolate(network, node)
    outcomes = run_all(preflight)
    assert {tuple(outcome.blamed) for outcome in outcomes} == {tuple(f"n{node}" for node in cut_off)}
    assert statuses(outcomes, "network").count("fail") == len(cut_off)


def test_nodes_without_a_network_in_common_fail() -> None:
    preflight = SimulatedPreflight(2)
    preflight.nodes[0].candidates = [fast(0)]
    preflight.nodes[1].candidates = []
    outcomes = run_all(preflight)
    assert outcomes[1].problem == (
        "n0, n1: network: the nodes have no network in common (n0: it has fast0; n1: it has no usable interface)"
    )
    assert outcomes[0].blamed == []
    assert outcomes[0].election is None


def test_nodes_whose_interfaces_have_different_names_each_learn_their_own() -> None:
    preflight = SimulatedPreflight(3)
    for node, name in enumerate(("hsn0", "ib0", "enp1s0")):
        preflight.nodes[node].candidates = [fast(node, name)]
    outcomes = run_all(preflight)
    assert [outcome.interface for outcome in outcomes] == ["hsn0", "ib0", "enp1s0"]
    assert outcomes[0].problem is None


def test_the_pinned_interface_is_elected_though_another_is_faster() -> None:
    outcomes = run_all(SimulatedPreflight(3, interface="slow0"))
    assert {outcome.interface for outcome in outcomes} == {"slow0"}
    assert election(outcomes[0])["networks"][0]["pinned"] is True


def test_a_node_without_the_pinned_interface_is_blamed() -> None:
    preflight = SimulatedPreflight(3, interface="fast0")
    preflight.nodes[1].candidates = [slow(1)]
    outcomes = run_all(preflight)
    assert outcomes[0].blamed == ["n1"]
    assert outcomes[0].problem == "n1: network: fast0 (network.interface) is not there, or down; it has slow0"


def test_at_level_warn_training_continues_over_an_unproved_network() -> None:
    preflight = SimulatedPreflight(3, network={"level": "warn"})
    for network in (FAST, SLOW):
        preflight.isolate(network, 1)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert {outcome.interface for outcome in outcomes} == {"fast0"}
    assert statuses(outcomes, "network") == ["pass", "warn", "pass"]


def test_at_level_off_no_probe_is_made_and_bandwidth_is_not_measured_by_default() -> None:
    preflight = SimulatedPreflight(3, network="off")
    outcomes = run_all(preflight)
    assert {(outcome.tests, outcome.interface, outcome.problem) for outcome in outcomes} == {(0, "fast0", None)}
    assert "bandwidth" not in preflight.calls


def test_rates_are_measured_if_no_speed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordinator, participant):
        monkeypatch.setattr(module, "RATE_S", LONG_S)
    preflight = SimulatedPreflight(3)
    for node, simulated in enumerate(preflight.nodes):
        simulated.candidates = [fast(node, speed_mbps=None), slow(node, speed_mbps=None)]
    outcomes = run_all(preflight)
    networks = election(outcomes[0])["networks"]
    assert len(networks) == 2
    assert all(outcome["measured_mb_per_s"] > 0 for outcome in networks)
    [interface] = {outcome.interface for outcome in outcomes}
    assert interface == networks[election(outcomes[0])["elected"]]["interfaces"]["n0"]


# --- bandwidth --------------------------------------------------------------------------------------------------


FIGURES = {"algbw_gb_s": 10.0, "busbw_gb_s": 15.0, "seconds": 0.01, "ranks": 3, "size_mb": 64.0, "backend": "gloo"}


def test_all_nodes_do_the_all_reduce_over_the_elected_network_with_one_store() -> None:
    preflight = SimulatedPreflight(3, bandwidth={"level": "fail", "min_gb_per_s": 12})
    for simulated in preflight.nodes:
        simulated.bandwidth = FIGURES
    preflight.isolate(FAST, 1)
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {None}
    assert set(statuses(outcomes, "bandwidth")) == {"pass"}
    listen_address = preflight.calls["bandwidth"]
    [(place, port)] = {(place, port) for place, port, _ in listen_address.values()}
    assert place == address(SLOW, 0)
    assert (place, port) != outcomes[0].master
    assert {interface for _, _, interface in listen_address.values()} == {"slow0"}


def test_an_all_reduce_that_fails_ends_the_attempt_and_no_node_is_blamed() -> None:
    preflight = SimulatedPreflight(2, bandwidth="fail")
    preflight.nodes[0].bandwidth = FIGURES
    preflight.nodes[1].bandwidth = {"error": "Connection closed by peer"}
    outcomes = run_all(preflight)
    assert {outcome.problem for outcome in outcomes} == {"n1: bandwidth: Connection closed by peer"}
    assert outcomes[0].blamed == []
