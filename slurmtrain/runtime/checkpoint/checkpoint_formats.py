"""What a format can say about a checkpoint, and the formats that no trainer has invented."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from slurmtrain.errors import CheckpointError
from slurmtrain.model.experiment.checkpoint import step_in_name
from slurmtrain.runtime.checkpoint.checkpoint_files import hash_file
from slurmtrain.runtime.checkpoint.untrusted_files import (
    METADATA,
    STEP_NAMES,
    TORCH_SUFFIXES,
    Contents,
    FileTree,
    as_step,
    file_problem,
    is_archive,
    member,
    read_archive,
    read_header,
    read_json_file,
    read_plain,
    step_of,
)
from slurmtrain.system.owned_files import open_readable, read_readable


class Format(ABC):
    """One format. All methods but :meth:`contents` work without torch; methods that look into files raise OSError."""

    NAME: ClassVar[str]
    """Its name in ``checkpoint.format``."""

    @abstractmethod
    def recognizes(self, tree: FileTree) -> bool:
        """Whether these files are of this format, complete or not."""

    def problem(self, tree: FileTree, ranks: int) -> str | None:
        """Why it is not complete, as a phrase; None if it is. ``ranks``: as for :meth:`problems`."""
        # The first one ends the search: later ones would have more files read.
        return next(filter(None, self.problems(tree, ranks)), None)

    @abstractmethod
    def problems(self, tree: FileTree, ranks: int) -> Iterator[str | None]:
        """Why it is not complete, as phrases; the first one counts.

        ``ranks``: the least number of ranks that have saved it, for formats with a file for each rank.
        """

    def step(self, _tree: FileTree) -> int | None:
        """The step that a complete checkpoint holds; None if it holds none. Raises CheckpointError."""
        return None

    def checkpoints_within(self, _tree: FileTree) -> list[str] | None:
        """The names of folders that are a checkpoint each; None if the files themselves are one."""
        return None

    def step_in_name(self, name: str) -> int | None:
        """The step in the ``name`` of a checkpoint; None if there is none."""
        return step_in_name(name)

    def optional_files(self, _tree: FileTree) -> set[str]:
        """Names of files that not every script saves, but each of its checkpoints then has."""
        return set()

    @abstractmethod
    def contents(self, tree: FileTree) -> Contents:
        """What training continues from, except random number states. Leaves out paths, times and settings.

        Raises CheckpointError.
        """

    def modules(self, _names: Collection[str]) -> list[str]:
        """The prefixes of models' weights among the names of its contents, without the dot at their end."""
        return []


def prefixes(names: Collection[str], candidates: Collection[str]) -> list[str]:
    """The candidates that are followed by a dot in one of the names."""
    return [each for each in candidates if any(name.startswith(f"{each}.") for name in names)]


# Keys under which scripts usually save a model's weights.
_TORCH_MODULES = ("model", "model_state_dict", "state_dict", "module", "net", "network", "weights")


class TorchFiles(Format):
    """What a script wrote with ``torch.save``: usually a dictionary with the states of its objects."""

    NAME = "torch"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether there is an archive, or a file with a usual ending."""
        return bool(_torch_files(tree)) or (not tree.is_directory and is_archive(tree.path))

    def problems(self, tree: FileTree, _ranks: int) -> Iterator[str | None]:
        """Why one of its files is not whole."""
        if tree.is_directory:
            yield tree.unfinished_problem()
        names = _torch_files(tree) if tree.is_directory else [""]
        yield None if names else "it has no file written by torch.save"
        for name in names:
            # An ending of a name does not prove that torch.save wrote the file.
            yield file_problem(tree, name, by_torch=False)

    def step(self, tree: FileTree) -> int | None:
        """The number that the first file with one has under ``global_step``, ``step`` or the like."""
        paths = [tree.path / name for name in _torch_files(tree) or [""]]
        steps = (step_of(read_archive(path, path.name)) for path in paths if path.is_file() and is_archive(path))
        return next((step for step in steps if step is not None), None)

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors and values by dotted names, which in a directory begin with the file's name."""
        # Imported here: it imports torch.
        from slurmtrain.runtime.checkpoint.torch_values import leaves, read_torch

        if not tree.is_directory:
            return leaves(read_torch(tree.path))
        return {
            name: read
            for file in _torch_files(tree)
            for name, read in leaves(read_torch(tree.path / file), file.rpartition(".")[0]).items()
        }

    def modules(self, names: Collection[str]) -> list[str]:
        """The parts that usually are weights."""
        return prefixes(names, _TORCH_MODULES)


def _torch_files(tree: FileTree) -> list[str]:
    if not tree.is_directory:
        return [""] if tree.path.name.endswith(TORCH_SUFFIXES) else []
    return sorted(name for name in tree.top if name.endswith(TORCH_SUFFIXES))


INDEX = ".metadata"
SHARD = ".distcp"
# The same in this format; torch's tutorial of it calls the state of a script 'app'.
_DCP_MODULES = ("model", "state_dict", "module", "app.model", "net")


class StoredItem(NamedTuple):
    """A tensor, a part of one, or a value: its name, its file, and its place there in bytes."""

    name: str
    file: str
    offset: int
    length: int


class DcpDirectory(Format):
    """What ``torch.distributed.checkpoint.save`` wrote."""

    NAME = "dcp"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether there is an index or a file of a rank."""
        return is_dcp(tree)

    def problems(self, tree: FileTree, _ranks: int) -> Iterator[str | None]:
        """Why the index, or a file that it names, is missing."""
        yield dcp_problem(tree)

    def step(self, tree: FileTree) -> int | None:
        """The whole number saved under ``global_step``, ``step`` or the like."""
        values = {item.name: item for item in read_items(tree)}
        for item in (values[name] for name in STEP_NAMES if name in values):
            # A tensor is an inert object here.
            if (step := as_step(read_archive(io.BytesIO(read_item(tree, item)), item.name))) is not None:
                return step
        return None

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors and values."""
        return dcp_contents(tree)

    def modules(self, names: Collection[str]) -> list[str]:
        """The parts that usually are weights."""
        return prefixes(names, _DCP_MODULES)


def is_dcp(tree: FileTree) -> bool:
    """Whether a directory has files of torch.distributed.checkpoint."""
    return tree.is_directory and (INDEX in tree.top or any(name.endswith(SHARD) for name in tree.top))


def dcp_problem(tree: FileTree) -> str | None:
    """Why the directory is not complete, as a phrase; None if it is. Raises OSError."""
    if INDEX not in tree.top:
        return f"it has no {INDEX}"
    try:
        items = read_items(tree)
    except CheckpointError as error:
        return f"{INDEX} is incomplete: {error}"
    ends: dict[str, int] = {}
    lengths: Counter[str] = Counter()
    for item in items:
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        lengths[item.file] += item.length
    if not ends:
        return f"{INDEX} names no file"
    for name, end in sorted(ends.items()):
        size = tree.sizes.get(name)
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} has {size} bytes, but {INDEX} says at least {end}"
        # Whoever reads all of them would read the file again and again.
        if size < lengths[name]:
            return f"{INDEX} lists parts of {name} that overlap"
    return None


def read_items(tree: FileTree) -> list[StoredItem]:
    """Where everything is, according to the index. Raises CheckpointError, OSError."""
    index = read_plain(read_readable(tree.path / INDEX), INDEX)
    stored = member(index, "storage_data")
    if not isinstance(stored, Mapping):
        raise CheckpointError(f"{INDEX} is not an index of torch.distributed.checkpoint")
    items = []
    for place, info in stored.items():
        name, file = member(place, "fqn"), member(info, "relative_path")
        offset, length = as_step(member(info, "offset")), as_step(member(info, "length"))
        if not isinstance(name, str) or not isinstance(file, str) or offset is None or length is None:
            raise CheckpointError(f"{INDEX} has an entry that this version cannot read")
        items.append(StoredItem(name, file, offset, length))
    return items


def read_item(tree: FileTree, item: StoredItem) -> bytes:
    """The bytes of an item. Raises OSError."""
    with open_readable(tree.path / item.file) as file:
        file.seek(item.offset)
        return file.read(item.length)


def dcp_contents(tree: FileTree) -> Contents:
    """The tensors and values of the directory. Raises CheckpointError, OSError."""
    from slurmtrain.runtime.checkpoint.torch_index import Index
    from slurmtrain.runtime.checkpoint.torch_values import leaves, read_torch

    index = Index(tree.path)
    shapes = index.shapes()
    contents: Contents = {name: partial(index.tensor, name) for name in shapes}
    for item in read_items(tree):
        if item.name not in shapes:
            contents |= leaves(read_torch(io.BytesIO(read_item(tree, item))), item.name)
    return contents


# Weights in several files, as transformers saves them: model-00001-of-00003.safetensors, with an index of them.
_INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")
# model.safetensors, and model_1.safetensors of a second model; the same for pytorch_model.bin and adapters.
_WHOLE = re.compile(r"(?:pytorch_|adapter_)?model(?:_fsdp)?(_\d+)?\.(?:safetensors|bin)")
# Weights that FSDP has sharded (FSDP_MODEL_NAME of accelerate): the format of torch.distributed.checkpoint.
FSDP_FOLDER = re.compile(r"pytorch_model_fsdp_\d+")


def weights_problem(tree: FileTree) -> str | None:
    """Why the weights are missing or not whole, as a phrase; None if they are there. Raises OSError."""
    if not has_weights(tree):
        return "the weights of its model are missing"
    if problem := sharding_problem(tree):
        return problem
    for name in sorted({*_whole_files(tree), *indexed_files(tree)}):
        if problem := file_problem(tree, name):
            return problem
    for folder in _fsdp_folders(tree):
        if problem := dcp_problem(tree.below(folder)):
            return f"in {folder}, {problem}"
    return None


def has_weights(tree: FileTree) -> bool:
    """Whether there is any file of weights."""
    sharded = any(_SHARD.fullmatch(name) for name in tree.top) or _indexes(tree)
    return bool(_whole_files(tree) or sharded or _fsdp_folders(tree))


def sharding_problem(tree: FileTree) -> str | None:
    """Why the index of sharded weights is missing, or does not name files; None if nothing is wrong. Raises OSError."""
    for start, ending in sorted({match.groups() for name in tree.top if (match := _SHARD.fullmatch(name))}):
        if f"{start}{ending}{_INDEX}" not in tree.top:
            return f"{start}{ending}{_INDEX} is missing"
    for index in _indexes(tree):
        if not _files_in(tree.path / index):
            return f"{index} is incomplete"
    return None


def indexed_files(tree: FileTree) -> set[str]:
    """The names of the files that indexes name. Raises OSError."""
    return {name for index in _indexes(tree) for name in _files_in(tree.path / index)}


def weights_contents(tree: FileTree) -> Contents:
    """All weights, under ``model.``, or ``model_1.`` and so on for further models. Raises CheckpointError, OSError."""
    contents: Contents = {}
    for name in sorted({*_whole_files(tree), *indexed_files(tree)}):
        match = _WHOLE.fullmatch(name)
        prefix = f"model{(match[1] if match else '') or ''}"
        contents |= {f"{prefix}.{each}": read for each, read in tensors_of(tree.path / name).items()}
    for folder in _fsdp_folders(tree):
        contents |= dcp_contents(tree.below(folder))
    return contents


def tensors_of(path: Path) -> Contents:
    """The tensors of one file by their names in it. Raises CheckpointError, OSError."""
    from slurmtrain.runtime.checkpoint.torch_values import leaves, read_safetensors, read_torch

    return read_safetensors(path) if path.name.endswith(".safetensors") else leaves(read_torch(path))


def _whole_files(tree: FileTree) -> list[str]:
    return sorted(name for name in tree.top if _WHOLE.fullmatch(name))


def _indexes(tree: FileTree) -> list[str]:
    return sorted(name for name in tree.top if name.endswith((f".safetensors{_INDEX}", f".bin{_INDEX}")))


def _fsdp_folders(tree: FileTree) -> list[str]:
    return sorted(folder for folder in tree.folders if FSDP_FOLDER.fullmatch(folder))


def _files_in(index: Path) -> set[str]:
    content = read_json_file(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    # A name that leads elsewhere is no name of a shard.
    return {Path(str(name)).name for name in files.values()} if isinstance(files, dict) else set()


_SAFETENSORS = ".safetensors"


class SafetensorsFiles(Format):
    """Tensors alone: a file, or a directory of files."""

    NAME = "safetensors"

    def recognizes(self, tree: FileTree) -> bool:
        """Whether a name ends like the names of safetensors files."""
        return bool(_safetensors_files(tree))

    def problems(self, tree: FileTree, _ranks: int) -> Iterator[str | None]:
        """Why one of its files is missing or not whole."""
        names = _safetensors_files(tree)
        yield None if names else "it has no .safetensors file"
        if tree.is_directory:
            yield tree.unfinished_problem()
            yield sharding_problem(tree)
            names = sorted({*names, *indexed_files(tree)})
        for name in names:
            yield file_problem(tree, name)

    def step(self, tree: FileTree) -> int | None:
        """The number in the metadata of its first file."""
        header, _ = read_header(tree.path / _safetensors_files(tree)[0])
        metadata = (header or {}).get(METADATA) or {}
        values = (str(metadata[name]) for name in STEP_NAMES if name in metadata)
        return next((int(value) for value in values if value.isdecimal()), None)

    def contents(self, tree: FileTree) -> Contents:
        """Its tensors."""
        return {name: read for file in _safetensors_files(tree) for name, read in tensors_of(tree.path / file).items()}

    def modules(self, _names: Collection[str]) -> list[str]:
        """All of it."""
        return [""]


def _safetensors_files(tree: FileTree) -> list[str]:
    if not tree.is_directory:
        return [""] if tree.path.name.endswith(_SAFETENSORS) else []
    return sorted(name for name in tree.top if name.endswith(_SAFETENSORS))


class Other(Format):
    """Complete if nothing says otherwise."""

    NAME = "other"

    def recognizes(self, _tree: FileTree) -> bool:
        """Always: this is the last one to be asked."""
        return True

    def problems(self, tree: FileTree, _ranks: int) -> Iterator[str | None]:
        """Why it is empty, or still being written, or has a damaged archive."""
        yield None if tree.bytes else "it is empty"
        if tree.is_directory:
            yield tree.unfinished_problem()
        for name in sorted(tree.sizes):
            # Empty files are markers or locks.
            yield file_problem(tree, name, by_torch=False) if tree.sizes[name] else None

    def contents(self, tree: FileTree) -> Contents:
        """The hash of each file."""
        return {name or tree.path.name: partial(hash_file, tree.path / name) for name in sorted(tree.sizes)}
