"""What a run costs that was preempted three times, for real: by hand from what its attempts say they spent."""

from __future__ import annotations

import signal

import pytest
from helpers.site import Site, until

PRICES = """
prices:
  currency: EUR
  partitions: {local: {node_hour: 8}, ondemand: {node_hour: 12}}
  on_demand: ondemand
"""
PREEMPTIONS = 3


def test_three_real_preemptions_cost_what_the_attempts_have_spent_on_them(site: Site) -> None:
    (site.path / "slurmtrain.yaml").write_text(PRICES)
    two = {"nodes": 2, "procs_per_node": 1, "time": "00:10:00"}
    spec = site.light(params={"steps": 200, "step_ms": 50}, resources=two, checkpoint={"every": {"steps": 20}})
    run_id = site.submit(spec)
    for number in range(1, PREEMPTIONS + 1):
        until(lambda number=number: site.step(run_id) >= 40 * number, "some training")
        site.signal_all(run_id, signal.SIGTERM)
        until(lambda: not site.processes(run_id), "the end of all processes")
        site.call("sync")
    site.call("wait", run_id)
    shown = site.show(run_id)
    assert [each["cause"] for each in shown["attempts"]] == ["preempted"] * PREEMPTIONS + ["completed"]
    spent = [each["seconds"] for each in shown["attempts"]]
    cost = shown["cost"]
    # Two nodes at 8 EUR, in EUR a second.
    price = 2 * 8 / 3600
    first, *others = spent
    starting = first["start"] + first["preflight"] + first["restore"]
    restarts = sum(each["start"] + each["preflight"] + each["restore"] for each in others)
    stops = sum(each["stop"] for each in spent[:-1])
    lost = sum(each["lost"] for each in spent)
    kept = sum(each["train"] for each in spent)
    saving = sum(each["stall"] for each in spent)
    by_hand = {
        "training": kept,
        "saving": saving,
        "starting": starting,
        "stopping": spent[-1]["stop"],
        "lost": lost + restarts + stops,
    }
    # Seconds are shown to the millisecond.
    tolerance = price * 0.001 * 4 * len(spent)
    for name, seconds in by_hand.items():
        assert cost[name] == pytest.approx(price * seconds, abs=tolerance), name
    assert cost["spent"] == pytest.approx(price * sum(by_hand.values()), abs=5 * tolerance)
    assert cost["lost"] > 0
    assert cost["interruptions_by_cause"] == {"preempted": PREEMPTIONS}
    assert cost["cost_of_interruption"] == pytest.approx(cost["lost"] / PREEMPTIONS)
    on_demand = price * 12 / 8 * (sum(by_hand.values()) - by_hand["lost"])
    assert cost["on_demand"] == pytest.approx(on_demand, abs=8 * tolerance)
    # A third cheaper: an interruption may take up to a third of the time between two of them.
    hours = by_hand["lost"] / PREEMPTIONS / 3600
    assert cost["break_even_interruptions_per_hour"] == pytest.approx((1 - 8 / 12) / hours, rel=0.01)
    # What it costs as text, as a sum over all, and as another run of its name would be expected to.
    assert site.call("cost", run_id).stdout.splitlines()[-1].startswith("on demand is cheaper above ")
    total = site.json("cost")["total"]
    assert total == cost
    dry = site.json("submit", str(spec), "--dry-run", "--executor", "local")["price"]
    assert (dry["expected"], dry["earlier_runs"]) == (pytest.approx(cost["spent"]), 1)
    assert dry["at_most"] == pytest.approx(2 * 8 / 6)
