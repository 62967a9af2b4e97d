"""Torch's private names: one module knows them all, and says with which versions of torch it was tested."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.parallel import ParallelStyle

import slurmtrain
from slurmtrain.errors import NotAvailable
from slurmtrain.runtime.job import torch_private

PACKAGE = Path(slurmtrain.__file__).parent
PROJECT = PACKAGE.parent / "pyproject.toml"
OWNER = Path(torch_private.__file__)
TEXTS = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py")) if path != OWNER}
# Each tree takes long to walk, and most modules do not name torch at all.
MODULES = {path: ast.parse(text) for path, text in TEXTS.items() if re.search(r"\bimport torch|\bfrom torch", text)}


def torch_imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Each import from torch, also within functions: the module, and the name from it or None."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.partition(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_private(module: str, name: str | None) -> bool:
    """Whether torch marks this as its own: by an underscore, or because the module's ``__all__`` lacks it."""
    if any(part.startswith("_") for part in (*module.split("."), name or "")):
        return True
    owner = importlib.import_module(module)
    public = getattr(owner, "__all__", None)
    if name is None or public is None or name in public:
        return False
    # A submodule of a package is public without being listed.
    return not hasattr(owner, "__path__") or importlib.util.find_spec(f"{module}.{name}") is None


def torch_names(tree: ast.AST) -> Iterator[str]:
    """The names under which a module knows torch's modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield alias.asname or "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (alias.asname or alias.name for alias in node.names)


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Dotted names like ``torch.serialization._get_layout`` that begin with a module of torch."""
    names = set(torch_names(tree))
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if names and isinstance(node, ast.Attribute) else ""
        parts = dotted.split(".")
        if parts[0] in names and any(part.startswith("_") and not part.startswith("__") for part in parts):
            yield dotted


def private_uses(tree: ast.AST) -> list[str]:
    """What a module uses of torch's private names."""
    imports = [
        f"{module}.{name}" if name else module for module, name in torch_imports(tree) if is_private(module, name)
    ]
    return [*imports, *private_attributes(tree)]


def test_no_other_module_uses_private_names_of_torch() -> None:
    uses = {path: private_uses(tree) for path, tree in MODULES.items()}
    assert {path: names for path, names in uses.items() if names} == {}


def subclasses_of_torch() -> list[type]:
    """All classes of slurmtrain that inherit from one of torch's."""
    subclasses = []
    for path, tree in MODULES.items():
        if any(torch_imports(tree)):
            module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            classes = [each for each in vars(module).values() if inspect.isclass(each)]
            subclasses += [each for each in classes if each.__module__ == module.__name__ and torch_bases(each)]
    return subclasses


def torch_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch"]


def private_names(kind: type) -> set[str]:
    """The private attributes and methods that the source of a class mentions."""
    return set(re.findall(r"(?:self\.|def )(_(?!_)\w+)", inspect.getsource(kind)))


def test_subclasses_share_no_private_name_with_torch_but_documented_extension_points() -> None:
    classes = subclasses_of_torch()
    assert classes
    shared = {
        f"{kind.__name__}.{name}": base.__name__
        for kind in classes
        for base in torch_bases(kind)
        for name in private_names(kind) & private_names(base)
        if (base, name) != (ParallelStyle, torch_private.STYLE_EXTENSION_POINT)
    }
    assert shared == {}
    assert torch_private.STYLE_EXTENSION_POINT in ParallelStyle.__abstractmethods__


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.0.1", "1.13.1"])
def test_a_version_that_is_too_old_is_refused_with_the_oldest_that_is_not(version: str) -> None:
    with pytest.raises(
        NotAvailable, match=rf"needs torch 2\.\d+ or newer, but torch {re.escape(version)} is installed"
    ):
        torch_private.check_version(version)


def test_a_version_that_is_not_known_to_be_too_old_is_tried_and_none_is_refused_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch_private.check_version()
    for version in ("2.15.0", "2.99.1", "3.0.0", "unknown"):
        torch_private.check_version(version)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch_private.metadata, "version", missing)
    assert torch_private.installed_version() is None
    torch_private.check_version()


def test_versions_of_torch_are_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0+cu128", "nvidia-nccl-cu12": "2.28.3"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip = None\n")
    monkeypatch.setattr(torch_private.metadata, "version", version)
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch_private, "find_spec", {"torch": spec}.get)
    assert torch_private.torch_versions() == {"torch": "2.13.0+cu128", "cuda": "12.8", "nccl": "2.28.3"}
    versions.clear()
    monkeypatch.setattr(torch_private, "find_spec", {}.get)
    assert torch_private.torch_versions() == dict.fromkeys(("torch", "cuda", "nccl"))


def test_the_oldest_version_is_the_one_that_the_package_requires() -> None:
    required = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    [torch] = [each for each in required if re.match(r"torch\W", each)]
    assert torch == "torch>=" + ".".join(map(str, torch_private.OLDEST))


def test_an_empty_state_of_a_parameter_is_dropped_and_others_stay() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert torch_private.empty_states([{"params": ["a", "b"]}, {"params": ["c"]}]) == {"a": {}, "b": {}, "c": {}}
    optimizer.state[parameters[0]] = {}
    optimizer.state[parameters[1]] = {"momentum_buffer": None}
    torch_private.drop_empty_states(optimizer)
    assert list(optimizer.state) == [parameters[1]]
