"""The parts of torch used by slurmtrain that torch may change without notice: only in this file.

Tests run with torch OLDEST to NEWEST, and torchdata 0.11. Check this file first when a new torch comes out:
``scripts/test --torch VERSION``. A test (``test_runtime_torch_private``) ensures that no other module uses a name of
torch that begins with an underscore, or that its module does not list in ``__all__``.

What torch documents as extension points is used where it is needed: the planners, readers and writers of
``torch.distributed.checkpoint``, hooks. Among them is a method of ParallelStyle that begins with an underscore
(STYLE_EXTENSION_POINT): only a subclass can override it, so its name also occurs in ``plugins.strategies.tensor``.

This module is imported where torch is not, so each function imports its part of torch itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmtrain.errors import NotAvailable
from slurmtrain.system.owned_files import read_readable

if TYPE_CHECKING:
    from torch import Tensor, device, nn
    from torch.amp import GradScaler
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.optim import Optimizer

    StorageInfo = _StorageInfo

# The versions of torch that slurmtrain is tested with. Older ones lack features that it needs.
OLDEST = (2, 9)
NEWEST = (2, 15)
# The modules of the functions that data-loader workers run: torch's and torchdata's.
LOADER_WORKERS = frozenset(("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker"))
# The versions of CUDA for which there are packages of NCCL.
_CUDA_MAJORS = (13, 12, 11)
# The method of torch.distributed.tensor.parallel.ParallelStyle that applies a style, which is abstract.
STYLE_EXTENSION_POINT = "_apply"


# --- versions ---------------------------------------------------------------------------------------------------------


def installed_version() -> str | None:
    """The version of torch that is installed for this Python, such as ``2.13.0+cpu``; None if there is none."""
    return _version_of("torch")


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_versions() -> dict[str, str | None]:
    """The versions of ``torch``, and of its ``cuda`` and ``nccl``; None for a missing one.

    Torch is not imported, which takes seconds: one of its files names the CUDA that it was built for, and NCCL is a
    package. A torch that contains NCCL, as conda's does, tells its version only to those who import it.
    """
    nccl = (_version_of(f"nvidia-nccl-cu{major}") for major in _CUDA_MAJORS)
    torch = find_spec("torch")
    return {
        "torch": installed_version(),
        "cuda": cuda_of(Path(torch.origin).parent) if torch is not None and torch.origin is not None else None,
        "nccl": next((version for version in nccl if version), None),
    }


def cuda_of(torch: Path) -> str | None:
    """The version of CUDA that the package ``torch`` in this directory was built for; None if it was built without."""
    with suppress(OSError):
        text = read_readable(torch / "version.py").decode(errors="replace")
        built_for = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
        return built_for[1] if built_for else None
    return None


def release_of(version: str) -> tuple[int, int] | None:
    """The first two numbers of a ``version``; None if it does not begin with them."""
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check_version(version: str | None = None) -> None:
    """Raise NotAvailable if this ``version`` of torch, by default the installed one, is older than OLDEST."""
    version = version or installed_version()
    release = release_of(version) if version is not None else None
    if release is not None and release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NotAvailable(f"slurmtrain needs torch {oldest} or newer, but torch {version} is installed: upgrade torch")


# --- modules ----------------------------------------------------------------------------------------------------------


def compiled_module(module: object) -> nn.Module | None:
    """The module inside what ``torch.compile(module)`` returns; None for anything else."""
    from torch import nn

    original = getattr(module, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else None


def compiles_hooks(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, which compiles hooks too; what torch.compile() returns does not."""
    return getattr(module, "_compiled_call_impl", None) is not None


def parameter_names(module: nn.Module) -> dict[int, str]:
    """The names that torch's checkpoints give the parameters of a module, whatever wraps its parts; by id."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return {id(parameter): min(_get_fqns(module, name)) for name, parameter in module.named_parameters()}


def overlaps_with_ddp(optimizer: Any) -> bool:
    """Whether a ZeroRedundancyOptimizer makes its steps in a communication hook."""
    return bool(optimizer._overlap_with_ddp)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to the values in a ``tree``: lists, dicts and so on, also types that libraries register."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, tree)


def import_checkpoints() -> None:
    """Import torch's checkpoints, and what these import on first use: most of a second in the middle of training.

    That is torch's compiler, which its first optimizer or DistributedDataParallel also imports. Call this before the
    process group is joined: later, it would keep a reference to the group, whose threads would outlive the group.
    """
    import_module("torch.distributed.checkpoint")
    import_module("torch._dynamo")


# --- communication ----------------------------------------------------------------------------------------------------


def collectives_started(besides: ProcessGroup | None) -> int | None:
    """How many collectives this process has started in its groups, ``besides`` one; None if a backend counts none."""
    from torch.distributed import distributed_c10d

    count = 0
    for group in list(distributed_c10d._world.pg_map):
        if group is besides:
            continue
        try:
            # NCCL counts collectives of GPUs, gloo collectives of CPUs and, unlike NCCL, also messages from one rank to
            # another.
            backends: list[Any] = [group._get_backend(device) for device in group._device_types]
            count += sum(backend._get_sequence_number_for_group() for backend in backends)
        except (RuntimeError, AttributeError):
            return None
    return count


# --- the profiler -----------------------------------------------------------------------------------------------------


class RecordedEvent(NamedTuple):
    """What torch's profiler has recorded: an operator, a kernel, or a range that a program has marked.

    ``on_gpu``: whether it is the GPU's. ``is_range``: whether it is such a range, which contains others. Times are in
    nanoseconds.
    """

    name: str
    begin_ns: int
    duration_ns: int
    on_gpu: bool = False
    is_range: bool = False


def recorded_events(profile: Any) -> list[RecordedEvent]:
    """What a ``profile`` of torch that was stopped has recorded: its own ``events()`` takes 20 times as long."""
    from torch.autograd import DeviceType

    return [
        RecordedEvent(
            event.name(),
            event.start_ns(),
            event.duration_ns(),
            event.device_type() != DeviceType.CPU,
            bool(event.is_user_annotation()),
        )
        for event in profile.profiler.kineto_results.events()
    ]


def is_profiled() -> bool:
    """Whether torch's profiler records this thread already: there can be only one."""
    from torch import autograd

    return bool(autograd._profiler_enabled())


# --- optimizers -------------------------------------------------------------------------------------------------------


def empty_states(groups: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What set_optimizer_state_dict needs instead of nothing for parameters without a state: an empty one each.

    ``groups``: the saved groups of parameters, by name. torch 2.9 needs it, later versions do not.
    """
    return {name: {} for group in groups for name in group["params"]}


def drop_empty_states(optimizer: Optimizer) -> None:
    """Undo what :func:`empty_states` left in an optimizer."""
    for parameter in [parameter for parameter, state in optimizer.state.items() if not state]:
        del optimizer.state[parameter]


def infinities(scaler: GradScaler, optimizer: Optimizer) -> dict[device, Tensor]:
    """By device, 1 if gradients of the ``optimizer`` are not finite, as ``unscale_`` of ``scaler`` has noted them.

    What is changed in the dict counts.
    """
    flags: dict[device, Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return flags


def scale_of(scaler: GradScaler) -> Tensor:
    """The scale of a ``scaler`` that has scaled something, where it computes: reading it does not wait."""
    assert scaler._scale is not None
    return scaler._scale


# --- the index of a checkpoint ----------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> StorageInfo:
    """An entry of a checkpoint's index: ``length`` bytes from ``offset``, in the file at this relative ``path``."""
    return storage_info_class()(path, offset, length)


def storage_info_class() -> type[StorageInfo]:
    """The class of the entries of a checkpoint's index."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def index_version() -> dict[str, Any]:
    """The field of an index that names the version of its format, as torch's own writer fills it in."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

    return {"version": CURRENT_DCP_VERSION}


def memory_formats() -> Any:
    """The enumeration of memory formats, whose members older versions of Python pickle by getattr."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING
