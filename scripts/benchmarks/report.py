"""Pages of 1,000 and 10,000 runs, and of a sweep of 1,000: how long they take to make and to open, and their size.

A page is opened in a headless Chromium, which takes root to install it where it is missing. The time counts from the
request for the file to the first frame after its first chart was drawn; everything else on it is drawn by then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from _measure import ROOT, Report, command, in_turns, say, seconds_of
from _runs import make_runs

sys.path.insert(0, str(ROOT / "tests"))

# What a page should not exceed with 1,000 runs.
MOST_BYTES, MOST_OPEN_S = 3_000_000, 2.0
AIMED = 1000
SIZES = (AIMED, 10_000)
SWEEP = "benchsweep"
# Set before the page's own scripts run.
_WATCH = """
new MutationObserver((_, observer) => {
  if (!document.querySelector('.chart svg')) return;
  observer.disconnect();
  requestAnimationFrame(() => requestAnimationFrame(() => { window.shownAt = performance.now(); }));
}).observe(document, {childList: true, subtree: true});
"""


def run(arguments: argparse.Namespace) -> Report:
    """Make pages in turns with ``status`` of the same root, then open each in a browser."""
    rounds = 2 if arguments.quick else 9
    sizes = SIZES[:1] if arguments.quick else SIZES
    report = Report()
    with tempfile.TemporaryDirectory(prefix="slurmtrain-bench-") as place:
        folder = Path(place)
        pages: dict[str, Path] = {}
        for size in sizes:
            root = folder / f"runs-{size}"
            make_runs(root, ended=size, sweep=SWEEP if size == AIMED else None)
            took = seconds_of(command("status"), SLURMTRAIN_RUNS=str(root))
            say(f"{size} runs: made, and listed for the first time in {took:.2f} s")
            kinds = {"runs": ("--since", "52w"), **({"sweep": (SWEEP,)} if size == AIMED else {})}
            pages |= _measure_making(report, folder, root, size, kinds, rounds)
        _measure_opening(report, folder, pages, rounds)
    report.notes.append(f"aims for {AIMED} runs: at most {MOST_BYTES:,} bytes, and opened within {MOST_OPEN_S:g} s")
    return report


def _measure_making(
    report: Report, folder: Path, root: Path, size: int, kinds: dict[str, tuple[str, ...]], rounds: int
) -> dict[str, Path]:
    """The pages of a root, by name."""
    pages = {f"{size}_{kind}": folder / f"{size}-{kind}.html" for kind in kinds}
    calls: dict[str, Callable[[], float]] = {
        name: partial(seconds_of, command("report", *chosen, "-o", str(page)), SLURMTRAIN_RUNS=str(root))
        for (name, page), chosen in zip(pages.items(), kinds.values(), strict=True)
    }
    # All runs are looked at by both.
    status = partial(seconds_of, command("status", "--json"), SLURMTRAIN_RUNS=str(root))
    times = in_turns({"status": status, **calls}, rounds)
    for name, page in pages.items():
        report.figure(f"{name}_make_s", times[name], "s")
        report.figure(f"{name}_bytes", [page.stat().st_size])
        report.ratio(f"{name}_make/status", times[name], times["status"])
        if name.startswith(f"{AIMED}_") and page.stat().st_size > MOST_BYTES:
            report.failures.append(f"{name}: the page has {page.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    return pages


def _measure_opening(report: Report, folder: Path, pages: dict[str, Path], rounds: int) -> None:
    import pytest
    from helpers.browser import Browser, browser

    def seconds(shown: Browser, page: Path) -> float:
        shown.open(page.as_uri())
        shown.wait_for("return window.shownAt ?? null", lambda at: at is not None)
        return float(shown.run("return window.shownAt")) / 1000

    try:
        with browser(folder) as shown:
            shown.before_pages(_WATCH)
            times = in_turns({name: partial(seconds, shown, page) for name, page in pages.items()}, rounds)
    except pytest.skip.Exception as reason:
        report.lack(f"no page was opened: {reason}")
        return
    for name, values in times.items():
        report.figure(f"{name}_open_s", values, "s")
        median = report.figures[f"{name}_open_s"].median
        if name.startswith(f"{AIMED}_") and median > MOST_OPEN_S:
            report.failures.append(f"{name}: the page takes {median:.2f} s to open, more than {MOST_OPEN_S:g} s")
