"""What a run and its interruptions cost, by hand and by the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.charged_runs import preempted_run
from helpers.simulated_run import SimulatedRun
from hypothesis import given
from hypothesis import strategies as st

from slurmtrain.model.experiment import kinds
from slurmtrain.model.experiment.prices import Prices
from slurmtrain.model.run.accounting import GPU_S, NODE_S, tally
from slurmtrain.model.run.costs import (
    PURPOSES,
    Charges,
    add_up,
    break_even_rate,
    charges_of,
    cost_json,
    interrupted_hours,
    seconds_by_purpose,
)
from slurmtrain.model.run.run import Attempt, Run

PRICES = {
    "currency": "EUR",
    "partitions": {
        "spot": {"node_hour": 8},
        "ondemand": {"node_hour": 12},
        "gpu": {"gpu_hour": {"a100": 12, "default": 4}},
        "both": {"node_hour": 1, "gpu_hour": 2},
        "local": {"node_hour": 0.5},
        "twin": {"node_hour": 8},
    },
    "on_demand": "ondemand",
}


def read_prices(**keys: Any) -> Prices:
    """The prices of the tests, with other ``keys``."""
    prices, mistakes = kinds.read_all(kinds.Section(Prices), {**PRICES, **keys})
    assert not mistakes
    return prices  # type: ignore[no-any-return]


def spent(charges: Charges) -> float:
    """What all of it cost."""
    assert charges.money is not None, charges.problem
    return sum(charges.money.values())


def attempt(number: int = 1, cause: str | None = "completed", pack: int = 1, **facts: Any) -> Attempt:
    """An attempt on a node that trained for an hour, unless ``facts`` say something else."""
    facts = {"hosts": {"0": "n0"}, "spent": {"train": 3600.0}, "executor": "slurm", "partition": "spot", **facts}
    state = {"completed": "completed", None: "running"}.get(cause, "failed")
    return Attempt(number=number, job_id="7", restart=number - 1, state=state, cause=cause, pack=pack, **facts)


def run_of(*attempts: Attempt, **resources: Any) -> Run:
    """A run with these ``attempts``, each with these ``resources`` unless it has its own."""
    of_run = [replace(each, resources=each.resources or resources) for each in attempts]
    return Run(id="r", name="n", state="completed", reason="", executor="slurm", attempts=of_run, resources=resources)


def test_a_run_with_three_preemptions_costs_what_a_person_calculates_by_hand() -> None:
    run = preempted_run().run
    assert [each.cause for each in run.attempts] == ["preempted", "preempted", "preempted", "completed"]
    charges = add_up(charges_of(run.attempts, run.executor, read_prices()))
    cost = cost_json(charges, "EUR")

    # Of the first start: 40 s of start, 20 s of preflight. Two nodes at 8 EUR cost 16 EUR for an hour of 3,600 s.
    starting = 40 + 20
    # The saves: 5 s in each of three attempts, 15 s at the end, for which training stood still.
    saving = 3 * 5 + 15
    # Until the save that the next start resumes from, 2,000 s; the last start 2,000 s, and 5 s to its exit.
    training = 3 * 2000 + 2000 + 5
    # Three times: 3,000 s of training without 2,000 s that were kept and 5 s of the save, and 30 s of stop. Then the
    # restarts: 40 s of start, 20 s of preflight and 10 s of restore each.
    lost = 3 * (3000 - 2000 - 5) + 3 * 30 + 3 * (40 + 20 + 10)
    assert (starting, saving, training, lost) == (60, 30, 8005, 3285)
    euros = {"starting": starting, "saving": saving, "training": training, "lost": lost, "stopping": 0}
    assert {name: cost[name] for name in euros} == pytest.approx({name: s / 3600 * 16 for name, s in euros.items()})
    assert cost["spent"] == pytest.approx((60 + 30 + 8005 + 3285) / 3600 * 16) == pytest.approx(50.5777778)
    assert cost["waiting_seconds"] == 100 + 3 * 300
    assert cost["node_hours"] == pytest.approx(11_380 * 2 / 3600)
    assert cost["gpu_hours"] == pytest.approx(11_380 * 2 * 4 / 3600)
    assert (cost["interruptions"], cost["interruptions_by_cause"]) == (3, {"preempted": 3})
    assert cost["cost_of_interruption"] == pytest.approx(3285 / 3600 * 16 / 3) == pytest.approx(4.8666667)
    # On demand at 12 EUR, without what was lost.
    assert cost["on_demand"] == pytest.approx((60 + 30 + 8005) / 3600 * 24) == pytest.approx(53.9666667)
    assert cost["saved_by_spot"] == pytest.approx(53.9666667 - 50.5777778)
    # An interruption takes 1,095 s, 0.304 h; spot is a third cheaper: with 1.1 of them in an hour, a third is lost.
    assert cost["break_even_interruptions_per_hour"] == pytest.approx((1 - 8 / 12) / (1095 / 3600))
    assert cost["break_even_interruptions_per_hour"] == pytest.approx(1.0958904)
    assert cost["interruptions_per_hour"] == pytest.approx(3 / (11_380 / 3600))
    assert cost["currency"] == cost["unit"] == "EUR"
    assert cost["problem"] is None

    # Without prices: GPU-hours, and nothing to compare with.
    unpriced = cost_json(add_up(charges_of(run.attempts, run.executor, None)), None)
    assert (unpriced["currency"], unpriced["unit"], unpriced["on_demand"]) == (None, "GPU-hours", None)
    assert unpriced["spent"] == pytest.approx(11_380 * 8 / 3600)
    assert unpriced["lost"] == pytest.approx(3285 * 8 / 3600)

    # The sums that Prometheus exports come from the same seconds.
    [sums] = tally(run).values()
    assert (sums[NODE_S] / 3600, sums[GPU_S] / 3600) == pytest.approx((cost["node_hours"], cost["gpu_hours"]))


@given(
    price=st.floats(0.01, 100),
    dearer=st.floats(1.001, 50),
    kept=st.floats(0.01, 10_000),
    lost=st.floats(0.001, 100),
)
def test_at_the_break_even_rate_both_kinds_of_nodes_cost_the_same(
    price: float, dearer: float, kept: float, lost: float
) -> None:
    on_demand = price * dearer
    rate = break_even_rate(price, on_demand, lost)
    assert rate is not None
    assert 0 < rate * lost < 1
    assert price * interrupted_hours(kept, rate, lost) == pytest.approx(on_demand * kept, rel=1e-6)
    # The other side of it.
    assert price * interrupted_hours(kept, 0.9 * rate, lost) < on_demand * kept
    # So many interruptions take the hours that are not kept.
    hours = interrupted_hours(kept, rate, lost)
    assert hours - kept == pytest.approx(rate * hours * lost, rel=1e-6)


def test_there_is_no_break_even_rate_without_a_difference() -> None:
    assert break_even_rate(8, 8, 1) == 0
    assert break_even_rate(9, 8, 1) == 0
    # Not even the thousandth interruption costs anything.
    assert break_even_rate(8, 12, 0) is None


@given(st.lists(st.tuples(*[st.floats(0, 1e5)] * 7, st.integers(0, 3), st.booleans()), min_size=1, max_size=4))
def test_all_purposes_together_are_all_of_the_time_on_nodes(facts: list[Any]) -> None:
    names = ("start", "preflight", "restore", "train", "stall", "stop", "lost")
    attempts = [
        attempt(
            number,
            cause="preempted" if is_interrupted else "completed",
            spent={**dict(zip(names, seconds, strict=True)), "queue": 5.0},
            restarts=[{"at": 0.0, "cause": "grow" if restart else "crash"} for restart in range(restarts)],
        )
        for number, (*seconds, restarts, is_interrupted) in enumerate(facts, 1)
    ]
    for each, purposes in zip(attempts, seconds_by_purpose(attempts), strict=True):
        on_nodes = sum(seconds for kind, seconds in each.spent.items() if kind != "queue")
        assert sum(purposes.values()) == pytest.approx(on_nodes, rel=1e-9, abs=1e-6)
        assert all(seconds >= -1e-6 for seconds in purposes.values())
        assert tuple(purposes) == PURPOSES


def test_only_starts_that_interruptions_cause_are_lost() -> None:
    spent = {"start": 30.0, "preflight": 6.0, "restore": 4.0, "train": 100.0, "stop": 9.0}
    never_trained = {"start": 30.0, "preflight": 6.0, "stop": 1.0}
    in_place = [{"at": 0.0, "cause": "crash"}, {"at": 1.0, "cause": "hang"}]
    # A node failed the first preflight: the start that led to training is the second one.
    first, second, third = seconds_by_purpose(
        [attempt(1, "preflight", spent=never_trained), attempt(2, "crash", spent=spent), attempt(3, None, spent=spent)]
    )
    assert (first["starting"], first["lost"]) == (0, 37)
    assert (second["starting"], second["stopping"], second["lost"]) == (40, 0, 9)
    # The third has not ended, and its stop is part of an end that is not known yet.
    assert (third["starting"], third["lost"]) == (0, 49)
    # After two restarts in place, the first of three equally long starts, and one of three stops.
    [alone] = seconds_by_purpose([attempt(spent=spent, first_step=0, restarts=in_place)])
    assert (alone["starting"], alone["stopping"], alone["lost"]) == (16, 3, 20 + 4 + 6)
    # One that began with another run's checkpoint restored it three times.
    [forked] = seconds_by_purpose([attempt(spent=spent, first_step=50, restarts=in_place)])
    assert forked["starting"] == pytest.approx(10 + 6 + 4 / 3)
    # More nodes are no interruption.
    [grown] = seconds_by_purpose([attempt(spent=spent, first_step=0, restarts=[{"at": 0.0, "cause": "grow"}])])
    assert (grown["starting"], grown["stopping"], grown["lost"]) == (40, 9, 0)
    # One that waits in the queue has cost nothing.
    [waiting] = seconds_by_purpose([attempt(1, None, spent={"queue": 60.0})])
    assert not any(waiting.values())


def test_each_attempt_is_charged_at_the_price_of_its_own_partition() -> None:
    resources = {"gpus_per_node": 2, "gpu_type": "a100"}
    run = run_of(attempt(1, "preempted"), attempt(2, partition="gpu"), **resources)
    charges = charges_of(run.attempts, run.executor, read_prices())
    assert [spent(each) for each in charges] == [8, 24]
    total = cost_json(add_up(charges), "EUR")
    assert (total["spent"], total["on_demand"]) == (32, 24)
    # A resume gave it other GPUs, whose type has no price of its own.
    other = attempt(2, partition="both", resources={"gpus_per_node": 3, "gpu_type": "h100"})
    assert [
        spent(each) for each in charges_of(run_of(attempt(1, "preempted"), other).attempts, "slurm", read_prices())
    ] == [8, 7]
    # What was on demand is compared with nothing.
    cost = cost_json(add_up(charges_of(run_of(attempt(partition="ondemand")).attempts, "slurm", read_prices())), "EUR")
    assert (cost["on_demand"], cost["saved_by_spot"], cost["break_even_interruptions_per_hour"]) == (12, None, None)


def test_the_events_of_a_run_say_where_each_attempt_was_and_what_it_was_given() -> None:
    run = SimulatedRun().created(resources={"gpus_per_node": 1, "gpu_type": "a100"})
    run.submitted(partition="both,gpu", requeue={"enabled": True}).started(partition="gpu").stopped()
    run.node("requeue", cause="preempted").node("agent", 0, 1, node=0, nodes=1, host="n0", executor="slurm")
    first, second = run.run.attempts
    assert (first.partitions, second.partitions) == ({"0": "gpu"}, {})
    assert first.partition == second.partition == "both,gpu"
    assert first.resources == {"gpus_per_node": 1, "gpu_type": "a100"}
    run.job = "8"
    run.submitted(2, by="resume", command="c", resources={"gpus_per_node": 0}, partition="spot").started(submission=2)
    assert [each.resources["gpus_per_node"] for each in run.run.attempts] == [1, 1, 0]
    assert run.newest.partition == "spot"


def test_runs_that_share_a_job_pay_their_share_of_it() -> None:
    def shared(partition: str, **facts: Any) -> float:
        run = run_of(attempt(partition=partition, **facts), gpus_per_node=1)
        return spent(add_up(charges_of(run.attempts, run.executor, read_prices(on_demand=None))))

    assert (shared("spot"), shared("spot", pack=4), shared("spot", pack=4, share_gpu=True)) == (8, 2, 2)
    # Each has a GPU of its own, unless they share that too.
    assert (shared("gpu", pack=4), shared("gpu", pack=4, share_gpu=True)) == (4, 1)
    assert (shared("both"), shared("both", pack=2), shared("both", pack=2, share_gpu=True)) == (3, 2.5, 1.5)


def test_nodes_that_join_later_cost_from_then_on() -> None:
    joined = {"at": 1900.0, "cause": "grow", "joined": [1]}
    grown = attempt(started_at=100.0, hosts={"0": "n0", "1": "n1"}, restarts=[joined])
    cost = cost_json(add_up(charges_of(run_of(grown).attempts, "slurm", read_prices())), "EUR")
    # Half of its hour on one node, half on two.
    assert (cost["spent"], cost["on_demand"], cost["node_hours"], cost["interruptions"]) == (12, 18, 1.5, 0)


def test_components_cost_what_each_of_their_partitions_costs() -> None:
    components = [
        {"nodes": 1, "gpus_per_node": 0, "slurm": {"partition": "spot"}},
        {"nodes": 2, "gpus_per_node": 2, "gpu_type": "a100", "slurm": {"--partition": "gpu"}},
        {"nodes": 1, "gpus_per_node": 2, "gpu_type": "a100"},
    ]
    facts = {"hosts": {str(node): f"n{node}" for node in range(4)}, "partition": "both"}
    resources = {"components": components, "gpus_per_node": 0}
    [charges] = charges_of(run_of(attempt(**facts), **resources).attempts, "slurm", read_prices())
    # One node at 8 EUR, four GPUs at 12 EUR, and one node at 1 EUR with two GPUs at 2 EUR.
    assert spent(charges) == pytest.approx(8 + 48 + 5)
    assert sum((charges.on_demand or {}).values()) == pytest.approx(4 * 12)
    assert sum(charges.gpu_hours.values()) == 6
    # The agents of its nodes know better.
    noted = {"0": "spot", "1": "both", "2": "both", "3": "gpu"}
    [charges] = charges_of(run_of(attempt(**facts, partitions=noted), **resources).attempts, "slurm", read_prices())
    assert spent(charges) == pytest.approx(8 + 2 * 5 + 2 * 12)


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["components", "nodes", "gpus_per_node", "gpu_type", "slurm", "partition"]), inner, max_size=4
    ),
    max_leaves=12,
))  # fmt: skip
def test_resources_may_be_anything_that_a_journal_holds(resources: Any) -> None:
    run = run_of(attempt(), **(resources if isinstance(resources, dict) else {"components": [resources]}))
    cost = cost_json(add_up(charges_of(run.attempts, run.executor, read_prices())), "EUR")
    assert cost["problem"] or cost["spent"] >= 0


@pytest.mark.parametrize(
    ("partition", "resources", "problem"),
    [
        ("other", {}, "partition other has no price: prices.partitions.other"),
        ("gpu", {}, "partition gpu has no price for nodes without GPUs: prices.partitions.gpu.node_hour"),
        ("", {}, "its partition is unknown, and so is its price"),
        ("both,spot", {}, "it is unknown which of the partitions both, spot it had, and their prices differ"),
        ("spot,twin", {}, None),
        (
            "gpu",
            {"gpus_per_node": 1, "gpu_type": "h100"},
            "partition gpu has no price for h100: prices.partitions.gpu.gpu_hour",
        ),
        (
            "gpu",
            {"gpus_per_node": 1},
            "partition gpu has no price for GPUs of an unknown type: prices.partitions.gpu.gpu_hour.default",
        ),
    ],
)  # fmt: skip
def test_a_price_that_is_missing_is_named_and_never_guessed(
    partition: str, resources: dict[str, Any], problem: str | None
) -> None:
    prices = read_prices(partitions={**PRICES["partitions"], "gpu": {"gpu_hour": {"a100": 12}}})  # type: ignore[dict-item]
    cost = cost_json(
        add_up(charges_of(run_of(attempt(partition=partition), **resources).attempts, "slurm", prices)), "EUR"
    )
    assert cost["problem"] == problem
    unit = "GPU-hours" if resources else "node-hours"
    if problem is not None:
        assert (cost["currency"], cost["unit"], cost["spent"], cost["on_demand"]) == (None, unit, 1, None)
    else:
        assert (cost["currency"], cost["spent"]) == ("EUR", 8)


def test_without_a_price_on_demand_there_is_nothing_to_compare_with() -> None:
    prices = read_prices(on_demand="gpu")
    cost = cost_json(add_up(charges_of(run_of(attempt()).attempts, "slurm", prices)), "EUR")
    assert (cost["spent"], cost["on_demand"], cost["saved_by_spot"]) == (8, None, None)
    assert cost["problem"] == "partition gpu has no price for nodes without GPUs: prices.partitions.gpu.node_hour"
    # Nobody has asked for the comparison.
    cost = cost_json(add_up(charges_of(run_of(attempt()).attempts, "slurm", read_prices(on_demand=None))), "EUR")
    assert (cost["spent"], cost["on_demand"], cost["problem"]) == (8, None, None)


def test_a_run_of_this_machine_costs_what_local_says() -> None:
    run = run_of(attempt(executor="local", partition=""))
    [charges] = charges_of(run.attempts, run.executor, read_prices())
    assert spent(charges) == 0.5
    [charges] = charges_of(run.attempts, run.executor, read_prices(partitions={"ondemand": {"node_hour": 12}}))
    assert charges.problem == "this machine has no price: prices.partitions.local"


def test_idle_nodes_cost_what_they_cost_before() -> None:
    charges = charges_of(run_of(attempt(1, None), gpus_per_node=2).attempts, "slurm", read_prices())
    half_an_hour = (charges[-1], 1800.0)
    assert cost_json(add_up(charges), "EUR", idle=half_an_hour)["idle"] == 4
    unpriced = charges_of(run_of(attempt(1, None), gpus_per_node=2).attempts, "slurm", None)
    assert cost_json(add_up(unpriced), None, idle=(unpriced[-1], 1800.0))["idle"] == 1
    assert cost_json(add_up(charges), "EUR")["idle"] is None


def test_a_run_that_waits_has_cost_nothing_wherever_it_waits() -> None:
    run = run_of(attempt(1, None, spent={"queue": 60.0}, partition="other"))
    cost = cost_json(add_up(charges_of(run.attempts, run.executor, read_prices())), "EUR")
    assert (cost["spent"], cost["waiting_seconds"], cost["problem"], cost["currency"]) == (0, 60, None, "EUR")
    assert cost_json(add_up([]), "EUR")["spent"] == 0
