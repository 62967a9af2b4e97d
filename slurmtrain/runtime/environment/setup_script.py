"""The spec's ``setup`` in the shell that starts a job's agents, and what the agents learn from it.

The lines run once, on the first node, in the shell whose variables and limits the agents inherit: the batch script's
or, on this machine, one of node 0's agent. If a line fails, that shell goes on all the same: the
agents end the attempt, by the rules by which any end is told, before any rank starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmtrain.errors import PathError
from slurmtrain.model.experiment.plan import Plan
from slurmtrain.model.run.layout import AttemptDir, SubmissionDir
from slurmtrain.model.urls import redact
from slurmtrain.runtime.environment import variables
from slurmtrain.system import interpreter
from slurmtrain.system.files import describe_os_error, make_directory, write_atomically
from slurmtrain.system.inherited import AFTER_SETUP, BEFORE_SETUP
from slurmtrain.system.interpreter import own_python
from slurmtrain.system.owned_files import open_readable, read_readable

if TYPE_CHECKING:
    from slurmtrain.model.interruption.exit_report import ExitReport

# How long teardown may take.
TEARDOWN_S = 60.0
_TAIL_BYTES = 16_384
_LONGEST = 300
_MISSING = re.compile(r"No module named '?(\w+)")
# Where bash says that a message is from: lines of the script that the user has not written.
_PLACE = re.compile(r"^\S*: line \d+: ")


@cache
def shell_templates() -> Any:
    """Jinja's environment for shell scripts, with the filter ``quote``."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(interpreter.template_directory()),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 (shell, not HTML; values go through shlex.quote)
        keep_trailing_newline=False,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment


def setup_values(plan: Plan, submission: str, attempt: str) -> dict[str, Any]:
    """The values that the template of the setup needs.

    Args:
        plan: whose setup it is.
        submission: the submission's directory, as a word of shell.
        attempt: the attempt's directory, likewise.
    """
    return {
        "setup": plan.spec.setup,
        "before_setup": BEFORE_SETUP,
        "after_setup": AFTER_SETUP,
        "python": shlex.join(own_python()),
        "submission": submission,
        "attempt": attempt,
        "marker": variables.SETUP_OF,
        "teardown": node_script(plan.spec.teardown) if plan.spec.teardown else "",
        "teardown_s": int(TEARDOWN_S),
    }


def node_script(lines: Sequence[str]) -> str:
    """What bash runs for lines of ``setup_node`` or ``teardown``.

    Args:
        lines: The lines.
    """
    text: str = shell_templates().get_template("setup_node.sh.j2").render(lines=lines)
    return text


def local_script(plan: Plan, submission: SubmissionDir, job_id: str) -> str:
    """What the shell of node 0 of a local run runs: bash, with the command that tells what has changed as arguments.

    Args:
        plan: whose setup it is.
        submission: the submission's directory.
        job_id: the job's id.
    """
    attempt = submission.run.attempt(job_id, 0)
    values = setup_values(plan, shlex.quote(str(submission.path)), shlex.quote(str(attempt.path)))
    # Its agents run teardown whatever happens to setup.
    values["teardown"] = ""
    template = shell_templates().get_template("local.sh.j2")
    text: str = template.render(run_id=submission.run.id, plan_hash=plan.hash, **values)
    return text + "\n"


def take_setup_failure(plan: Plan, attempt: AttemptDir) -> ExitReport | None:
    """The report of an attempt whose setup failed; None if it did not.

    Args:
        plan: whose setup it was.
        attempt: the attempt, which has its output.
    """
    failure = variables.take_variable(variables.SETUP_FAILED)
    if not failure:
        return None
    # Imported here: commands make batch scripts with this module, and no reports.
    from slurmtrain.model.interruption.exit_report import ExitReport

    code, number, owner = failure.split(" ", 2)
    other = AttemptDir(Path(owner))
    if other.path.name == attempt.path.name and other.run.id != attempt.run.id:
        # Of several runs in a job one has the output: each shows it.
        with contextlib.suppress(OSError, PathError):
            make_directory(attempt.logs, private=True)
            write_atomically(attempt.setup_log, read_readable(other.setup_log), private=True)
    reason = describe_failed_line("setup", plan.spec.setup, (int(code), int(number)), attempt.setup_log)
    return ExitReport(cause="crash", reason=reason, failed_at=time.time())


def describe_failed_line(key: str, lines: Sequence[str], failure: tuple[int, int], log: Path) -> str:
    """Why lines of shell have failed, as a sentence without a full stop.

    Args:
        key: The lines' key in the spec.
        lines: The lines.
        failure: The exit code, and the number of the line, from 1; 0: unknown.
        log: Their output; the last line of it counts.
    """
    (code, number), texts = failure, "\n".join(lines).split("\n")
    is_known = 0 < number <= len(texts)
    line = f"line {number} of '{key}' ({_shorten_line(redact(texts[number - 1].strip()))})" if is_known else f"'{key}'"
    # Without the place in a script that the user has not written.
    output = _PLACE.sub("", last_line(log))
    return f"{line} failed with code {code}" + (f": {output}" if output else "")


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, without secrets; empty if there is none.

    Args:
        log: the log's path.
    """
    try:
        with open_readable(log) as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"its output cannot be read ({describe_os_error(error)})"
    return _shorten_line(redact(next((line.strip() for line in reversed(lines) if line.strip()), "")))


def python_of_ranks(plan: Plan) -> str:
    """The meaning of ``python`` in the command: after a setup that changes it, the changed one.

    Args:
        plan: whose command it is.
    """
    return os.environ.get(variables.SETUP_PYTHON) or plan.python


def advise_on_python(report: ExitReport) -> ExitReport:
    """The report of a node, with what to do if the Python that setup has chosen lacks what ranks import.

    Args:
        report: why the ranks ended.
    """
    python, missing = os.environ.get(variables.SETUP_PYTHON), _MISSING.search(report.reason)
    if report.cause != "crash" or not python or missing is None:
        return report
    package = missing[1]
    why = (
        f"'setup' makes python {python}, where {package} is not installed: install it there ('{python} -m pip install "
        f"{package}'), or write the path of another Python in 'command'"
    )
    return replace(report, reason=f"{report.reason}; {why}")


def use_variables_of_ranks(environ: MutableMapping[str, str]) -> None:
    """Give the ranks the variables of Python that setup has left, in place of the agents'.

    Args:
        environ: the environment that ranks inherit, which is changed.
    """
    names = environ.pop(variables.RANK_VARIABLES, None)
    if names is None:
        return
    variables.keep_own_python()
    for name in [name for name in environ if name.startswith("PYTHON")]:
        del environ[name]
    for name in names.split():
        environ[name] = environ.pop(variables.OF_RANKS + name, "")


def _shorten_line(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
