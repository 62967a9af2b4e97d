"""Torch's private names: one module knows them all, and says with which versions of torch it was tested."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import signal
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.tensor.parallel import ParallelStyle

import slurmtrain
from slurmtrain.errors import NotAvailable
from slurmtrain.runtime.job import torch_private

PACKAGE = Path(slurmtrain.__file__).parent
PROJECT = PACKAGE.parent / "pyproject.toml"
OWNER = Path(torch_private.__file__)
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != OWNER)


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
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        parts = dotted.split(".")
        if parts[0] in names and any(part.startswith("_") and not part.startswith("__") for part in parts):
            yield dotted


def private_uses(tree: ast.AST) -> list[str]:
    """What a module uses of torch's private names."""
    imports = [
        f"{module}.{name}" if name else module for module, name in torch_imports(tree) if is_private(module, name)
    ]
    return [*imports, *private_attributes(tree)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_uses_private_names_of_torch(path: Path) -> None:
    assert private_uses(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION",
         ["torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION"]),
        ("def f():\n    import torch._dynamo", ["torch._dynamo"]),
        ("from torch._dynamo import reset", ["torch._dynamo.reset"]),
        ("import torch\ntorch.serialization._get_layout(1)", ["torch.serialization._get_layout"]),
        ("import torch.distributed as dist\ndist._get_default_group()", ["dist._get_default_group"]),
        ("import torch.distributed.checkpoint as dcp\nfrom torch import nn\nfrom torch.nn import parallel", []),
        ("from torch.distributed.checkpoint import Metadata, metadata\nimport torch\ntorch.__version__", []),
    ],
)  # fmt: skip
def test_private_uses_are_those_with_an_underscore_or_not_in_all(text: str, used: list[str]) -> None:
    assert private_uses(ast.parse(text)) == used


def subclasses_of_torch() -> list[type]:
    """All classes of slurmtrain that inherit from one of torch's."""
    subclasses = []
    for path in MODULES:
        if any(torch_imports(ast.parse(path.read_text()))):
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
        if name not in torch_private.ELASTIC_EXTENSION_POINTS
        and (base, name) != (ParallelStyle, torch_private.STYLE_EXTENSION_POINT)
    }
    assert shared == {}


@pytest.mark.parametrize("name", sorted(torch_private.ELASTIC_EXTENSION_POINTS))
def test_torch_elastic_still_has_each_extension_point(name: str) -> None:
    assert callable(getattr(SimpleElasticAgent, name))


def test_a_style_of_torch_is_still_applied_by_an_abstract_method() -> None:
    assert torch_private.STYLE_EXTENSION_POINT in ParallelStyle.__abstractmethods__


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13)), ("2.9.0a0+git1234", (2, 9)), ("3.0", (3, 0)), ("2", None), ("unknown", None)],
)
def test_a_release_is_the_first_two_numbers_of_a_version(version: str, release: tuple[int, int] | None) -> None:
    assert torch_private.release_of(version) == release


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.0.1", "1.13.1"])
def test_a_version_that_is_too_old_is_refused_with_the_oldest_that_is_not(version: str) -> None:
    with pytest.raises(
        NotAvailable, match=rf"needs torch 2\.\d+ or newer, and torch {re.escape(version)} is installed"
    ):
        torch_private.check_version(version)


@pytest.mark.parametrize("version", ["2.15.0", "2.99.1", "3.0.0", "unknown"])
def test_a_version_that_is_not_known_to_be_too_old_is_tried(version: str) -> None:
    torch_private.check_version(version)


def test_the_installed_version_is_not_too_old() -> None:
    torch_private.check_version()


def test_without_torch_there_is_no_version_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch_private.metadata, "version", missing)
    assert torch_private.installed_version() is None
    torch_private.check_version()


def test_the_oldest_version_is_the_one_that_the_package_requires() -> None:
    required = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    [torch] = [each for each in required if re.match(r"torch\W", each)]
    assert torch == "torch>=" + ".".join(map(str, torch_private.OLDEST))


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that the handlers of this process have received; torch and the process get their own back."""
    numbers: list[int] = []
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, lambda number, _: numbers.append(number)) for number in handled}
    raising = elastic._terminate_process_handler
    yield numbers
    elastic._terminate_process_handler = raising
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_torch_elastic_installs_calls_the_handlers_that_were_there(received: list[int], rounds: int) -> None:
    for _ in range(rounds):
        torch_private.keep_signal_handlers()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, elastic._terminate_process_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.raise_signal(number)
    assert received == [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
    with pytest.raises(elastic.SignalException):
        signal.raise_signal(signal.SIGQUIT)


def test_an_empty_state_of_a_parameter_is_dropped_and_others_stay() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    assert torch_private.empty_states([{"params": ["a", "b"]}, {"params": ["c"]}]) == {"a": {}, "b": {}, "c": {}}
    optimizer.state[parameters[0]] = {}
    optimizer.state[parameters[1]] = {"momentum_buffer": None}
    torch_private.drop_empty_states(optimizer)
    assert list(optimizer.state) == [parameters[1]]
