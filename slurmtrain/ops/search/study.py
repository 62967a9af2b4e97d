"""The study of a search in Optuna, made anew from its trials whenever something is asked.

The only user of optuna, which is an extra. Nothing of a study is kept: its sampler begins with a seed that follows from
the search's and the number of the trial, so that the same trials lead to the same next one.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from slurmtrain.errors import NotAvailable, UserError
from slurmtrain.model.experiment.kinds import suggestion
from slurmtrain.model.experiment.sweep_values import Distribution, Method, SearchSpec, is_same
from slurmtrain.ops.search.trials import Trial

# What the search sets itself.
_OWN_SETTINGS = frozenset({"self", "seed", "constant_liar", "constraints_func", "gamma", "weights"})


def check_methods(search: SearchSpec) -> None:
    """Check that the sampler and the pruner can be made.

    Raises:
        NotAvailable: optuna is not installed.
        UserError: a setting does not exist, or has no such value.
    """
    _sampler(search, 0)
    _pruner(search)


class Study:
    """What the trials so far say about the next one."""

    def __init__(self, search: SearchSpec, trials: Sequence[Trial]) -> None:
        """The study of a search with these trials, in the order of their numbers.

        Raises NotAvailable or UserError as :func:`check_methods`.
        """
        optuna = _import_optuna()
        self._search = search
        self._spaces = {key: _space(each) for key, each in search.space.items()}
        self._count = len(trials)
        self._study = optuna.create_study(
            direction="maximize" if search.larger else "minimize",
            sampler=_sampler(search, self._count),
            pruner=_pruner(search),
        )
        # Pruners compare at the last steps of running trials. Optuna copies all that it has, again and again.
        compared = {max(trial.curve) for trial in trials if trial.state == "running" and trial.curve}
        for trial in trials:
            self._study.add_trial(self._frozen(trial, compared))

    def ask(self) -> dict[str, Any]:
        """The values of the next trial, which counts as running from now on."""
        self._study.sampler = _sampler(self._search, self._count)
        self._count += 1
        chosen = self._study.ask(self._spaces).params
        return {key: _value(each, chosen[key]) for key, each in self._search.space.items()}

    def why_prune(self, trial: Trial) -> str:
        """Why a running trial is to end, as a phrase; empty if it is not."""
        if self._search.pruner.name == "none" or not trial.curve:
            return ""
        if not self._study.pruner.prune(self._study, self._study.trials[trial.number]):
            return ""
        return f"pruned by the {self._search.pruner.name} pruner at step {max(trial.curve)}"

    def _frozen(self, trial: Trial, compared: Collection[int]) -> Any:
        """A trial as Optuna has it; the curve of an ended trial has its last point and its points at some steps."""
        optuna = _import_optuna()
        states = optuna.trial.TrialState
        params: dict[str, Any] = {}
        for key, space in self._search.space.items():
            choice = _choice(space, trial.values.get(key))
            if choice is None:
                # It was resumed with other values, or the record of them is damaged: nothing can be learned from it.
                return optuna.trial.create_trial(state=states.FAIL)
            params[key] = choice
        state = {"running": states.RUNNING, "complete": states.COMPLETE, "pruned": states.PRUNED}
        return optuna.trial.create_trial(
            state=state.get(trial.state, states.FAIL),
            value=trial.value if trial.state == "complete" else None,
            params=params,
            distributions=self._spaces,
            intermediate_values=_thinned(trial, compared),
        )


def _thinned(trial: Trial, compared: Collection[int]) -> dict[int, float]:
    if trial.state == "running" or not trial.curve:
        return dict(trial.curve)
    return {step: trial.curve[step] for step in sorted({*compared, max(trial.curve)}) if step in trial.curve}


def _import_optuna() -> Any:
    """The module. Raises NotAvailable if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise NotAvailable(f"'search' needs Optuna ({error}): pip install 'slurmtrain[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _space(space: Distribution) -> Any:
    distributions = _import_optuna().distributions
    if space.values:
        # By their indices: Optuna takes only some types of values.
        return distributions.CategoricalDistribution(range(len(space.values)))
    if space.step is not None:
        return distributions.IntDistribution(int(space.low), int(space.high), step=space.step)
    return distributions.FloatDistribution(space.low, space.high, log=space.log)


def _value(space: Distribution, chosen: Any) -> Any:
    """The value of a key that Optuna's choice stands for."""
    return space.values[chosen] if space.values else space.settle(chosen)


def _choice(space: Distribution, value: Any) -> Any:
    """What Optuna calls a value of a key; None if it is not in the space."""
    if space.values:
        return next((index for index, each in enumerate(space.values) if is_same(each, value)), None)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and space.low <= value <= space.high else None


def _sampler(search: SearchSpec, number: int) -> Any:
    """The sampler that chooses the trial with this number."""
    samplers = _import_optuna().samplers
    seed = (search.seed * 1_000_003 + number) % 2**32
    if search.sampler.name == "random":
        return _make(samplers.RandomSampler, "sampler", search.sampler, seed=seed)
    # The trials that still run count as bad ones, so that no two look at the same place.
    return _make(samplers.TPESampler, "sampler", search.sampler, seed=seed, constant_liar=search.parallel > 1)


def _pruner(search: SearchSpec) -> Any:
    pruners = _import_optuna().pruners
    classes = {"none": pruners.NopPruner, "median": pruners.MedianPruner, "percentile": pruners.PercentilePruner}
    return _make(classes[search.pruner.name], "pruner", search.pruner)


def _make(cls: Any, role: str, method: Method, **own: Any) -> Any:
    """A sampler or a pruner. Raises UserError if a setting is wrong."""
    accepted = [name for name in inspect.signature(cls).parameters if name not in _OWN_SETTINGS]
    for name in method.settings:
        if name not in accepted:
            near = suggestion(name, accepted)
            raise UserError(f"sweep.search.{role}: {method.name} has no setting {name!r}{near}")
    try:
        with warnings.catch_warnings():
            # Settings that Optuna calls experimental are the user's choice.
            warnings.simplefilter("ignore")
            return cls(**method.settings, **own)
    except (TypeError, ValueError) as error:
        raise UserError(f"sweep.search.{role}: {method.name} cannot be made with these settings: {error}") from error
