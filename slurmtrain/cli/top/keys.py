"""The keys of the page, as its last line and its help say them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from rich.cells import cell_len

# By worth: (key, word in the last line, its effect).
PAGE_KEYS = (
    ("?", "help", "this help"),
    ("q", "quit", "leave; runs continue"),
    ("l", "logs", "logs of the run on the whole screen, also Enter"),
    ("c", "cancel", "cancel the run: it saves and ends (asks)"),
    (
        "/",
        "filter",
        "show only runs with these words in id, name, state, tags or reason, or of which a condition holds, such as "
        "params.lr < 0.1 and state = failed; Esc shows all again",
    ),
    ("s", "show", "all about the run, as 'slurmtrain show'"),
    ("r", "resume", "start the run again from its newest checkpoint (asks)"),
    ("p", "save", "have the run save now, as 'slurmtrain checkpoint'"),
    ("a", "all/live", "show all runs, or only those that have not ended"),
    ("o", "sort", "sort in the next way: live first, newest, name, state, progress, ETA"),
    ("j k", "move", "next and previous run, also arrows; g and G: first and last; Space and b: a page"),
)
LOG_KEYS = (
    ("q", "back", "back to the runs, also Esc"),
    ("/", "search", "search; n and N: next and previous match"),
    ("n", "next", ""),
    ("t", "rank 0/all", "logs of rank 0, or of all ranks"),
    ("f", "follow", "go to the end, and stay there, also G"),
)
TEXT_KEYS = (("q", "back", "back to the runs, also Esc"), ("/", "search", "search; n and N: next and previous match"))


def line(keys: Sequence[tuple[str, str, str]], width: int) -> list[tuple[str, str]]:
    """The keys that fit on a line, by worth: (key, word) each.

    Args:
        keys: Such as :data:`PAGE_KEYS`.
        width: How wide the screen is, in cells.
    """
    fitting: list[tuple[str, str]] = []
    for key, word, _ in keys:
        width -= cell_len(key) + cell_len(word) + 3
        if width < -2:
            break
        fitting.append((key, word))
    return fitting


def help_lines(width: int) -> list[str]:
    """What all keys do, on lines of at most ``width`` cells."""
    about = [(key, text) for key, _, text in PAGE_KEYS]
    logs = [(key, text) for key, _, text in LOG_KEYS if text]
    end = "Runs are not changed by leaving this page. 'slurmtrain COMMAND --help' says what each action does."
    lines = [f"{key:<5} {text}" for key, text in about]
    lines += ["", "In logs:", *(f"{key:<5} {text}" for key, text in logs), "", end]
    return [part for line in lines for part in wrap(line, max(20, width), subsequent_indent=" " * 6) or [""]]
