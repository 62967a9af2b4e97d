"""Programs of scripts/ as modules."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    """A program as a module; ``name``: its path below scripts."""
    module_name = f"script_{Path(name).stem}"
    spec = spec_from_loader(module_name, SourceFileLoader(module_name, str(SCRIPTS / name)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses look up the module that they are defined in.
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is to be left beside a script, which imports what lies there.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.syspath_prepend(str((SCRIPTS / name).parent))
        spec.loader.exec_module(module)
    return module
