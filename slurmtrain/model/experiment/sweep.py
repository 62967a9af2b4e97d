"""A sweep: which keys take which values together, the runs that follow, how they share jobs, and their largest cost.

Each key with values, each ``zip``, ``points`` and all random keys together are factors. All combinations of the factors
are run, in the order of the file, the last one varying fastest; ``exclude`` takes runs away, ``include`` adds some.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, ClassVar, NamedTuple

from slurmtrain.model.experiment import sweep_values
from slurmtrain.model.experiment.kinds import MAX_RUNS, REQUIRED, KeyPath, Report, Section, read_all, whole_number
from slurmtrain.model.experiment.resources import ResourcesSpec
from slurmtrain.model.experiment.slurm_options import named_options


@dataclass(frozen=True, slots=True)
class Pack:
    """How runs share a job. ``runs``: how many; ``share_gpu``: whether all of them use the GPUs of one."""

    SHORTHAND: ClassVar = "runs"
    runs: Annotated[int, whole_number(2, why="how many runs share a job"), REQUIRED] = 2
    share_gpu: bool = False

    def to_dict(self) -> dict[str, Any]:
        """This as JSON."""
        return {"runs": self.runs, "share_gpu": self.share_gpu}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Pack:
        """Read what :meth:`to_dict` returned."""
        # It may come from a damaged journal, and others divide by it.
        return cls(max(1, int(plain["runs"])), bool(plain.get("share_gpu")))

    @property
    def gpu_sets(self) -> int:
        """How many times the GPUs of one run the job has."""
        return 1 if self.share_gpu else self.runs


def read_pack(value: Any, report: Report) -> Pack | None:
    """The value of ``sweep.pack``: a number of runs, or a mapping; None if there is none, or after a mistake.

    Args:
        value: the value.
        report: receives what is wrong, with its place below ``sweep``.
    """
    pack, mistakes = read_all(Section(Pack, nullable=True), value, ("pack",))
    for at, message in mistakes:
        report(at, message)
    return None if mistakes else pack


def packing_problem(resources: ResourcesSpec, pack: Pack, slurm: Mapping[str, Any]) -> str:
    """Why a run cannot be packed, as a sentence without a full stop; empty if it can.

    Args:
        resources: what the run requests.
        pack: how it would share a job.
        slurm: the spec's section of that name.
    """
    if resources.allocated.max > 1:
        return (
            "runs of several nodes cannot share a job: set resources.nodes to 1 (and no spare nodes), or remove "
            "sweep.pack"
        )
    if resources.bind:
        return "sweep.pack: runs that share a job cannot be bound to CPUs: remove resources.bind, or sweep.pack"
    if pack.share_gpu and not resources.gpus_per_node:
        return "sweep.pack.share_gpu: these runs have no GPUs: set resources.gpus_per_node, or remove share_gpu"
    if "gres" in named_options(slurm) and not pack.share_gpu:
        return "slurm.gres cannot be divided among the runs of a pack: use resources.gpus_per_node"
    return ""


WORDS = ("zip", "points", "include", "exclude", "samples", "seed", "parallel", "pack", "search")
"""Keys of the section that are no keys of the spec; ``seed`` with several values is the spec's."""
# How often a random run is drawn again before two equal ones are accepted.
_TRIES = 100


class Swept(NamedTuple):
    """A value of a swept key. ``at``: where it is written, below ``sweep``."""

    value: Any
    at: KeyPath


Point = Mapping[str, Swept]
"""What one run sets, by key."""


@dataclass(frozen=True, slots=True)
class _Factor:
    size: int
    points: Callable[[], Iterable[Point]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep that has been read; nothing is expanded yet.

    ``factors``: what is combined. ``exclude``, ``include``: the rules. ``parallel``: how many of its runs may run at
    once; None: nothing is said of it. ``pack``: how its runs share jobs; None: each has its own. ``search``: how
    values are chosen; None: these are all runs.
    """

    factors: Sequence[_Factor] = ()
    exclude: Sequence[Point] = ()
    include: Sequence[Point] = ()
    parallel: int | None = None
    pack: Pack | None = None
    search: sweep_values.SearchSpec | None = None

    @property
    def count(self) -> int:
        """How many runs there are before any is excluded."""
        # Without anything to vary, included runs are all there are.
        combined = math.prod(factor.size for factor in self.factors) if self.factors or not self.include else 0
        return combined + len(self.include)

    def first(self) -> Point:
        """The first of all combinations, rules aside."""
        return _joined(next(iter(factor.points())) for factor in self.factors)

    def expand(self) -> list[Point]:
        """What each run sets; without any sweep, one run that sets nothing."""
        kept = (point for point in self._combinations() if not any(_matches(rule, point) for rule in self.exclude))
        return [*kept, *self.include]

    def idle_rules(self) -> list[Swept]:
        """The values of rules of ``exclude`` that exclude nothing, one for each rule."""
        combinations = self._combinations()
        idle = (rule for rule in self.exclude if not any(_matches(rule, point) for point in combinations))
        return [next(iter(rule.values())) for rule in idle]

    def _combinations(self) -> list[Point]:
        if self.include and not self.factors:
            return []
        return [_joined(each) for each in itertools.product(*(list(factor.points()) for factor in self.factors))]


def _joined(points: Iterable[Point]) -> Point:
    return {key: value for point in points for key, value in point.items()}


def _matches(rule: Point, point: Point) -> bool:
    return all(key in point and _same(point[key].value, swept.value) for key, swept in rule.items())


def _same(first: Any, other: Any) -> bool:
    """Whether two values are equal; 1 and 1.0 are, 1 and True are not."""
    return bool(first == other) and isinstance(first, bool) == isinstance(other, bool)


def varying_keys(points: Sequence[Point]) -> list[str]:
    """The keys that differ between runs, by first appearance."""
    keys = dict.fromkeys(key for point in points for key in point)
    # By repr(), since values may be lists, and 1, 1.0 and True are equal.
    return [key for key in keys if len({repr(point[key].value) if key in point else None for point in points}) > 1]


def read_sweep(
    section: object, report: Report, check_key: Callable[[str], None] = lambda _: None, *, max_runs: int = MAX_RUNS
) -> Sweep:
    """Read a section ``sweep``; the values themselves are checked run by run.

    Args:
        section: What the file says.
        report: Receives the mistakes, with their keys below ``sweep``; after one, the sweep has only what is right.
        check_key: Raises ValueError for what is no key of the spec.
        max_runs: How many runs a sweep may have.
    """
    if not isinstance(section, Mapping):
        report((), f"expected a mapping from a key of the spec to a list of values, found {section!r}")
        return Sweep()
    reader = _Reader(section, report, check_key)
    if section.get("search") is not None:
        return reader.read_search(max_runs)
    sweep = reader.read()
    # Counted and not expanded: a mistyped range may stand for billions of runs.
    if sweep.count > max_runs:
        why = f"the sweep has {sweep.count} runs, more than the limit of {max_runs}"
        report((), f"{why}; 'sweep_max_runs' in slurmtrain.yaml changes that")
        # For its first combination, by which mistakes in the rest of the spec are found too.
        return Sweep(sweep.factors)
    if sweep.exclude and not sweep.expand():
        report(("exclude",), f"these rules exclude all of the {sweep.count} runs")
    return sweep


class _Reader:
    """Reads one section."""

    def __init__(self, section: Mapping[str, Any], report: Report, check_key: Callable[[str], None]) -> None:
        # YAML reads some keys as numbers.
        self._section = {str(key): value for key, value in section.items()}
        self._mistaken = False
        self._report_on = report
        self._check_key = check_key
        # Which part of the sweep varies a key.
        self._owner: dict[str, KeyPath] = {}
        self._drawn: dict[str, sweep_values.RandomValues] = {}
        self._samples: int | None = None

    def read(self) -> Sweep:
        """All of it."""
        factors: list[_Factor] = []
        for name, value in self._section.items():
            random = len(self._drawn)
            factors += self._factors(name, value)
            if self._drawn and not random:
                # All random keys together are one factor, where the first of them stands.
                place = len(factors)
        if self._drawn:
            factors[place:place] = self._random()
        else:
            for name in ("samples", "seed"):
                if self._section.get(name) is None or self._mistaken or (name == "seed" and self._varies_seed):
                    continue
                self._report((name,), "no key has random values, such as uniform(0, 1)")
        exclude = [point for _, point in self._points("exclude")]
        include = [point for _, point in self._points("include")]
        for swept in (swept for rule in exclude for swept in rule.items()):
            # After another mistake, the key may only seem to be missing.
            if swept[0] not in self._owner and not self._mistaken:
                self._report(swept[1].at, f"the sweep does not vary {swept[0]!r}, so no run can be excluded by it")
        for index, point in enumerate(include):
            if any(_equal(point, other) for other in include[:index]):
                self._report(("include", str(index)), "this run is included twice")
        parallel = self._whole("parallel", 1)
        if not (factors or include or self._mistaken):
            self._report((), "the sweep varies nothing: name a key, as in 'params.lr: [0.1, 0.3]', or remove it")
        pack = read_pack(self._section.get("pack"), self._report)
        if parallel is not None and pack is not None and parallel < pack.runs:
            self._report(("parallel",), f"the {pack.runs} runs of a pack run at the same time, more than {parallel}")
        return Sweep(factors, exclude, include, parallel, pack)

    def read_search(self, max_runs: int) -> Sweep:
        """All of it, if its values are to be chosen by a search: one run, which is an example.

        Args:
            max_runs: How many runs a sweep may have.
        """
        space: dict[str, sweep_values.Distribution] = {}
        for name, value in self._section.items():
            if name not in WORDS or (name == "seed" and self._varies_seed):
                values = self._values(value, (name,)) if self._may_vary(name, (name,)) else None
                if isinstance(values, sweep_values.RandomValues):
                    space[name] = values.distribution
                elif values is not None:
                    space[name] = values.distribution or sweep_values.Distribution(
                        [values.at(i) for i in range(values.count)]
                    )
            elif name not in ("search", "parallel") and value is not None:
                instead = "; write it in 'search'" if name == "seed" else ""
                self._report((name,), f"this cannot be combined with 'search'{instead}")
        section = self._section["search"]
        parallel = self._section.get("parallel")
        if isinstance(section, Mapping) and parallel is not None:
            section = {**section, "parallel": parallel}
        search = sweep_values.read_search(section, space, max_runs, self._report)
        example = {key: Swept(each.example, (key,)) for key, each in space.items()}
        return Sweep([_Factor(1, lambda: [example])] if example else [], search=search)

    @property
    def _varies_seed(self) -> bool:
        """Whether ``seed`` has several values, and so varies the spec's key; a number is where random values begin."""
        value = self._section.get("seed")
        return isinstance(value, list) or sweep_values.is_expression(value)

    def _report(self, at: KeyPath, message: str) -> None:
        self._mistaken = True
        self._report_on(at, message)

    def _factors(self, name: str, value: Any) -> Iterator[_Factor]:
        if name == "zip":
            for index, group in enumerate(value if isinstance(value, list) else [value] if value is not None else []):
                yield from self._zip(group, ("zip", str(index)) if isinstance(value, list) else ("zip",))
        elif name == "points":
            points = list(self._points(name))
            for index, point in points:
                if any(_equal(point, other) for at, other in points if at < index):
                    self._report((name, str(index)), "this point occurs twice and would make two identical runs")
            for key in dict.fromkeys(key for _, point in points for key in point):
                self._claim(key, ("points",))
            if points:
                yield _Factor(len(points), lambda: [point for _, point in points])
        elif (name not in WORDS or (name == "seed" and self._varies_seed)) and self._may_vary(name, (name,)):
            listed = self._values(value, (name,))
            if isinstance(listed, sweep_values.RandomValues):
                self._drawn[name] = listed
            elif listed is not None:
                yield _together({name: (value, listed, (name,))})

    def _claim(self, key: str, at: KeyPath) -> bool:
        """Whether nothing else in the sweep varies the key."""
        if key in self._owner:
            self._report(at, f"{key!r} is varied twice, here and in {'.'.join(self._owner[key])!r}; keep one of them")
            return False
        self._owner[key] = at
        return True

    def _may_vary(self, key: str, at: KeyPath) -> bool:
        return self._is_key(key, at) and self._claim(key, at)

    def _is_key(self, key: str, at: KeyPath | None = None) -> bool:
        """Whether the spec has a key; if not, that is a mistake at this place, if any."""
        try:
            self._check_key(key)
        except ValueError as error:
            if at is not None:
                self._report(at, str(error))
            return False
        return True

    def _values(self, value: Any, at: KeyPath) -> sweep_values.ListedValues | sweep_values.RandomValues | None:
        """The values of a key: a list, or text that stands for one; None after a mistake."""
        try:
            if isinstance(value, str) and not sweep_values.is_list(value):
                return sweep_values.read_expression(value)
            if not isinstance(value, list) or not value:
                raise ValueError(sweep_values.describe_other_form(value, at[-1], is_key=self._is_key))
            for each in value:
                if sweep_values.is_expression(each):
                    raise ValueError(f"{each!r} stands for a list itself; write it without brackets around it")
            if len({repr(each) for each in value}) < len(value):
                raise ValueError(f"a value occurs twice in {value!r} and would make two identical runs")
        except ValueError as error:
            self._report(at, str(error))
            return None
        return sweep_values.ListedValues(len(value), value.__getitem__)

    def _zip(self, group: Any, at: KeyPath) -> Iterator[_Factor]:
        """The keys of a mapping, which vary together."""
        if not isinstance(group, Mapping) or not group:
            self._report(at, f"expected a mapping from keys to lists of one length, found {group!r}")
            return
        columns: dict[str, sweep_values.ListedValues] = {}
        for key, value in group.items():
            path = (*at, str(key))
            listed = self._values(value, path) if self._may_vary(str(key), path) else None
            if isinstance(listed, sweep_values.RandomValues):
                self._report(path, "random values are drawn together anyway; write this key outside of 'zip'")
            elif listed is not None:
                columns[str(key)] = listed
        lengths = {key: listed.count for key, listed in columns.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            self._report(at, f"keys that vary together need the same number of values: {shown}")
        elif len(columns) == len(group):
            yield _together({key: (group[key], listed, (*at, key)) for key, listed in columns.items()})

    def _points(self, name: str) -> Iterator[tuple[int, Point]]:
        """The mappings from keys to values in a list, with their indices."""
        value = self._section.get(name)
        if value is None:
            return
        if not isinstance(value, list) or not value:
            self._report((name,), f"expected a list of mappings such as {{params.lr: 0.1}}, found {value!r}")
            return
        for index, item in enumerate(value):
            at = (name, str(index))
            if not isinstance(item, Mapping) or not item:
                self._report(at, f"expected a mapping such as {{params.lr: 0.1}}, found {item!r}")
                continue
            are_keys = [self._is_key(str(key), (*at, str(key))) for key in item]
            if all(are_keys):
                yield index, {str(key): Swept(each, (*at, str(key))) for key, each in item.items()}

    def _random(self) -> list[_Factor]:
        """All random keys together."""
        samples = self._whole("samples", 1)
        seed = 0 if self._varies_seed else self._whole("seed", 0)
        keys = dict(self._drawn)
        if self._section.get("samples") is None:
            self._report(
                (next(iter(keys)),), "random values need 'samples': how many runs to draw; write 'samples: 20'"
            )
        if samples is None or (seed is None and self._section.get("seed") is not None):
            return []
        choices = [drawn.choices for drawn in keys.values()]
        different = math.prod(each for each in choices if each is not None)
        # Otherwise _draw_runs() would give up, and repeat runs.
        if None not in choices and different < samples:
            self._report(("samples",), f"there are only {different} different runs to draw, not {samples}")
            return []
        return [_Factor(samples, lambda: itertools.islice(_draw_runs(keys, samples, seed or 0), samples))]

    def _whole(self, name: str, least: int) -> int | None:
        value = self._section.get(name)
        if value is None:
            return None
        try:
            number: int = whole_number(least).parse(value)
        except ValueError as error:
            self._report((name,), str(error))
            return None
        return number


def _equal(first: Point, other: Point) -> bool:
    return first.keys() == other.keys() and all(_same(first[key].value, other[key].value) for key in first)


def _together(columns: Mapping[str, tuple[Any, sweep_values.ListedValues, KeyPath]]) -> _Factor:
    """Keys that vary together: what is written for each, its values, equally many of each, and its place."""
    size = next(listed.count for _, listed, _ in columns.values())

    def points() -> Iterator[Point]:
        for index in range(size):
            # The place of a value in a list is the item's.
            yield {
                key: Swept(listed.at(index), (*at, str(index)) if isinstance(value, list) else at)
                for key, (value, listed, at) in columns.items()
            }

    return _Factor(size, points)


def _draw_runs(keys: Mapping[str, sweep_values.RandomValues], samples: int, seed: int) -> Iterator[Point]:
    """Random runs, which differ if that is possible. Each key has its own stream: it does not depend on other keys."""
    # Not Python's own seeding of text, which has changed between versions.
    digests = {key: hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys}
    streams = {key: Random(int.from_bytes(digest, "big")) for key, digest in digests.items()}  # noqa: S311 (no secret)
    earlier: set[str] = set()
    # More are drawn than are asked for, since values of a choice repeat.
    for attempt in itertools.count():
        values = {key: drawn.draw(streams[key].random()) for key, drawn in keys.items()}
        if repr(values) not in earlier or attempt > _TRIES * samples:
            earlier.add(repr(values))
            yield {key: Swept(value, (key,)) for key, value in values.items()}


_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class SweepCost:
    """The most that one attempt of each run can take: time limit x nodes x GPUs.

    ``runs``: how many. ``without_limit``: how many of these have no time limit, and are in no sum.
    """

    runs: int
    node_hours: float
    gpu_hours: float
    without_limit: int

    def __add__(self, other: SweepCost) -> SweepCost:
        return SweepCost(
            self.runs + other.runs,
            self.node_hours + other.node_hours,
            self.gpu_hours + other.gpu_hours,
            self.without_limit + other.without_limit,
        )

    def __str__(self) -> str:
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        if self.without_limit == self.runs:
            return f"{runs} without a time limit"
        hours = f"{runs}, at most {self.gpu_hours:,.1f} GPU-hours and {self.node_hours:,.1f} node-hours per attempt"
        return f"{hours}, and {self.without_limit} of them without a time limit" if self.without_limit else hours

    def excess(self, most_runs: int, most_gpu_hours: float) -> str:
        """Which limit this exceeds, as half a sentence that names its key in the configuration; empty if none.

        Args:
            most_runs: The limit of runs.
            most_gpu_hours: The limit of GPU-hours.
        """
        if self.runs > most_runs:
            return f"more than {most_runs:,} runs (sweep_confirm_runs)"
        if self.gpu_hours > most_gpu_hours:
            return f"more than {most_gpu_hours:,g} GPU-hours (sweep_confirm_gpu_hours)"
        return ""


def cost_of(resources: Iterable[ResourcesSpec], pack: Pack | None = None) -> SweepCost:
    """The cost of runs with these ``resources``. Spare nodes count; a range of nodes counts with its largest number.

    ``pack``: how they share jobs, which they fill: each has its share of a node then, and perhaps of the GPUs.
    """
    sharing = 1 if pack is None else pack.runs
    runs = without_limit = 0
    node_hours = gpu_hours = 0.0
    for each in resources:
        runs += 1
        if each.time is None:
            without_limit += 1
            continue
        hours = each.time / _HOUR_S
        node_hours += hours * each.allocated.max / sharing
        gpu_hours += hours * each.most_gpus / (sharing if pack is not None and pack.share_gpu else 1)
    return SweepCost(runs, node_hours, gpu_hours, without_limit)
