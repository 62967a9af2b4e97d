"""Capturing and restoring the state of registered objects, as named tensors and other values.

Modules and optimizers go through ``torch.distributed.checkpoint.state_dict``, which gives parameters the same names
however they are wrapped or sharded (DistributedDataParallel, ``fully_shard``), and names optimizer states after their
parameters. So a checkpoint fits any number of ranks and any strategy. All other objects use their ``state_dict``.

An object without one, such as the state of a communication hook, is saved by its attributes, as plain values and
tensors, so that restoring executes nothing from a checkpoint. Process groups are left out: the script creates them.

A ZeroRedundancyOptimizer has the state of its rank's share of the parameters in the optimizer inside (``optim``): the
outer one's ``state`` is empty, and its ``state_dict`` collects the states of all ranks on one. Saved by parameter, as
other optimizers' states are, it fits any number of ranks, and any other optimizer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from slurmtrain.errors import CheckpointError
from slurmtrain.runtime.checkpoint import rng
from slurmtrain.runtime.checkpoint.shard_plan import (
    GROUPS,
    MORE,
    OPTIONS,
    OTHERS,
    can_be_framed,
    find_options,
    group_options,
)
from slurmtrain.runtime.checkpoint.torch_index import Index
from slurmtrain.runtime.job.torch_private import (
    compiled_module,
    drop_empty_states,
    empty_states,
    overlaps_with_ddp,
    parameter_names,
)

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer

# Values that torch.load(weights_only=True) does not accept, or not as they were, are saved as a dict with this key.
_MARK = "slurmtrain"
_DEVICE, _GENERATOR, _ARRAY = "tensor on a device", "numpy.random.RandomState", "numpy.ndarray"


class Attributes:
    """Saves and restores the attributes of an object."""

    def __init__(self, name: str, obj: object) -> None:
        """``name``: what the script calls ``obj``. Raises TypeError if its attributes cannot be saved."""
        self._name = name
        self._object = obj
        if not self.state_dict():
            raise TypeError(
                f"{name!r} ({type(obj).__name__}) cannot be saved: it has neither state_dict() and load_state_dict() "
                "nor attributes"
            )

    def state_dict(self) -> dict[str, Any]:
        """The attributes as plain values. Raises TypeError if one cannot be saved."""
        attributes = self._object.__getstate__() if _tells_its_state(self._object) else None
        if not isinstance(attributes, dict):
            slots = [name for each in type(self._object).__mro__ for name in getattr(each, "__slots__", ())]
            attributes = {
                **getattr(self._object, "__dict__", {}),
                **{name: getattr(self._object, name) for name in slots if hasattr(self._object, name)},
            }
        return {
            name: self._plain(f".{name}", value)
            for name, value in attributes.items()
            if not isinstance(value, dist.ProcessGroup)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes to a ``state`` that :meth:`state_dict` returned."""
        values = {name: _restored_value(value) for name, value in state.items()}
        if _tells_its_state(self._object) and hasattr(self._object, "__setstate__"):
            self._object.__setstate__(values)
            return
        for name, value in values.items():
            if not isinstance(getattr(self._object, name, None), dist.ProcessGroup):
                setattr(self._object, name, value)
        hook: Any = self._object
        # A restored PowerSGDState compresses nothing in its first step: its errors belong to buckets of gradients.
        # Until its first backward pass, DistributedDataParallel has other buckets than it had when these were saved, or
        # has the parameters in another order in them.
        has_errors = hasattr(hook, "start_powerSGD_iter") and (hook.error_dict or hook.p_memory_dict)
        if has_errors and hook.iter >= hook.start_powerSGD_iter:
            hook.iter = hook.start_powerSGD_iter - 1

    def _plain(self, place: str, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            tensor = value.detach()
            return (
                tensor if tensor.device.type == "cpu" else {_MARK: _DEVICE, "type": tensor.device.type, "value": tensor}
            )
        if isinstance(value, list | tuple):
            return type(value)(self._plain(f"{place}[{index}]", item) for index, item in enumerate(value))
        if isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
            return {key: self._plain(f"{place}[{key!r}]", item) for key, item in value.items()}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind == "numpy.random.mtrand.RandomState":
            return {_MARK: _GENERATOR, "value": rng.numpy_state(value)}
        if kind == "numpy.ndarray" and value.dtype.kind in "biufc":
            return {_MARK: _ARRAY, "value": torch.from_numpy(value.copy())}
        raise TypeError(
            f"{self._name!r} ({type(self._object).__name__}) has no state_dict() and load_state_dict(), and its "
            f"attribute {place[1:]} ({type(value).__name__}) is neither a tensor nor a plain value"
        )


def _tells_its_state(obj: object) -> bool:
    """Whether the object has a method for that; torch's own warn about process groups each time."""
    return type(obj).__getstate__ is not object.__getstate__ and not type(obj).__module__.startswith("torch.")


def _restored_value(plain: Any) -> Any:
    """What was saved as ``plain``."""
    if isinstance(plain, list | tuple):
        return type(plain)(map(_restored_value, plain))
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(_MARK)
    if kind == _DEVICE:
        return plain["value"].to(plain["type"])
    if kind == _ARRAY:
        return plain["value"].numpy()
    if kind == _GENERATOR:
        import numpy

        generator = numpy.random.RandomState()
        rng.set_numpy_state(generator, plain["value"])
        return generator
    return {key: _restored_value(value) for key, value in plain.items()}


# Importing it compiles a dozen optimizers: only scripts that use it have done so.
_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_zero(optimizer: object) -> TypeGuard[ZeroRedundancyOptimizer]:
    """Whether this is a ZeroRedundancyOptimizer."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def check_zero(name: str, optimizer: ZeroRedundancyOptimizer, *, registered: bool) -> None:
    """Raise TypeError if the state of the ``optimizer`` called ``name`` cannot be saved.

    ``registered``: whether all of its parameters are in registered modules.
    """
    if not registered:
        raise TypeError(f"{name!r} (ZeroRedundancyOptimizer) needs names for its parameters: register the module too")
    if overlaps_with_ddp(optimizer):
        raise TypeError(
            f"{name!r} (ZeroRedundancyOptimizer) cannot be restored with overlap_with_ddp=True, because "
            "DistributedDataParallel then creates its state only after a few steps; leave that argument out"
        )


def zero_has_begun(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether it has a state, as far as this rank has any of its parameters."""
    return bool(optimizer.optim.state) or not any(group["params"] for group in optimizer.optim.param_groups)


def zero_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The options of the zero_groups of all parameters, with the names of these."""
    return [
        {**group_options(group), "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def zero_own_names(optimizer: ZeroRedundancyOptimizer, names: Mapping[int, str]) -> Iterable[str]:
    """The names of the parameters of this rank's share."""
    return (names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"])


def load_zero(
    optimizer: ZeroRedundancyOptimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
) -> None:
    """Restore the ``optimizer``, whose parameters have these ``names``, by id.

    It gets the ``saved`` zero_states, by parameter, and the options of ``saved_groups``.
    Raises CheckpointError if a group of the script's is not in ``saved_groups``.
    """
    for group, inner in zip(optimizer.param_groups, optimizer.optim.param_groups, strict=True):
        saved_options = find_options((names[id(parameter)] for parameter in group["params"]), saved_groups)
        if saved_options is None:
            raise CheckpointError("it has no parameter of one of the optimizer's zero_groups")
        group.update(saved_options)
        inner.update(saved_options)
    # The positions of parameters in the state_dict of an optimizer: in their order in its zero_groups.
    own = [names[id(parameter)] for group in optimizer.optim.param_groups for parameter in group["params"]]
    plain = optimizer.optim.state_dict()
    plain["state"] = {position: dict(saved[name]) for position, name in enumerate(own) if name in saved}
    optimizer.optim.load_state_dict(plain)


# Objects that are the same on all ranks, like modules: only rank 0's state is saved.
_SHARED = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.grad_scaler.GradScaler)
MODULE, OPTIMIZER, OBJECT = "module", "optimizer", "object"


class Stateful(Protocol):
    """An object that can be checkpointed: one of torch's, or any other with the same two methods.

    An object without them is saved by its attributes (``attributes``).
    """

    def state_dict(self) -> Any:
        """The state, as data that ``torch.load(weights_only=True)`` accepts."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a ``state`` that :meth:`state_dict` returned."""


@dataclass(slots=True)
class State:
    """The state of all registered objects.

    ``tensors``: the tensors of modules and optimizers, by name; not copies. ``shared``: other state that is the same on
    all ranks, including values of modules and optimizers that are not dense tensors. ``own``: each rank's own state.
    The last two are keyed by the name of the object.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


class Objects:
    """All registered objects, by the names that the script gave them."""

    def __init__(self, objects: Mapping[str, object], additions: Collection[str] = ()) -> None:
        """Raises TypeError for an object without a state that can be saved.

        ``additions``: objects that a checkpoint may lack; they then stay as they are.
        """
        self._all: dict[str, Stateful] = {}
        self.additions = frozenset(additions)
        for name, obj in objects.items():
            inner = _unwrapped(obj)
            has_methods = hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict")
            self._all[name] = inner if has_methods else Attributes(name, inner)
        # One module that has all of them, so that names of tensors begin with what the script calls each.
        self._modules = nn.Module()
        self._known_names: dict[int, str] = {}
        for name, obj in self._all.items():
            if isinstance(obj, nn.Module):
                try:
                    self._modules.add_module(name, obj)
                except KeyError as error:
                    raise TypeError(f"a module cannot be registered as {name!r}; choose another name") from error
        parameters = {id(parameter) for parameter in self._modules.parameters()}
        # Optimizers whose states can be named after registered parameters. Not LBFGS: its state is not kept per
        # parameter, and it makes no step without a closure.
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        for name, obj in self._all.items():
            if isinstance(obj, torch.optim.Optimizer) and not isinstance(obj, torch.optim.LBFGS):
                ids = [id(parameter) for group in obj.param_groups for parameter in group["params"]]
                if ids and parameters.issuperset(ids):
                    self._optimizers[name] = obj
        for name, obj in self._all.items():
            if is_zero(obj):
                check_zero(name, obj, registered=name in self._optimizers)

    def kinds(self) -> dict[str, dict[str, Any]]:
        """The kind of each object, and whether its state is saved per rank, for the manifest."""
        return {name: {"kind": self._kind(name), "per_rank": self.is_own(name)} for name in self._all}

    def _kind(self, name: str) -> str:
        if isinstance(self._all[name], nn.Module):
            return MODULE
        return OPTIMIZER if name in self._optimizers else OBJECT

    def is_own(self, name: str) -> bool:
        """Whether each rank has its own state of this object."""
        return not isinstance(self._all[name], (nn.Module, *_SHARED))

    def is_plain(self, name: str) -> bool:
        """Whether this is neither a module nor an optimizer of registered modules."""
        return self._kind(name) == OBJECT

    def have_begun(self) -> bool:
        """Whether all optimizers have a state, as they do after a step; a plain SGD never has one."""
        return all(
            zero_has_begun(optimizer) if is_zero(optimizer) else optimizer.state
            for optimizer in self._optimizers.values()
        )

    def parameters(self) -> set[str]:
        """The names of the tensors that are parameters of modules."""
        return set(self._names().values())

    def _names(self) -> dict[int, str]:
        """The names of all parameters of modules, by id; looked up again only if there are others."""
        if self._known_names.keys() != {id(parameter) for parameter in self._modules.parameters()}:
            self._known_names = parameter_names(self._modules)
        return self._known_names

    def optional(self) -> tuple[str, ...]:
        """Prefixes of the names of tensors that exist only after an optimizer has made a step."""
        return tuple(f"{name}.state." for name in self._optimizers)

    def modules(self) -> Objects:
        """The modules alone."""
        return Objects({name: obj for name, obj in self._all.items() if isinstance(obj, nn.Module)})

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __getitem__(self, name: str) -> Stateful:
        return self._all[name]

    # --- taking -----------------------------------------------------------------------------------------------------

    def capture(self) -> State:
        """The current state. Call it on all ranks. Raises whatever a state_dict raises."""
        state = State()
        self._capture_modules(state)
        for name, optimizer in self._optimizers.items():
            names = self._names()
            if is_zero(optimizer):
                state.shared[name] = {GROUPS: zero_groups(optimizer, names)}
                for parameter, values in optimizer.optim.state.items():
                    self._put_state(state, name, names[id(parameter)], values)
            elif optimizer.state:
                self._capture_state(state, name, optimizer)
            else:
                refuse_lost(name, optimizer, {})
                # To create the state, torch would make an optimizer step, which would then count as one.
                state.shared[name] = {OPTIONS: zero_groups(optimizer, names)}
        for name, obj in self._all.items():
            if self._kind(name) == OBJECT:
                value = obj.state_dict()
                _refuse_sharded(name, value)
                refuse_lost(name, obj, value)
                (state.own if self.is_own(name) else state.shared)[name] = value
        return state

    def template(self, shared: Mapping[str, Any], index: Index) -> dict[str, torch.Tensor]:
        """Tensors to load into: the tensors in use, or new ones like the tensors in the ``index``.

        Optimizers get a state for this if ``shared`` says one was saved.
        """
        state = State()
        self._capture_modules(state)
        for name, optimizer in self._optimizers.items():
            if OPTIONS in shared[name]:
                continue
            if is_zero(optimizer):
                # The states of this rank's share of the parameters.
                own = set(zero_own_names(optimizer, self._names()))
                start = f"{name}.state."
                states = (each for each in index.shapes() if each.startswith(start))
                state.tensors.update(
                    index.empty(each for each in states if each.removeprefix(start).rpartition(".")[0] in own)
                )
            else:
                self._capture_state(state, name, optimizer)
        return state.tensors

    def _capture_modules(self, state: State) -> None:
        if any(self._modules.children()):
            for name, value in get_model_state_dict(self._modules).items():
                self._put(state, name.partition(".")[0], name, value)

    def _capture_state(self, state: State, name: str, optimizer: torch.optim.Optimizer) -> None:
        with own_methods(optimizer):
            captured: Any = get_optimizer_state_dict(self._modules, acting(optimizer))
        part = state.shared.setdefault(name, {})
        part[GROUPS] = captured["param_groups"]
        if more := more_of(optimizer):
            part[MORE] = more
        for parameter, values in captured["state"].items():
            self._put_state(state, name, parameter, values)

    def _put_state(self, state: State, name: str, parameter: str, values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            self._put(state, name, f"{name}.state.{parameter}.{key}", value)

    def _put(self, state: State, owner: str, name: str, value: Any) -> None:
        if isinstance(value, DTensor) or can_be_framed(value):
            state.tensors[name] = value
        else:
            _refuse_sharded(name, value)
            state.shared.setdefault(owner, {}).setdefault(OTHERS, {})[name] = value

    # --- putting back -----------------------------------------------------------------------------------------------

    def load(self, tensors: Mapping[str, Any], shared: Mapping[str, Any], but: Collection[str] = ()) -> None:
        """Load ``tensors`` and ``shared`` state into modules, optimizers and shared objects, ``but`` not into these.

        Call it on all ranks.
        """
        values = dict(tensors)
        for state_dict in shared.values():
            if isinstance(state_dict, dict):
                values.update(state_dict.get(OTHERS, {}))
        if any(self._modules.children()):
            # Of split modules, other ranks have other parts.
            own = get_model_state_dict(self._modules).keys()
            parameters = {name: value for name, value in values.items() if name in own}
            set_model_state_dict(self._modules, parameters, options=StateDictOptions(strict=True))
        for name, optimizer in self._optimizers.items():
            self._load_optimizer(name, optimizer, values, shared[name])
        for name, obj in self._all.items():
            if name in self.additions and name not in shared:
                continue
            if self.is_plain(name) and not self.is_own(name) and name not in but:
                obj.load_state_dict(shared[name])

    def _load_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, values: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> None:
        if OPTIONS in shared:
            # It has no state. By parameter or, in older checkpoints, by position.
            names, groups, saved = self._names(), optimizer.param_groups, shared[OPTIONS]
            news = [find_options((names[id(parameter)] for parameter in group["params"]), saved) for group in groups]
            if None in news and len(saved) != len(groups):
                raise CheckpointError(
                    f"{name!r} has {len(saved)} groups of parameters in the checkpoint, but {len(groups)} in the script"
                )
            for position, group in enumerate(groups):
                group.update(news[position] or group_options(saved[position]))
        elif is_zero(optimizer):
            load_zero(optimizer, self._names(), _by_parameter(name, values), shared[GROUPS])
        else:
            names = self._names()
            # Only for the CheckpointError: torch takes the options from the saved groups itself.
            for group in optimizer.param_groups:
                find_options((names[id(parameter)] for parameter in group["params"]), shared[GROUPS])
            states = {**empty_states(shared[GROUPS]), **_by_parameter(name, values)}
            # Not strict, since parameters that were never used have no state.
            lenient = StateDictOptions(strict=False)
            state: Any = {"state": states, "param_groups": shared[GROUPS]}
            with own_methods(optimizer):
                set_optimizer_state_dict(self._modules, acting(optimizer), state, options=lenient)
            # After the states of parameters, which are part of its state_dict() by now.
            if shared.get(MORE):
                optimizer.load_state_dict({**optimizer.state_dict(), **shared[MORE]})
            drop_empty_states(optimizer)


def _by_parameter(optimizer: str, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """An optimizer's state by parameter. Names of parameters may contain dots, names of states do not."""
    states: dict[str, dict[str, Any]] = {}
    start = f"{optimizer}.state."
    for name, value in values.items():
        if name.startswith(start):
            parameter, _, key = name.removeprefix(start).rpartition(".")
            states.setdefault(parameter, {})[key] = value
    return states


def acting(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose state this is: PostLocalSGDOptimizer has another optimizer's, and a step() of its own."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) and inner.state is optimizer.state else optimizer


@contextlib.contextmanager
def own_methods(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context without what has replaced methods of an ``optimizer``: torch creates its state by making a step."""
    # Such as what Gradients.attach() has put there, which skips steps, or refuses them without gradients.
    attributes = vars(optimizer)
    replaced: dict[str, Any] = {name: attributes.pop(name) for name in ("step", "zero_grad") if name in attributes}
    try:
        yield
    finally:
        attributes.update(replaced)


def more_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an ``optimizer`` apart from its parameters' states, such as PostLocalSGDOptimizer's step."""
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def refuse_lost(name: str, obj: object, state: Any) -> None:
    """Raises CheckpointError if the ``state`` of ``obj``, called ``name``, is empty though it visibly has one.

    An optimizer that keeps its state in another one inside it is such an object, or one with tensors.
    """
    if state and not (isinstance(state, Mapping) and state.keys() == {"state", "param_groups"} and not state["state"]):
        return
    for attribute, value in getattr(obj, "__dict__", {}).items():
        inner = isinstance(value, torch.optim.Optimizer) and value.state
        if inner or (_has_tensors(value) and not isinstance(obj, torch.optim.Optimizer)):
            raise CheckpointError(
                f"{name!r} ({type(obj).__name__}) has an empty state, although its attribute {attribute!r} "
                f"({type(value).__name__}) has one, which would be lost; register that object"
            )


def _has_tensors(value: object) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values)


def differences(
    script: Mapping[str, Iterable[int]], saved: Mapping[str, Iterable[int]], optional: tuple[str, ...] = ()
) -> list[str]:
    """How the ``saved`` tensors differ from the tensors of the ``script``, both given as shapes by name.

    Names that begin with one of ``optional`` may be missing on either side, since optimizers create states when used.
    """
    problems = [f"it has no {name!r}" for name in script if name not in saved and not name.startswith(optional)]
    problems += [
        f"{name!r} is not in the script" for name in saved if name not in script and not name.startswith(optional)
    ]
    problems += [
        f"{name!r} has shape {_dims(saved[name])} in the checkpoint, but {_dims(shape)} in the script"
        for name, shape in script.items()
        if name in saved and tuple(saved[name]) != tuple(shape)
    ]
    return problems


def _dims(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "()"


def _unwrapped(obj: Any) -> Any:
    """The module inside DistributedDataParallel and others like it: a checkpoint must fit with and without them.

    Modules in a dict, such as the stages of a pipeline that a rank has, become one module.
    """
    # Wrappers may be nested, such as a compiled module in DistributedDataParallel.
    while True:
        if isinstance(obj, dict) and obj and all(isinstance(module, nn.Module) for module in obj.values()):
            return nn.ModuleDict({str(key): module for key, module in obj.items()})
        if isinstance(obj, nn.parallel.DistributedDataParallel | nn.DataParallel):
            obj = obj.module
        elif (inner := compiled_module(obj)) is not None:
            obj = inner
        else:
            return obj


def _refuse_sharded(name: str, state: Any) -> None:
    """Raises CheckpointError if a state that is saved as a whole contains a tensor that is sharded over ranks."""
    if isinstance(state, Mapping):
        for value in state.values():
            _refuse_sharded(name, value)
    elif isinstance(state, list | tuple):
        for value in state:
            _refuse_sharded(name, value)
    elif isinstance(state, DTensor):
        raise CheckpointError(
            f"{name!r} has a tensor that is sharded over ranks (DTensor), which only modules, and optimizers of "
            "registered modules, may have; register the module too"
        )
