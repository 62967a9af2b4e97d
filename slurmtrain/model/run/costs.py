"""What a run and its interruptions cost: the seconds of :mod:`.accounting`, by purpose, times prices.

Each second of an attempt on nodes has one purpose:

- ``training`` that was kept, and ``saving``, for which training stood still;
- ``starting``: start, preflight and restore of the first attempt that trained; ``stopping``: the end that was meant;
- ``lost``: training that was repeated, and every other start, preflight, restore and stop. Without interruptions there
  would be none of it.

Starts within one attempt, after restarts of its ranks in place, count as equally long, since they are only known
together; so do stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmtrain.errors import NoPrice
from slurmtrain.model.experiment.prices import LOCAL, NodeKind, Prices, mean_gpus, node_kinds, price_of_nodes
from slurmtrain.model.run.accounting import PLANNED, mean_nodes
from slurmtrain.model.run.run import CAUSES, GROW, Attempt

KEPT = ("training", "saving", "starting", "stopping")
"""Purposes that a run without interruptions has too."""
LOST = "lost"
PURPOSES = (*KEPT, LOST)
GPU_HOURS, NODE_HOURS = "GPU-hours", "node-hours"
_HOUR_S = 3600.0


def interrupted_hours(kept: float, rate: float, lost: float) -> float:
    """How many hours a run takes on nodes that is interrupted at a constant rate.

    Each hour on nodes has ``rate`` interruptions, which take ``lost`` hours each. Of T hours, T (1 - rate lost) are
    therefore kept, so T = kept / (1 - rate lost).

    Args:
        kept: How many hours it takes without interruptions.
        rate: Interruptions in an hour on nodes; below 1 / lost, beyond which a run never ends.
        lost: How many hours one interruption takes.
    """
    return kept / (1.0 - rate * lost)


def break_even_rate(price: float, on_demand: float, lost: float) -> float | None:
    """How many interruptions in an hour on nodes make a cheaper partition cost as much as nodes on demand.

    On demand, a run of k hours costs ``on_demand`` k. With r interruptions in each hour, it takes k / (1 - r lost)
    hours (:func:`interrupted_hours`), and costs ``price`` k / (1 - r lost). Both are equal at

        r = (1 - price / on_demand) / lost

    This assumes that each interruption costs as much as the measured ones did on average, whenever it comes, and that
    there are none on demand. Waiting in the queue costs nothing. A run that is interrupted more often and saves more
    often (``checkpoint.every: auto``) loses less each time, so that it would pay a little beyond this rate, too.

    Args:
        price: What an hour on the nodes costs.
        on_demand: What an hour on the same nodes costs on demand.
        lost: How many hours on nodes one interruption takes.

    Returns:
        The rate; 0 if the nodes are not cheaper; None if an interruption takes no time, so that there is none.
    """
    if price >= on_demand:
        return 0.0
    return (1.0 - price / on_demand) / lost if lost > 0 else None


def seconds_by_purpose(attempts: Sequence[Attempt]) -> list[dict[str, float]]:
    """For each attempt of a run, in order, the seconds on nodes by purpose."""
    trained = [any(each.spent.get(kind) for kind in ("train", "stall", "lost")) for each in attempts]
    begun = [any(seconds for kind, seconds in each.spent.items() if kind != "queue") for each in attempts]
    # Without training, the newest attempt on nodes may still lead to it.
    last = max((index for index, has_begun in enumerate(begun) if has_begun), default=None)
    first = trained.index(True) if any(trained) else last
    return [_by_purpose(attempt, is_first=index == first) for index, attempt in enumerate(attempts)]


def _by_purpose(attempt: Attempt, *, is_first: bool) -> dict[str, float]:
    grown = sum(restart.get("cause") == GROW for restart in attempt.restarts)
    restarts = len(attempt.restarts)
    # One start without a checkpoint, or from another run's, and one for each restart.
    started = (is_first + grown) / (1 + restarts)
    restored = started if attempt.first_step or not restarts else grown / restarts
    ends_as_meant = attempt.ended and attempt.cause in PLANNED
    stopped = (ends_as_meant + grown) / max(1, attempt.ended + restarts)
    spent = {kind: attempt.spent.get(kind, 0.0) for kind in attempt.spent}
    planned = {"start": started, "preflight": float(is_first), "restore": restored, "stop": stopped}
    own = {kind: spent.get(kind, 0.0) * share for kind, share in planned.items()}
    return {
        "training": spent.get("train", 0.0),
        "saving": spent.get("stall", 0.0),
        "starting": own["start"] + own["preflight"] + own["restore"],
        "stopping": own["stop"],
        LOST: spent.get("lost", 0.0) + sum(spent.get(kind, 0.0) - own[kind] for kind in own),
    }


def interruptions_of(attempt: Attempt) -> Counter[str]:
    """How often an attempt was interrupted on nodes, by cause: its end, if nobody meant it, and restarts in place."""
    causes = [str(restart.get("cause")) for restart in attempt.restarts if restart.get("cause") != GROW]
    has_begun = any(seconds for kind, seconds in attempt.spent.items() if kind != "queue")
    if attempt.ended and has_begun and attempt.cause is not None and attempt.cause not in PLANNED:
        causes.append(attempt.cause)
    return Counter(cause if cause in CAUSES else "other" for cause in causes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Charges:
    """What one attempt, a run or several runs took, by purpose; they add up.

    ``hours``: on nodes, however many; ``node_hours`` and ``gpu_hours``: times their number. ``money`` and
    ``on_demand``: at the prices of their partitions, and at those on demand; None: a price is missing.
    ``outside``: what was paid for partitions other than the one on demand, and for the same time on demand.
    ``partition``: an attempt's, or several, separated by commas.
    """

    hours: float = 0.0
    waiting_s: float = 0.0
    node_hours: Mapping[str, float] = field(default_factory=dict)
    gpu_hours: Mapping[str, float] = field(default_factory=dict)
    money: Mapping[str, float] | None = None
    on_demand: Mapping[str, float] | None = None
    outside: tuple[float, float] = (0.0, 0.0)
    interruptions: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    """Which price is missing, as a sentence."""
    partition: str = ""


def add_up(charges: Iterable[Charges]) -> Charges:
    """The sum of ``charges``: of the attempts of a run, or of runs. What is unknown of one is unknown of all."""
    every = list(charges)
    if len(every) == 1:
        return every[0]
    causes: Counter[str] = Counter()
    for each in every:
        causes.update(each.interruptions)
    return Charges(
        hours=sum(each.hours for each in every),
        waiting_s=sum(each.waiting_s for each in every),
        node_hours=_sums([each.node_hours for each in every]) or {},
        gpu_hours=_sums([each.gpu_hours for each in every]) or {},
        money=_sums([each.money for each in every]),
        on_demand=_sums([each.on_demand for each in every]),
        outside=(sum(each.outside[0] for each in every), sum(each.outside[1] for each in every)),
        interruptions=dict(causes),
        problem=next((each.problem for each in every if each.problem), ""),
    )


def _sums(amounts: Sequence[Mapping[str, float] | None]) -> dict[str, float] | None:
    total = dict.fromkeys(PURPOSES, 0.0)
    for each in amounts:
        if each is None:
            return None
        for purpose, amount in each.items():
            total[purpose] += amount
    return total


def charges_of(attempts: Sequence[Attempt], executor: str, prices: Prices | None) -> list[Charges]:
    """What each attempt of a run took.

    Args:
        attempts: All of them, in order.
        executor: What starts the run: ``slurm`` or ``local``.
        prices: The prices; None: there are none.
    """
    by_attempt = zip(attempts, seconds_by_purpose(attempts), strict=True)
    return [_Charge(attempt, seconds, attempt.executor or executor).at(prices) for attempt, seconds in by_attempt]


@dataclass(frozen=True, slots=True)
class _Charge:
    """An attempt with its ``seconds`` by purpose. ``executor``: slurm or local."""

    attempt: Attempt
    seconds: Mapping[str, float]
    executor: str

    @property
    def shares(self) -> tuple[float, float]:
        """Its part of its nodes, and of their GPUs: the runs of a pack share both, or only the nodes."""
        pack = self.attempt.pack
        return 1.0 / pack, 1.0 / (pack if self.attempt.share_gpu else 1)

    def partitions_of(self, kind: NodeKind) -> Sequence[str]:
        """The partitions that nodes of a ``kind`` may have been in."""
        if self.executor == LOCAL:
            return [LOCAL]
        noted = self.attempt.partitions
        own = {name for node, name in noted.items() if kind.first <= int(node) < kind.first + kind.count}
        # Without components, all nodes are of one kind, however many there are.
        if noted and not self.attempt.resources.get("components"):
            own = set(noted.values())
        return sorted(own) or [name for name in (kind.partition or self.attempt.partition).split(",") if name]

    def at(self, prices: Prices | None) -> Charges:
        """The attempt's charges, at these ``prices``."""
        nodes = mean_nodes(self.attempt)
        of_nodes, of_gpus = self.shares
        hours = {purpose: seconds / _HOUR_S for purpose, seconds in self.seconds.items()}
        partitions = {name for kind in node_kinds(self.attempt.resources) for name in self.partitions_of(kind)}
        charges = Charges(
            hours=sum(hours.values()),
            waiting_s=self.attempt.spent.get("queue", 0.0),
            node_hours=_scaled(hours, nodes * of_nodes),
            gpu_hours=_scaled(hours, nodes * of_gpus * mean_gpus(self.attempt.resources)),
            interruptions=dict(interruptions_of(self.attempt)),
            partition=",".join(sorted(partitions)),
        )
        if prices is None:
            return charges
        if not charges.hours:
            return replace(charges, money=_scaled(hours, 0.0), on_demand=_scaled(hours, 0.0))
        try:
            rate = nodes * price_of_nodes(prices, self.attempt.resources, self.partitions_of, self.shares)
            charges = replace(charges, money=_scaled(hours, rate))
            if (reference := prices.on_demand) is None:
                return charges
            on_demand = nodes * price_of_nodes(prices, self.attempt.resources, lambda _: [reference], self.shares)
        except NoPrice as error:
            return replace(charges, problem=str(error))
        both = (rate * charges.hours, on_demand * charges.hours)
        return replace(
            charges, on_demand=_scaled(hours, on_demand), outside=(0.0, 0.0) if partitions == {reference} else both
        )


def _scaled(amounts: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: factor * amount for name, amount in amounts.items()}


# --- the answer -------------------------------------------------------------------------------------------------------


def cost_json(
    charges: Charges,
    currency: str | None,
    *,
    has_gpus: bool | None = None,
    idle: tuple[Charges, float] | None = None,
) -> dict[str, Any]:
    """What charges come to: the field ``cost`` of a run, in money, or in GPU-hours or node-hours if a price is missing.

    Args:
        charges: The sum.
        currency: What prices are in; None: there are none.
        has_gpus: Whether the runs use GPUs; None: as the charges say.
        idle: The attempt that has been idle on its nodes, and for how many seconds; None: nothing is.
    """
    has_gpus = any(charges.gpu_hours.values()) if has_gpus is None else has_gpus
    unit = currency if charges.money is not None else None
    amounts = _amounts(charges, unit, has_gpus)
    spent = sum(amounts.values())
    # What an hour of the idle attempt costs.
    rate = sum(_amounts(idle[0], unit, has_gpus).values()) / idle[0].hours if idle and idle[0].hours else 0.0
    return {
        "currency": unit,
        "unit": unit or (GPU_HOURS if has_gpus else NODE_HOURS),
        "spent": spent,
        **{purpose: amounts.get(purpose, 0.0) for purpose in PURPOSES},
        "idle": rate * idle[1] / _HOUR_S if idle else None,
        "waiting_seconds": charges.waiting_s,
        "hours": charges.hours,
        "node_hours": sum(charges.node_hours.values()),
        "gpu_hours": sum(charges.gpu_hours.values()),
        **_interruptions_json(charges, amounts.get(LOST, 0.0), spent),
        "problem": charges.problem or None,
    }


def _interruptions_json(charges: Charges, lost: float, spent: float) -> dict[str, Any]:
    """What interruptions cost, and what the same would have cost without them; ``lost`` of what was ``spent``."""
    count = sum(charges.interruptions.values())
    on_nodes = sum(charges.node_hours.values())
    share = charges.node_hours.get(LOST, 0.0) / on_nodes if on_nodes else 0.0
    hours_lost = share * charges.hours / count if count else None
    paid, on_demand = charges.outside
    kept = None if charges.on_demand is None else sum(charges.on_demand.get(each, 0.0) for each in KEPT)
    is_compared = kept is not None and on_demand > 0
    return {
        "interruptions": count,
        "interruptions_by_cause": dict(charges.interruptions),
        "interruptions_per_hour": count / charges.hours if charges.hours else None,
        "cost_of_interruption": lost / count if count else None,
        "hours_of_interruption": hours_lost,
        "on_demand": kept,
        "saved_by_spot": kept - spent if is_compared and kept is not None else None,
        "break_even_interruptions_per_hour": break_even_rate(paid, on_demand, hours_lost or 0.0)
        if is_compared
        else None,
    }


def _amounts(charges: Charges, currency: str | None, has_gpus: bool) -> Mapping[str, float]:
    """By purpose: money if there is a currency, else hours."""
    if currency is not None and charges.money is not None:
        return charges.money
    return charges.gpu_hours if has_gpus else charges.node_hours
