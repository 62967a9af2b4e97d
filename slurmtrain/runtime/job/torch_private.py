"""The private parts of torch that slurmtrain uses, which torch may change: only in this file.

Known to work with torch 2.13, and torchdata 0.11. Check this file first when upgrading torch. What torch documents as
extension points (``torch.distributed.elastic``, the planners, readers and writers of ``torch.distributed.checkpoint``,
hooks) is used where it is needed.

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

# The modules of the functions that data-loader workers run: torch's and torchdata's.
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
    """Import now what torch's checkpoints import on first use, most of a second in the middle of training."""
    import_module("torch._dynamo")


# --- the index of a checkpoint ----------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> StorageInfo:
    """An entry of a checkpoint's index: ``length`` bytes from ``offset``, in the file at this relative ``path``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length)


def index_classes() -> tuple[Any, ...]:
    """The private classes whose instances are in an index, which is a pickle."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return (_StorageInfo, memory_formats())


def memory_formats() -> Any:
    """The enumeration of memory formats, whose members older versions of Python pickle by getattr."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


def find_in_index(module: str, name: str) -> Any:
    """The function with which an index looks up tensor layouts, if ``module`` and ``name`` are its; else None."""
    return torch.serialization._get_layout if (module, name) == ("torch.serialization", "_get_layout") else None
