"""The state of an object that has no ``state_dict``, such as the state of a communication hook: its attributes.

They are saved as plain values and tensors, so that restoring executes nothing from a checkpoint, and set on the object
that the script has created. Process groups are left out: the script creates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from slurmtrain.runtime.checkpoint import rng

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
                f"{name!r} ({type(obj).__name__}) has no state_dict() and load_state_dict(), and no attributes"
            )

    def state_dict(self) -> dict[str, Any]:
        """The attributes as plain values. Raises TypeError if one cannot be saved."""
        attributes = _attributes(self._object)
        return {
            name: self._plain(f".{name}", value)
            for name, value in attributes.items()
            if not isinstance(value, dist.ProcessGroup)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the attributes to a ``state`` that :meth:`state_dict` returned."""
        values = {name: _value(value) for name, value in state.items()}
        if _tells_its_state(self._object) and hasattr(self._object, "__setstate__"):
            self._object.__setstate__(values)
            return
        for name, value in values.items():
            if not isinstance(getattr(self._object, name, None), dist.ProcessGroup):
                setattr(self._object, name, value)
        if hasattr(self._object, "start_powerSGD_iter"):
            _skip_a_step(self._object)

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
        marked = _marked(value)
        if marked is None:
            kind = type(self._object).__name__
            raise TypeError(
                f"{self._name!r} ({kind}) has no state_dict() and load_state_dict(), and its attribute {place[1:]} "
                f"({type(value).__name__}) is neither a tensor nor a plain value"
            )
        return marked


def _attributes(obj: object) -> dict[str, Any]:
    """An object's attributes: the state that it returns itself, if that is a dict; else all that are set."""
    state = obj.__getstate__() if _tells_its_state(obj) else None
    if isinstance(state, dict):
        return state
    slots = [name for each in type(obj).__mro__ for name in getattr(each, "__slots__", ())]
    return {**getattr(obj, "__dict__", {}), **{name: getattr(obj, name) for name in slots if hasattr(obj, name)}}


def _tells_its_state(obj: object) -> bool:
    """Whether the object has a method for that; torch's own warn about process groups each time."""
    return type(obj).__getstate__ is not object.__getstate__ and not type(obj).__module__.startswith("torch.")


def _marked(value: Any) -> dict[str, Any] | None:
    """A generator or an array of NumPy as plain values; None for anything else."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "numpy.random.mtrand.RandomState":
        return {_MARK: _GENERATOR, "value": rng.numpy_state(value)}
    if kind == "numpy.ndarray" and value.dtype.kind in "biufc":
        return {_MARK: _ARRAY, "value": torch.from_numpy(value.copy())}
    return None


def _value(plain: Any) -> Any:
    """What was saved as ``plain``."""
    if isinstance(plain, list | tuple):
        return type(plain)(map(_value, plain))
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
    return {key: _value(value) for key, value in plain.items()}


def _skip_a_step(state: Any) -> None:
    """Let a restored PowerSGDState compress nothing in its first step.

    Its errors belong to buckets of gradients. Until its first backward pass, DistributedDataParallel has other buckets
    than it had when these were saved, or has the parameters in another order in them.
    """
    if state.iter >= state.start_powerSGD_iter and (state.error_dict or state.p_memory_dict):
        state.iter = state.start_powerSGD_iter - 1
