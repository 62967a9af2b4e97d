"""The section `prices` of the configuration: what an hour on a node, or of a GPU, costs in each partition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from slurmtrain.errors import NoPrice
from slurmtrain.model.experiment import kinds

DEFAULT = "default"
"""The key of the price of GPUs whose type has no price of its own, or is unknown."""
LOCAL = "local"
"""In place of a partition: this machine, for runs of the local executor."""

_PRICE = kinds.finite_number(0)
# Slurm takes other names too, but none with a comma, which separates partitions.
_check_partition = kinds.matching(r"[^\s,\x00-\x1f\x7f]+", "expected the name of a partition, found {!r}")
_MOST_OF_CURRENCY = 12
_GPUS = "gpus_per_node"


def _check_gpu(name: object) -> None:
    if name != DEFAULT:
        # Every command reads the configuration, and few have prices to read.
        from slurmtrain.model.experiment.resources import check_gpu_type

        check_gpu_type(name)


def _check_currency(name: str) -> None:
    if len(name) > _MOST_OF_CURRENCY or not name.isprintable() or " " in name:
        raise ValueError(f"expected a currency, such as EUR, found {name!r}")


@dataclass(frozen=True, slots=True)
class GpuPrices:
    """The kind of `gpu_hour`: a price, or a price for each type of GPU."""

    text = "number of at least 0, or a mapping from types of GPUs, or `default`, to numbers"

    def read(self, value: object, at: kinds.KeyPath, report: kinds.Report) -> Mapping[str, float]:
        """As :meth:`Kind.read` with its ``value``, ``at`` and ``report``."""
        if not isinstance(value, Mapping):
            return {DEFAULT: _PRICE.read(value, at, report)}
        if not value:
            report(at, "there is no price: write a number, or {default: 4}")
        return kinds.Entries(_PRICE, self.text, _check_gpu).read(value, at, report)

    def write(self, value: Mapping[str, float]) -> object:
        """As :meth:`Kind.write`."""
        return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPrice:
    """The price of a partition: of a node and of its GPUs, which add up if both are there."""

    node_hour: kinds.Amount | None = None
    """The price of a node for an hour."""
    gpu_hour: Annotated[Mapping[str, float], GpuPrices()] | None = None
    """The price of a GPU for an hour: a number for all types, or one for each `resources.gpu_type`, with `default` for
    all others."""

    @staticmethod
    def require(written: Mapping[Any, object]) -> None:
        """Raise ValueError if there is no price in what is ``written``."""
        # One mistake, one message: it may be there under another name.
        if set(written) <= {"node_hour", "gpu_hour"} and not any(price is not None for price in written.values()):
            raise ValueError("there is no price: write node_hour, gpu_hour or both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What an hour costs in each partition."""

    currency: Annotated[str, kinds.text("currency", _check_currency), kinds.REQUIRED] = ""
    """The currency of all prices, such as EUR."""
    partitions: Annotated[
        Mapping[str, PartitionPrice],
        kinds.Entries(kinds.Section(PartitionPrice), "mapping from partitions to prices", _check_partition),
        kinds.REQUIRED,
    ] = field(default_factory=dict)
    """The prices of each partition; `local` is this machine, for the local executor."""
    on_demand: Annotated[str, kinds.text("partition")] | None = None
    """The partition without interruptions that costs are compared with."""

    def conflicts(self) -> Iterator[kinds.Conflict]:
        """Keys that contradict each other, and why."""
        if self.on_demand is not None and self.on_demand not in self.partitions:
            near = kinds.suggestion(self.on_demand, self.partitions)
            yield "on_demand", f"there is no price of partition {self.on_demand!r} in prices.partitions{near}"

    def per_hour(self, partition: str, gpus: float, gpu_type: str | None, shares: tuple[float, float]) -> float:
        """The price of a node for an hour.

        Args:
            partition: Its partition; ``local`` for this machine.
            gpus: How many GPUs of it are used.
            gpu_type: Their type, as Slurm calls it; None: unknown, or any.
            shares: What part of the price of the node, and of its GPUs, is paid.

        Raises:
            NoPrice: With the price that is missing.
        """
        key = f"prices.partitions.{partition}"
        place = "this machine" if partition == LOCAL else f"partition {partition}"
        price = self.partitions.get(partition)
        if price is None:
            raise NoPrice(f"{place} has no price: {key}")
        of_node, of_gpus = shares
        total = of_node * (price.node_hour or 0.0)
        if not gpus or price.gpu_hour is None:
            if price.node_hour is None:
                raise NoPrice(f"{place} has no price for nodes without GPUs: {key}.node_hour")
            return total
        of_gpu = price.gpu_hour.get(gpu_type or DEFAULT, price.gpu_hour.get(DEFAULT))
        if of_gpu is None and gpu_type is None:
            raise NoPrice(f"{place} has no price for GPUs of an unknown type: {key}.gpu_hour.{DEFAULT}")
        if of_gpu is None:
            raise NoPrice(f"{place} has no price for {gpu_type}: {key}.gpu_hour")
        return total + of_gpus * gpus * of_gpu


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes of a run that are alike. ``partition``: its own, as the spec says; None: the run's.

    ``first``: the number of the first of them; ``count``: how many there are.
    """

    first: int
    count: int
    gpus: int
    gpu_type: str | None
    partition: str | None


def node_kinds(resources: Mapping[str, Any]) -> list[NodeKind]:
    """The kinds of nodes that a run asks for: one, or one for each component, in the order of their nodes.

    Args:
        resources: The ``resources`` of its spec, as plain data; a journal may hold anything there.
    """
    from slurmtrain.model.experiment.slurm_options import canonical_option

    alike: list[NodeKind] = []
    components = resources.get("components")
    for each in components if isinstance(components, list | tuple) else ():
        nodes = each.get("nodes") if isinstance(each, Mapping) else None
        if isinstance(nodes, int) and nodes > 0:
            options = each.get("slurm") if isinstance(each.get("slurm"), Mapping) else {}
            partition = {canonical_option(str(name)): value for name, value in options.items()}.get("partition")
            own = _gpus_of(each if isinstance(each.get(_GPUS), int) else resources)
            first = alike[-1].first + alike[-1].count if alike else 0
            alike.append(NodeKind(first, nodes, *own, str(partition) if partition else None))
    return alike or [NodeKind(0, 1, *_gpus_of(resources), None)]


def _gpus_of(resources: Mapping[str, Any]) -> tuple[int, str | None]:
    gpus, gpu_type = resources.get(_GPUS), resources.get("gpu_type")
    return (gpus if isinstance(gpus, int) else 0), (str(gpu_type) if gpu_type else None)


def mean_gpus(resources: Mapping[str, Any]) -> float:
    """How many GPUs a node of a run has, on average over its components. ``resources``: as for :func:`node_kinds`."""
    alike = node_kinds(resources)
    return sum(kind.count * kind.gpus for kind in alike) / sum(kind.count for kind in alike)


def price_of_nodes(
    prices: Prices,
    resources: Mapping[str, Any],
    partitions_of: Callable[[NodeKind], Sequence[str]],
    shares: tuple[float, float] = (1.0, 1.0),
) -> float:
    """The mean price of a node of a run for an hour.

    Args:
        prices: All prices.
        resources: The ``resources`` of its spec, as plain data.
        partitions_of: The partitions that nodes of a kind may be in; several may do, if all cost the same.
        shares: What part of a node, and of its GPUs, is the run's.

    Raises:
        NoPrice: With the price that is missing.
    """
    alike = node_kinds(resources)
    total = 0.0
    for kind in alike:
        names = partitions_of(kind)
        if not names:
            raise NoPrice("its partition is unknown, and so is its price")
        costs = {prices.per_hour(name, kind.gpus, kind.gpu_type, shares) for name in names}
        if len(costs) > 1:
            raise NoPrice(f"it is unknown which of the partitions {', '.join(names)} it had, and their prices differ")
        total += kind.count * costs.pop()
    return total / sum(kind.count for kind in alike)
