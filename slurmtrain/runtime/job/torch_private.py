"""What slurmtrain uses of torch that torch does not promise to keep: here, and nowhere else.

Known to work with torch 2.13, with torchdata 0.11 beside it. Whoever takes in a newer torch looks through this file
first. What torch names as points of extension (``torch.distributed.elastic``, the planners, readers and writers of
``torch.distributed.checkpoint``, hooks) is used where it is needed.

Modules of torch that take long to import are imported by the functions that need them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    StorageInfo = _StorageInfo

# The modules of the functions that workers of data loaders run: torch's, and torchdata's.
LOADER_WORKERS = frozenset(("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker"))


# --- modules ----------------------------------------------------------------------------------------------------------


def compiled_module(module: object) -> nn.Module | None:
    """The module inside what ``torch.compile(module)`` returns; None for anything else."""
    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


def compiles_hooks(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, which compiles hooks too; what torch.compile() returns does not."""
    return getattr(module, "_compiled_call_impl", None) is not None


def import_compiler() -> None:
    """Import what torch's checkpoints import when they are first used, most of a second in the middle of training."""
    import_module("torch._dynamo")


# --- the index of a checkpoint ----------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> StorageInfo:
    """An entry of a checkpoint's index: ``length`` bytes from ``offset`` on, of the file at this relative ``path``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def index_classes() -> tuple[Any, ...]:
    """The private classes whose instances an index, which is a pickle, consists of."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return (_StorageInfo, memory_formats())


def memory_formats() -> Any:
    """The enumeration of formats of memory, whose members older versions of Python pickle by getattr."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


def find_in_index(module: str, name: str) -> Any:
    """The function that an index looks up layouts of tensors with, if this is its ``name`` in its ``module``."""
    return torch.serialization._get_layout if (module, name) == ("torch.serialization", "_get_layout") else None
