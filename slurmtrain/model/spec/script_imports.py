"""Which modules a script imports as soon as it starts, without running it. Pure."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator
from typing import NamedTuple


class ScriptImport(NamedTuple):
    """An import at the top level of a script, outside of conditions.

    ``package``: the first part of the module's name. ``certain``: nothing before it can change what is imported:
    neither other code nor a module that does not belong to Python itself.
    """

    package: str
    line: int
    certain: bool


def script_imports(source: bytes) -> list[ScriptImport]:
    """The imports of a script that Python itself does not come with, in their order.

    Of a script that this version of Python cannot parse there are none.
    """
    try:
        with warnings.catch_warnings():
            # Such as the warning about an invalid escape sequence: Python itself prints it when the script runs.
            warnings.simplefilter("ignore")
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    imports = []
    certain = True
    for statement in body:
        packages = list(_packages(statement))
        foreign = [package for package in packages if package not in sys.stdlib_module_names]
        imports += [ScriptImport(package, statement.lineno, certain and package == foreign[0]) for package in foreign]
        certain = certain and not foreign and (bool(packages) or _is_text(statement))
    return imports


def _packages(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module.partition(".")[0]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
