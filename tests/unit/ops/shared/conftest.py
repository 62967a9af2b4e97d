"""Trackers of other packages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmtrain.tracking import tracker

PAGE = Path(__file__).resolve().parents[4] / "docs" / "trackers.md"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Installs a package with these trackers; returns its directory."""

    def call(package: str, **trackers: str) -> Path:
        information = tmp_path / package / f"{package}-1.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        lines = [f"{name} = {value}" for name, value in trackers.items()]
        (information / "entry_points.txt").write_text("\n".join(["[slurmtrain.trackers]", *lines]))
        monkeypatch.syspath_prepend(information.parent)
        tracker._installed.cache_clear()
        return information.parent

    yield call
    tracker._installed.cache_clear()


@pytest.fixture
def install_jsonl(install: Callable[..., Path]) -> Callable[[], None]:
    """Installs ``jsonl``, the tracker of the page about trackers."""

    def call() -> None:
        blocks = dict(re.findall(r"^```(python|toml)[^\n]*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
        points = tomllib.loads(blocks["toml"])["project"]["entry-points"]["slurmtrain.trackers"]
        (install("jsonl", **points) / "jsonl_tracker.py").write_text(blocks["python"])

    return call
