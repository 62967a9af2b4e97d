"""What a script imports as soon as it starts."""

from __future__ import annotations

import pytest

from slurmtrain.model.spec.command_files import script_imports


def imports(text: str) -> list[tuple[str, int, bool]]:
    return [tuple(each) for each in script_imports(text.encode())]


def test_the_first_import_that_python_does_not_come_with_is_certain() -> None:
    text = '"""A script."""\nfrom __future__ import annotations\nimport os, sys\nimport numpy as np\nimport torch.nn\n'
    assert imports(text) == [("numpy", 4, True), ("torch", 5, False)]


@pytest.mark.parametrize(
    "before",
    [
        "import os\nos.environ['A'] = '1'\n",
        "import sys\nsys.path.insert(0, '/elsewhere')\n",
        "def f():\n    pass\nf()\n",
        "if True:\n    raise SystemExit\n",
    ],
)
def test_after_other_code_nothing_is_certain(before: str) -> None:
    [(package, _, certain)] = imports(before + "import torch\n")
    assert (package, certain) == ("torch", False)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "def main():\n    import torch\n",
        "from . import torch\n",
        "import os.path, json\n",
        "this is no Python\n",
        "",
    ],
)
def test_what_may_not_be_imported_at_all_does_not_count(text: str) -> None:
    assert imports(text) == []


@pytest.mark.parametrize("source", [b"\x00", b"\xff\xfe", b"(" * 10_000, b"# coding: nonsense\nimport torch\n"])
def test_what_no_python_can_read_has_no_imports(source: bytes) -> None:
    assert script_imports(source) == []


@pytest.mark.filterwarnings("error")
def test_what_python_warns_of_in_a_script_is_not_printed() -> None:
    assert imports("import torch\nx = '\\d'\ny = 1 is 1\n") == [("torch", 1, True)]


def test_several_names_in_one_import_come_in_their_order() -> None:
    assert imports("import numpy, torch\nfrom torch import nn\n") == [
        ("numpy", 1, True),
        ("torch", 1, False),
        ("torch", 2, False),
    ]
