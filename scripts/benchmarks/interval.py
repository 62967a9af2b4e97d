"""What ``checkpoint.every: auto`` loses over recorded interruptions, compared with the best fixed interval.

A job runs through each trace of ``traces/`` from beginning to end, and learns only from its own interruptions. The best
fixed interval is chosen in hindsight.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _measure import ROOT, Report, Sample, say

from slurmtrain.model.interruption.interval import FIRST_SAVE_S, InterruptionStats, IntervalChoice, choose, optimum

TRACES = Path(__file__).with_name("traces")
DAY_S = 86400.0
# From an interruption to training again; interruptions in between count as the same one.
RESTART_S = 60.0
# The length of every attempt is varied by so much, so that the best fixed interval is not one that a few interruptions
# happened to miss. Recorded times are minutes apart from what happened anyway.
VARIED = 0.1
FIXED_S = (600.0, 1800.0, 3600.0)
AIM = 1.05
# How far back the registry's statistics of a partition reach (ops/shared/interruption_stats.py).
REMEMBERED_S = 90 * DAY_S
MOST_DAYS = 150
# Chosen anew when what was seen has grown by this part: choosing after every save would change less than half of it.
GROWTH = 0.01


@dataclass(frozen=True)
class Recorded:
    """A trace, and the job that runs through it: its number of nodes and duration.

    ``only``: first characters of the names of its nodes, if it does not have all nodes of the trace.
    """

    name: str
    file: str
    nodes: int
    seconds: float
    only: str = ""

    def interruptions(self) -> list[float]:
        """When its nodes failed, in seconds from the start."""
        with (TRACES / self.file).open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if not self.only or row["node"][0] in self.only]
        return sorted({float(row["seconds"]) for row in rows})


@dataclass(frozen=True)
class Cost:
    """What a save costs, in seconds: the stall of training, and the time until it is published."""

    stall_s: float
    save_s: float


@dataclass(frozen=True)
class Attempt:
    """How many seconds training lasted, and whether it was then interrupted."""

    seconds: float
    interrupted: bool


RECORDED = (
    Recorded("LLM cluster, 400 nodes", "infinitehbd.csv", nodes=400, seconds=147 * DAY_S),
    Recorded("LLM cluster, 100 of them", "infinitehbd.csv", nodes=100, seconds=147 * DAY_S, only="0123"),
    Recorded("LANL system 8, 164 nodes", "lanl-8.csv", nodes=164, seconds=1622 * DAY_S),
    Recorded("AWS p2 spot, 16 nodes", "aws-p2.csv", nodes=16, seconds=319_194.0),
    Recorded("AWS g4dn spot, 12 nodes", "aws-g4dn.csv", nodes=12, seconds=66_665.0),
    Recorded("GCP a100 spot, 64 nodes", "gcp-a100.csv", nodes=64, seconds=97_266.0),
)
# Asynchronous saves of a small and of a large model, of a slow file system, and a synchronous one.
COSTS = (Cost(0.2, 5), Cost(2, 30), Cost(10, 60), Cost(60, 60))


@dataclass(frozen=True)
class Result:
    """Seconds lost in each variation of a trace: by ``auto``, by fixed intervals (by their length), and by ``young``.

    The last is the fixed interval that the formula gives for the mean time between interruptions of the whole trace.
    """

    trace: Recorded
    cost: Cost
    auto: Sequence[float]
    auto_interval_s: float
    young: Sequence[float]
    fixed: Mapping[float, Sequence[float]]

    @property
    def best_s(self) -> float:
        """The fixed interval that loses least over all variations."""
        return min(self.fixed, key=lambda seconds: sum(self.fixed[seconds]))

    @property
    def best(self) -> Sequence[float]:
        return self.fixed[self.best_s]

    @property
    def ratio(self) -> float:
        """What auto loses, as a multiple of what the best fixed interval loses."""
        return sum(self.auto) / sum(self.best)

    def __str__(self) -> str:
        return f"{self.trace.name}, {self.cost.stall_s:g} s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="draw what is lost with each interval, as SVG")


def run(arguments: argparse.Namespace) -> Report:
    variations, ratio = (2, 1.2) if arguments.quick else (20, 1.03)
    grid = intervals(ratio)
    results, as_recorded = [], []
    for trace, cost in itertools.product(RECORDED, COSTS):
        results.append(replay(trace, cost, grid, variations))
        as_recorded.append(replay(trace, cost, grid, None))
        say(f"{results[-1]}: {results[-1].ratio:.3f}, as recorded {as_recorded[-1].ratio:.3f}")
    if arguments.plot:
        draw(results, ROOT / arguments.plot)
    report = report_of(results, as_recorded)
    report_statistics(report)
    return report


def report_statistics(report: Report) -> None:
    """Add what one-day jobs gain from the registry's statistics of a partition."""
    ratios = []
    for trace, cost in itertools.product([trace for trace in RECORDED if trace.seconds > 3 * DAY_S], COSTS):
        informed, uninformed = jobs_of_a_day(trace, cost)
        name = f"{trace.name}, {cost.stall_s:g} s, a day"
        report.figure(f"{name}: lost with statistics", [100 * statistics.fmean(informed) / DAY_S], "%")
        report.figure(f"{name}: lost without", [100 * statistics.fmean(uninformed) / DAY_S], "%")
        ratios.append(sum(informed) / sum(uninformed))
        report.ratios[f"{name}: with statistics/without"] = Sample([ratios[-1]])
    report.notes.append(
        f"with the partition's statistics, jobs of a day lose {1 - statistics.fmean(ratios):.0%} less than without, in "
        f"the mean of all; from {1 - min(ratios):.0%} less to {max(ratios) - 1:.0%} more"
    )


def intervals(ratio: float, shortest_s: float = 5.0, longest_s: float = 2 * DAY_S) -> list[float]:
    """Fixed intervals to try: a geometric series, and those that people choose."""
    count = math.ceil(math.log(longest_s / shortest_s) / math.log(ratio))
    return sorted({*(shortest_s * ratio**number for number in range(count)), *FIXED_S})


def report_of(results: Sequence[Result], as_recorded: Sequence[Result]) -> Report:
    """Figures and ratios; fails if auto is too far from the best fixed interval over all traces together."""
    report = Report()
    for result in results:
        report.figure(f"{result}: best fixed interval", [result.best_s], "s")
        report.figure(f"{result}: lost with it", [100 * lost / result.trace.seconds for lost in result.best], "%")
    for result in results:
        report.ratio(f"{result}: auto/best", result.auto, result.best)
    for label, subset in (("all", results), ("all, as recorded", as_recorded)):
        best = [sum(result.best) for result in subset]
        report.ratio(f"{label}: auto/best", [sum(result.auto) for result in subset], best)
        report.ratio(f"{label}: formula, true mean/best", [sum(result.young) for result in subset], best)
    for seconds in FIXED_S:
        lost = [sum(result.fixed[seconds]) for result in results]
        report.ratio(f"all: every {seconds / 60:.0f} min/best", lost, [sum(result.best) for result in results])
    mean = statistics.fmean(result.ratio for result in results)
    unvaried = statistics.fmean(result.ratio for result in as_recorded)
    clairvoyant = statistics.fmean(sum(result.young) / sum(result.best) for result in as_recorded)
    worst = max(results, key=lambda result: result.ratio)
    hours = sum(map(hours_of_auto, results)) / sum(map(hours_of_best, results))
    report.notes = [
        f"auto loses {mean - 1:.1%} more than the best fixed interval in hindsight, in the mean of all; at most "
        f"{worst.ratio - 1:.1%} more ({worst}); {hours - 1:.1%} more in hours of all traces together",
        f"as recorded, without variations: {unvaried - 1:.1%}; a fixed interval by the formula, for the mean that only "
        f"hindsight knows: {clairvoyant - 1:.1%}",
        f"aim: at most {AIM - 1:.0%} more, over all together",
    ]
    if max(mean, hours) > AIM:
        report.failures.append(
            f"auto loses {mean - 1:.1%} more than the best fixed interval, {hours - 1:.1%} in hours, not {AIM - 1:.0%}"
        )
    return report


def hours_of_auto(result: Result) -> float:
    """What auto loses of a trace."""
    return statistics.fmean(result.auto) / 3600


def hours_of_best(result: Result) -> float:
    """What the best fixed interval loses of it."""
    return statistics.fmean(result.best) / 3600


# --- replaying --------------------------------------------------------------------------------------------------------


def replay(trace: Recorded, cost: Cost, grid: Sequence[float], variations: int | None) -> Result:
    """What is lost of a trace at this cost, with auto and with every fixed interval; as recorded without variations."""
    attempts = attempts_of(trace.interruptions(), trace.seconds)
    varied = [attempts] if variations is None else [vary(attempts, seed) for seed in range(variations)]
    mean_s = sum(attempt.seconds for attempt in attempts) / max(1, sum(attempt.interrupted for attempt in attempts))
    by_formula = optimum(cost.stall_s, mean_s)
    outcomes = [auto(cost, trace.nodes, attempts) for attempts in varied]
    return Result(
        trace,
        cost,
        auto=[lost for lost, _ in outcomes],
        auto_interval_s=statistics.median(interval for _, interval in outcomes),
        young=[fixed(by_formula, cost, attempts) for attempts in varied],
        fixed={seconds: [fixed(seconds, cost, attempts) for attempts in varied] for seconds in grid},
    )


def jobs_of_a_day(trace: Recorded, cost: Cost) -> tuple[list[float], list[float]]:
    """What jobs of a day on these nodes lose: those that begin with what the nodes have seen before, and with nothing.

    The jobs begin at midnight of every day of the trace but the first, or of MOST_DAYS of them, evenly spread.
    """
    interruptions = trace.interruptions()
    days = range(1, int(trace.seconds // DAY_S))
    informed, uninformed = [], []
    for day in days[:: max(1, math.ceil(len(days) / MOST_DAYS))]:
        began = day * DAY_S
        since = max(0.0, began - REMEMBERED_S)
        attempts = attempts_of([at - began for at in interruptions if at >= began], DAY_S)
        before = bisect.bisect_left(interruptions, began) - bisect.bisect_left(interruptions, since)
        history = InterruptionStats(uptime_s=(began - since) * trace.nodes, interruptions=before)
        informed.append(auto(cost, trace.nodes, attempts, history)[0])
        uninformed.append(auto(cost, trace.nodes, attempts)[0])
    return informed, uninformed


def attempts_of(interruptions: Sequence[float], seconds: float) -> list[Attempt]:
    """The attempts between interruptions; the last one ends with the trace."""
    attempts, began = [], 0.0
    for at in interruptions[: bisect.bisect_left(interruptions, seconds)]:
        if at > began:
            attempts.append(Attempt(at - began, interrupted=True))
        began = at + RESTART_S
    return [*attempts, Attempt(seconds - began, interrupted=False)] if seconds > began else attempts


def vary(attempts: Sequence[Attempt], seed: int) -> list[Attempt]:
    """The attempts, each a little shorter or longer."""
    chance = random.Random(seed)
    return [replace(attempt, seconds=attempt.seconds * chance.uniform(1 - VARIED, 1 + VARIED)) for attempt in attempts]


def fixed(interval_s: float, cost: Cost, attempts: Sequence[Attempt]) -> float:
    """Seconds lost with saves at a fixed interval, which are no more frequent than they take."""
    interval_s = max(interval_s, cost.save_s - cost.stall_s)
    period = interval_s + cost.stall_s
    lost = 0.0
    for attempt in attempts:
        saves = int(attempt.seconds // period)
        if attempt.interrupted:
            late = saves > 0 and saves * period - cost.stall_s + cost.save_s > attempt.seconds
            lost += attempt.seconds - (saves - late) * interval_s
        else:
            lost += saves * cost.stall_s
    return lost


def auto(
    cost: Cost, nodes: int, attempts: Sequence[Attempt], history: InterruptionStats | None = None
) -> tuple[float, float]:
    """Seconds lost with the intervals that slurmtrain chooses, and the mean of these intervals.

    ``history`` holds the interruptions known before the first attempt.
    """
    history, lost, saves = history or InterruptionStats(), 0.0, 0
    for attempt in attempts:
        work_done = committed = 0.0  # work, and what of it is in a published checkpoint
        for stretch in _stretches(history, cost, nodes, attempt.seconds):
            work = stretch.saves * stretch.interval_s
            late = stretch.end_s - cost.stall_s + cost.save_s > attempt.seconds
            committed = work_done + work - (stretch.interval_s if late else 0.0)
            work_done += work
            saves += stretch.saves
            history = replace(history, stall_s=cost.stall_s, save_s=cost.save_s)
            ended = stretch.end_s
        if attempt.interrupted:
            lost += attempt.seconds - committed
        elif work_done:
            lost += ended - work_done
        history = history.plus(uptime_s=attempt.seconds * nodes, interruptions=int(attempt.interrupted))
    return lost, sum(attempt.seconds for attempt in attempts) / max(1, saves)


@dataclass(frozen=True)
class _Stretch:
    """Some saves at one interval; ``end_s`` is when the stall of the last one ended, from the start of the attempt."""

    interval_s: float
    saves: int
    end_s: float


def _stretches(history: InterruptionStats, cost: Cost, nodes: int, seconds: float) -> Iterator[_Stretch]:
    """The saves of an attempt of this many seconds."""
    now = 0.0
    choice = _chosen(history, nodes, now, None)
    while True:
        period = choice.seconds + cost.stall_s
        fitting = int((seconds - now) // period)
        if fitting < 1:
            return
        # The first save of a run shows the cost of a save, and the next interval is based on that.
        grown = GROWTH * (history.uptime_s / nodes + now) if now or history.stall_s is not None else 0.0
        saves = min(fitting, max(1, int(grown // period)))
        now += saves * period
        yield _Stretch(choice.seconds, saves, now)
        choice = _chosen(history, nodes, now, cost)


def _chosen(history: InterruptionStats, nodes: int, uptime_s: float, cost: Cost | None) -> IntervalChoice:
    """What a session would choose now; before the first save of the attempt without its cost."""
    stall_s, save_s = (cost.stall_s, cost.save_s) if cost else (None, None)
    choice = choose(history, nodes=nodes, uptime_s=uptime_s, stall_s=stall_s, save_s=save_s)
    assert cost or history.stall_s is not None or choice.seconds == FIRST_SAVE_S
    return choice


# --- drawing ----------------------------------------------------------------------------------------------------------

# Beyond the upper edge of the panels.
_HIGHEST = 3.5


def draw(results: Sequence[Result], path: Path) -> None:
    """One panel per trace: the loss with each fixed interval and with auto, as multiples of the least."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "slurmtrain", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.2), sharex=True, sharey=True, layout="constrained")
    colours = dict(zip(COSTS, ("tab:blue", "tab:green", "tab:orange", "tab:red"), strict=True))
    for trace, panel in zip(RECORDED, axes.flat, strict=True):
        for result in (result for result in results if result.trace == trace):
            least = sum(result.best)
            colour, label = colours[result.cost], f"stall {result.cost.stall_s:g} s"
            shown = {seconds: sum(lost) / least for seconds, lost in list(result.fixed.items())[::2]}
            shown = {seconds: ratio for seconds, ratio in shown.items() if ratio < _HIGHEST}
            panel.plot(list(shown), list(shown.values()), color=colour, linewidth=1, label=label)
            panel.plot([result.auto_interval_s], [result.ratio], "o", color=colour, markersize=5)
        panel.set(title=trace.name, xscale="log", xlim=(8, 40_000), ylim=(0.95, 3))
        panel.set_xticks([10, 60, 600, 3600, 36_000], labels=["10 s", "1 min", "10 min", "1 h", "10 h"])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0][0].legend(loc="upper left")
    figure.supxlabel("fixed interval between saves (lines); mean interval of auto (dots)")
    figure.supylabel("time lost, as a multiple of the best fixed interval's")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
