"""What a session does with models, gradients, optimizers and data, under every strategy; its names are accelerate's."""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slurmtrain.errors import DataError
from slurmtrain.model.batches import divide, loss_weight, microbatch_sizes
from slurmtrain.model.diagnosis.hang import PAUSE_S
from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.training.passes import no_sync

if TYPE_CHECKING:
    from slurmtrain.runtime.training.loader import Loader, Loaders
    from slurmtrain.runtime.training.strategy_interface import Strategy


class Shares:
    """The shares of a session, the same on all ranks, and what this rank has of the current batch."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        device: torch.device,
        *,
        step: Callable[[], int | None] = lambda: None,
        microbatches: int = 1,
        differ: bool = False,
    ) -> None:
        """Equal shares.

        Args:
            rank: The number of this rank among the ``ranks``.
            ranks: The number of ranks that batches are divided among.
            device: Where this rank computes.
            step: Returns the step of ``run.steps`` that the script is in, None outside.
            microbatches: The least number of microbatches that a rank divides its samples into.
            differ: Whether ranks may have different numbers of microbatches.
        """
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.step = step
        self.current: tuple[int, ...] = ()
        """How many samples of a full batch each rank gets; empty: as many as each other."""
        self.weight = 1.0
        """By what to multiply the mean loss of this rank's samples: the mean over ranks is then that over samples."""
        self.samples_taken: tuple[int, int] | None = None
        """How many samples this rank has of the first batch since this was None, and how many that batch has."""
        self.at_once: int | None = None
        """The most samples of a microbatch since this was None; None if none was divided."""
        self.samples = 0
        """How many samples all batches so far had, of all ranks together."""
        self.waited_s = 0.0
        """How long a loader waited for the data of the current step, in seconds."""
        self._least = microbatches
        self._differ = differ
        self._limits: tuple[int | None, ...] = ()
        # The weight at the beginning of each step: as before the loop over steps.
        self._before_steps = 1.0

    @property
    def limits(self) -> list[int]:
        """How many samples fit into the memory of each rank at once, 0 where that is unknown; empty if it is of all."""
        return [limit or 0 for limit in self._limits] if any(self._limits) else []

    def begin_steps(self, *, are_loaded: bool) -> None:
        """Begin a loop over steps; what was shared before counts in all of them, unless batches ``are_loaded``."""
        self._before_steps = 1.0 if are_loaded else self.weight

    def begin_step(self) -> None:
        """Begin or leave a step: what was shared in the one before does not count any more."""
        self.weight = self._before_steps
        self.waited_s = 0.0

    @property
    def has_samples(self) -> bool:
        """Whether this rank has any of the samples that were shared last, rather than one in place of none."""
        return self.weight != 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that shares other samples; the step's samples count again after it."""
        weight, batch, samples = self.weight, self.samples_taken, self.samples
        # Samples of an evaluation that the script divides itself all count.
        self.weight = 1.0
        try:
            yield
        finally:
            self.weight, self.samples_taken, self.samples = weight, batch, samples

    def part_of(self, parts: Sequence[Any]) -> list[Any]:
        """This rank's samples of each of ``parts``, which have as many. Raises DataError."""
        size = samples_of(parts, "run.share()")
        sizes = self.sizes(size)
        self.take(sizes)
        start = sum(sizes[: self.rank])
        stop = start + sizes[self.rank]
        # A rank without a sample gets the first one, with the weight 0: it has to take part in the step.
        return [part[start:stop] if start < stop else part[:1] for part in parts]

    def sizes(self, size: int, full: int | None = None) -> tuple[int, ...]:
        """How many of a batch's ``size`` samples each rank gets, where a ``full`` one has so many, by default as many.

        A batch that is not full has no more for a rank than a full one.
        """
        return divide(size, divide(full or size, self.current or (1,) * self.ranks))

    def take(self, sizes: Sequence[int]) -> None:
        """Note that each rank takes so many samples of a batch for a step."""
        self.weight = loss_weight(sizes, self.rank)
        self.samples += sum(sizes)
        # The balancer of mixed hardware sets it to None when it begins to measure a step.
        if self.samples_taken is None:
            self.samples_taken = sizes[self.rank], sum(sizes)

    def microbatches(self, samples: int) -> tuple[int, ...]:
        """The sizes of the microbatches into which this rank divides so many ``samples``. Raises DataError."""
        if samples < (1 if self._differ else self._least):
            raise DataError(
                f"{samples} samples cannot be divided into {self._least} microbatches: raise the batch size, or reduce "
                "'resources.accumulation'"
            )
        sizes = microbatch_sizes(samples, self._least, self._limits[self.rank] if self._limits else None)
        self.at_once = max(self.at_once or 0, *sizes)
        return sizes

    def change(self, shares: Sequence[int], limits: Sequence[int | None] = ()) -> None:
        """Divide batches anew from the next one on; call it on all ranks after the same step.

        Args:
            shares: The proportions, by rank.
            limits: How many samples fit into the memory of each rank at once, None where that is unknown.
        """
        self.current, self._limits = tuple(shares), tuple(limits)

    def state_dict(self) -> dict[str, Any]:
        """The shares, and what limits microbatches."""
        return {"shares": list(self.current), "limits": list(self._limits)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of a ``state``, which may be of a version without limits."""
        # They are empty as long as the run had equal shares.
        if state["shares"]:
            self.change(state["shares"], state.get("limits", ()))

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        """Begin with equal shares: the ``states`` are of other ranks than ``rank`` of now ``world_size``."""


def samples_of(parts: Sequence[Any], taker: str) -> int:
    """How many samples each of the ``parts`` of a batch has. Raises DataError, which names their ``taker``."""
    sizes = {len(part) for part in parts}
    if len(sizes) != 1:
        raise DataError(
            f"{taker} needs parts of one batch, with the same number of samples; these have {sorted(sizes)}"
        )
    size = sizes.pop()
    if size < 1:
        raise DataError(f"{taker} needs a batch with at least one sample")
    return size


class ParallelTraining:
    """The part of a session that distributes models and data, and helps with their steps."""

    accumulation: int
    step: int
    device: torch.device
    _strategy: Strategy
    _shares: Shares
    _loaders: Loaders

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Distribute a model over the processes, as the spec's ``strategy`` says.

        Call it on all ranks, before the optimizer is made and before :meth:`checkpoint`::

            model = run.parallelize(Net())
            optimizer = run.optimizer(torch.optim.AdamW, model.parameters(), lr=0.1)

        All ranks begin with rank 0's weights. Without a ``strategy``, and outside a job, it is DistributedDataParallel.

        Args:
            model: Any module, on any device but ``meta``; it is changed, or becomes part of the one returned.

        Returns:
            The model to train, on :attr:`device`.

        Raises:
            StrategyError: The strategy does not fit the model, or the nodes of this run.
        """
        return self._strategy.parallelize(model)

    def optimizer(self, cls: type[torch.optim.Optimizer], parameters: Iterable[Any], **options: Any) -> Any:
        """Make an optimizer of a model that is distributed: ``run.optimizer(torch.optim.AdamW, parameters, lr=0.1)``.

        Args:
            cls: Its class.
            parameters: As for any optimizer: tensors, or groups of them.
            options: Its options, such as ``lr``.

        Returns:
            An optimizer of this class; with ``strategy: zero1``, a ZeroRedundancyOptimizer of such optimizers.
        """
        return self._strategy.optimizer(cls, parameters, options)

    def share(self, *parts: Any) -> Any:
        """This rank's samples of the batch of a step, which all ranks have as a whole.

        All ranks call it alike::

            inputs, targets = run.share(inputs, targets)
            run.backward(loss_of(model(inputs), targets))

        All ranks get as many, give or take one; with the spec's ``resources.mixed`` as many as suit their speeds. If
        there are fewer samples than ranks, some get one with the :attr:`weight` 0.

        Args:
            parts: Tensors or sequences with the same number of samples, their first dimension.

        Returns:
            The samples of each part: a list, or a single part's own samples.

        Raises:
            DataError: The parts have different numbers of samples, or none.
        """
        own = self._shares.part_of(parts)
        return own[0] if len(parts) == 1 else own

    @property
    def weight(self) -> float:
        """The factor of :meth:`backward` for the mean loss of the samples last returned by :meth:`share` or a loader.

        The gradients are then gradients of the mean over the whole batch. It is 1 if all ranks have as many samples,
        and for samples that the script divides itself. Samples that were shared in a step count in that step only, and
        samples that were shared before the loop over steps count in all steps.
        """
        return self._shares.weight

    @property
    def sync_gradients(self) -> bool:
        """Whether this is the last microbatch of the step, after which the optimizer makes its step."""
        return self._strategy.gradients.sync

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the spec's ``mixed_precision``: ``with run.autocast(): loss = ...``.

        The forward pass of a model from :meth:`parallelize` does so anyway: this is for what the script computes
        outside of it. With sharded parameters it does nothing there, since what such a model returns is float32.

        Returns:
            A context manager.
        """
        return self._strategy.autocast()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute the gradients of a loss, in place of ``loss.backward()``.

        Within :meth:`accumulate` it counts as the loss of a part of the step; with ``mixed_precision: fp16`` it is
        scaled. Where ranks have different numbers of samples, by :meth:`share` or a loader, it is multiplied by
        :attr:`weight`.

        Args:
            loss: The mean over the microbatch of this rank.
            options: As for ``torch.autograd.backward``.
        """
        weight = self.weight
        # Not multiplied by 1, which would be one more operation in every step of most scripts.
        self._strategy.gradients.backward(loss if weight == 1.0 else weight * loss, **options)

    def forward_backward(
        self, model: nn.Module, loss_of: Callable[[Any, Tensor], Tensor], inputs: Any, targets: Tensor
    ) -> Tensor:
        """Compute the gradients of a whole step, under every strategy; a pipeline can be trained by this alone.

        The batch is divided as by :meth:`microbatches`, and by a pipeline into its own ones. As in
        :meth:`backward`, gradients are weighted where ranks have different numbers of samples::

            loss = run.forward_backward(model, cross_entropy, inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

        Args:
            model: What :meth:`parallelize` has returned.
            loss_of: The mean loss over a microbatch, called with the model's output and its targets.
            inputs: This rank's part of the batch (see :attr:`dp_rank`): a tensor, or several in a tuple.
            targets: As many rows.

        Returns:
            The mean loss over this part of the batch, without its graph; on all stages of a pipeline.

        Raises:
            StrategyError: The rows cannot be divided into the microbatches of a pipeline evenly.
            DataError: There are fewer rows than microbatches.
        """
        weight = self.weight

        def weighted(output: Any, targets: Tensor) -> Tensor:
            return weight * loss_of(output, targets)

        chosen = loss_of if weight == 1.0 else weighted
        mean = self._strategy.forward_backward(
            model,
            chosen,
            (inputs, targets),
            self.step,
            microbatches=self.accumulation,
            divide=self._shares.microbatches,
        )
        # Callers get the mean of this rank's own samples; a rank without any has nothing to divide by.
        return mean / weight if weight else mean

    def evaluate(
        self, model: nn.Module, loss_of: Callable[[Any, Any], Tensor], batches: Iterable[tuple[Any, Tensor]]
    ) -> Tensor:
        """Compute the loss of a model over batches that it is not trained with, under every strategy.

        Call it on all ranks, with as many batches::

            loss = run.evaluate(model, cross_entropy, ((x.to(run.device), y.to(run.device)) for x, y in loader))
            run.log(val_loss=loss)

        The model is in eval mode and has no gradients meanwhile, and training goes on as if nothing had been evaluated,
        with the same random numbers. It is a :meth:`pause`. Sizes of batches may differ, also between ranks.

        Args:
            model: What :meth:`parallelize` has returned.
            loss_of: The mean loss of samples, called with the model's output and their targets; to have the mean of
                other figures, too, return all in a tensor. In a pipeline the last stage calls it, with a microbatch.
            batches: This rank's part of each (see :attr:`dp_rank`), such as from :meth:`share` or a :meth:`loader`:
                inputs, a tensor or several in a tuple, and targets, with as many rows. They are not divided further,
                but by a pipeline.

        Returns:
            The mean over the samples of all batches and ranks, the same on all ranks.

        Raises:
            DataError: There is no batch.
        """
        states = rng.capture(self.device)
        try:
            with self.pause("evaluation"), self._shares.kept():
                counted = ((inputs, targets, self._shares.has_samples) for inputs, targets in batches)
                return self._strategy.evaluate(model, loss_of, counted)
        finally:
            rng.restore(states, self.device)

    @abstractmethod
    def pause(
        self, activity: str = "", limit: timedelta = timedelta(seconds=PAUSE_S)
    ) -> contextlib.AbstractContextManager[None]:
        """Pause training for an ``activity`` that takes longer than a step, and at most as long as ``limit``."""

    def microbatches(self, *parts: Any) -> Iterator[Any]:
        """Divide this rank's samples of the batch of a step into microbatches, for :meth:`accumulate`.

        There are :attr:`accumulation`, whose sizes differ by at most one sample. With the spec's ``resources.mixed`` a
        rank has more of them if its samples do not fit into the memory of its GPU, and fewer if it has fewer samples.

        Args:
            parts: Tensors or sequences with the same number of samples, their first dimension.

        Returns:
            An iterator over microbatches: a list of their samples of each part, or with a single part these samples.

        Raises:
            DataError: The parts have different numbers of samples, or fewer than there are microbatches.
            StrategyError: Not all microbatches of the step before have been computed.
        """
        sizes = self._shares.microbatches(samples_of(parts, "run.microbatches()"))
        self._strategy.gradients.divide(sizes)
        stops = itertools.accumulate(sizes)
        own = ([part[stop - size : stop] for part in parts] for size, stop in zip(sizes, stops, strict=True))
        return own if len(parts) > 1 else (part for [part] in own)

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Compute the gradients of a step in microbatches.

        It is the context of one of them::

            for x, y in run.microbatches(inputs, targets):
                with run.accumulate(model):
                    run.backward(loss_of(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()

        Before the last one gradients are not reduced over ranks, and an optimizer from :meth:`optimizer` does nothing
        in ``step()`` and ``zero_grad()``.

        Args:
            models: What :meth:`parallelize` has returned.

        Returns:
            A context manager, around forward and backward passes. Entering it raises StrategyError if the step before
            had fewer microbatches, or if with the spec's ``resources.mixed`` they are not from :meth:`microbatches`.
        """
        return self._strategy.gradients.accumulate(models, self.step)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Let the backward passes of a model add to its gradients without reducing them over ranks.

        Args:
            model: What :meth:`parallelize` has returned.

        Returns:
            A context manager, around forward and backward passes.
        """
        return no_sync(model)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``; call it on all ranks.

        Before the last microbatch of a step it does nothing, and returns 0. With ``mixed_precision: fp16`` it removes
        the scale of the gradients first.

        Args:
            parameters: The parameters of a model from :meth:`parallelize`.
            max_norm: The greatest norm.
            norm_type: Which norm: 2, or ``float("inf")`` for the greatest absolute value.

        Returns:
            The norm before, the same on all ranks.
        """
        return self._strategy.clip_grad_norm_(parameters, max_norm, norm_type)

    def loader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> Loader:
        """Load a dataset in batches that all ranks share: ``for step, batch in run.steps(total, loader)``.

        Call it on all ranks, before :meth:`checkpoint`: its position is then in checkpoints. In an epoch each sample is
        drawn once, in an order that is the same on any number of ranks, also if this number or ``batch_size`` changes
        in the middle of the epoch. Iterating over it goes through one whole epoch, as for an evaluation.

        Args:
            dataset: With ``__getitem__`` and ``__len__``, as for ``torch.utils.data.DataLoader``.
            batch_size: The samples of a step, of all ranks together. Each rank gets as many, give or take one.
            shuffle: Whether the order is random, another one in each epoch.
            drop_last: Leave out the last batch of an epoch if it is smaller than the others.
            seed: What the order and random numbers of samples depend on; by default the spec's ``seed``, else 0.
            options: More of DataLoader's, such as ``num_workers``; with workers and a GPU, ``pin_memory`` is on.

        Raises:
            DataError: The dataset is not of this kind or has no batch, or ``batch_size`` is less than the ranks.
        """
        return self._loaders.make(dataset, batch_size, options, shuffle=shuffle, drop_last=drop_last, seed=seed)

    @property
    def dp_size(self) -> int:
        """Into how many parts the batch of a step is divided: with tensor parallelism fewer than there are ranks."""
        return self._strategy.dp_size

    @property
    def dp_rank(self) -> int:
        """Which part of the batch is this rank's, from 0; ranks that divide layers among them have the same one."""
        return self._strategy.dp_rank
