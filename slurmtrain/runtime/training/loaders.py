"""All loaders of a session: they are one object in its checkpoints, without the script's doing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from slurmtrain.errors import CheckpointError, DataError
from slurmtrain.model.batches import Division, divide
from slurmtrain.runtime.training.loader import DataRank, Loader, Order

# Options of torch's DataLoader that say what a loader of the session decides itself, and what to do instead.
_DECIDED = {
    "sampler": "it draws every sample of an epoch once; let the dataset choose among samples",
    "batch_sampler": "it makes the batches itself; let the dataset choose among samples",
    "generator": "give it a seed",
    "in_order": "a batch that overtook another one would be counted in its place",
}


class Loaders:
    """The loaders that a script has made, numbered by creation."""

    def __init__(self, rank: DataRank, seed: int | None) -> None:
        """``rank``: of this process. ``seed``: the spec's, for loaders that get none."""
        self._rank = rank
        self._seed = seed or 0
        self._loaders: list[Loader] = []
        self._shares: tuple[int, ...] = ()
        # Loaders whose positions checkpoints contain, once the script has registered the other contents.
        self._registered: list[Loader] | None = None
        # Loaders that steps have gone through; others, as for evaluations, have no position worth keeping.
        self._stepped: set[int] = set()
        # The one that steps are going through.
        self._current: Loader | None = None

    def make(
        self,
        dataset: Any,
        batch_size: int,
        options: Mapping[str, Any],
        *,
        shuffle: bool,
        drop_last: bool,
        seed: int | None,
    ) -> Loader:
        """A new loader; the arguments are as for ``run.loader``. Raises DataError.

        ``dataset``, ``batch_size``, ``shuffle``, ``drop_last`` and ``seed`` have a parameter each there; ``options``
        are all others, which go to torch's DataLoader.
        """
        _check(dataset, batch_size, self._rank.world_size, options)
        division = Division(len(dataset), batch_size, drop_last)
        if not division.steps:
            raise DataError(
                f"the dataset of run.loader() has {len(dataset)} samples, too few for a batch of {batch_size}, and "
                "with drop_last=True nothing remains: reduce batch_size, or leave drop_last out"
            )
        order = Order(shuffle=shuffle, seed=self._seed if seed is None else seed)
        loader = Loader(dataset, division, order, self._rank, options)
        self._loaders.append(loader)
        self._divide(loader)
        return loader

    def register(self) -> dict[str, object]:
        """Note that checkpoints contain the loaders made so far, and how: by a name that no script's object has."""
        self._registered = list(self._loaders)
        return {"run.loaders": self} if self._loaders else {}

    def with_steps(self, steps: Iterator[int], loader: Any) -> Iterator[tuple[int, Any]]:
        """Each of the ``steps`` with its batch of a ``loader``.

        Raises DataError for one that :meth:`make` has not made, or that is not in checkpoints although others are.
        """
        if not any(loader is each for each in self._loaders):
            raise DataError(
                f"run.steps(total, loader) takes what run.loader() has returned, not {type(loader).__name__}: with any "
                "other loader take its batches within 'for step in run.steps(total)', and pass it to run.checkpoint()"
            )
        if self._registered is not None and not any(loader is each for each in self._registered):
            raise DataError(
                "the loader was made after run.checkpoint(), so that its position is not in checkpoints: call "
                "run.loader() before it"
            )
        number = self._loaders.index(loader)
        self._stepped.add(number)
        return self._going_through(self._loaders[number], steps)

    def _going_through(self, loader: Loader, steps: Iterator[int]) -> Iterator[tuple[int, Any]]:
        self._current = loader
        try:
            yield from loader.with_steps(steps)
        finally:
            self._current = None

    @property
    def is_stepping(self) -> bool:
        """Whether steps are going through a loader."""
        return self._current is not None

    @property
    def epoch_samples(self) -> int | None:
        """The samples of an epoch of the loader that steps have gone through; None: there is none, or several."""
        return self._loaders[min(self._stepped)].epoch_samples if len(self._stepped) == 1 else None

    @property
    def weight(self) -> float:
        """The weight of the batch of the current step; 1 if it has none."""
        return 1.0 if self._current is None else self._current.weight

    def share(self, shares: Sequence[int]) -> None:
        """Divide batches in proportion to these ``shares`` of the ranks from the next one on."""
        self._shares = tuple(shares)
        for loader in self._loaders:
            self._divide(loader)

    def _divide(self, loader: Loader) -> None:
        if self._shares:
            loader.share(divide(loader.batch_size, self._shares))

    def state_dict(self) -> dict[str, Any]:
        """The positions of loaders that steps have gone through, by number."""
        return {str(number): self._loaders[number].state_dict() for number in sorted(self._stepped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions of a ``state`` that :meth:`state_dict` returned. Raises CheckpointError."""
        for number, position in state.items():
            if int(number) >= len(self._loaders):
                raise CheckpointError(
                    f"it has the position of loader {int(number) + 1}, and the script has made {len(self._loaders)}"
                )
            self._loaders[int(number)].load_state_dict(position)
            self._stepped.add(int(number))

    def close(self) -> None:
        """End the workers of all loaders."""
        for loader in self._loaders:
            loader.close()


def _check(dataset: Any, batch_size: int, ranks: int, options: Mapping[str, Any]) -> None:
    """Raise DataError unless the ``dataset`` can be divided into batches over this many ``ranks``."""
    for name in sorted(_DECIDED.keys() & options.keys()):
        raise DataError(f"run.loader() takes no {name!r}: {_DECIDED[name]}; or use torch's own DataLoader")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"run.loader() takes a dataset with __getitem__ and __len__, not {type(dataset).__name__}, whose samples "
            "cannot be divided anew over another number of processes: use torchdata's StatefulDataLoader, and "
            "run.checkpoint(..., loader=loader)"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DataError(f"the batch_size of run.loader() is a positive whole number, not {batch_size!r}")
    if batch_size < ranks:
        raise DataError(
            f"the batch_size of run.loader() is that of a step, of all processes together, and {batch_size} is too few "
            f"for {ranks} processes: raise it, or take fewer processes (resources.nodes, resources.procs_per_node)"
        )
    if not len(dataset):
        raise DataError("the dataset of run.loader() is empty")
