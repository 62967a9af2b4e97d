"""The command line: argument parsing and output, no logic. Each command's module is imported when it is used."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

from slurmtrain.cli.lazy import LazyGroup
from slurmtrain.cli.shared import output
from slurmtrain.errors import SlurmtrainError, UserError
from slurmtrain.system.inherited import private_umask
from slurmtrain.system.interpreter import collect_rarely, ensure_utf8, leave_quickly
from slurmtrain.version import __version__

INTERRUPTED = 130

# name: (module, short help). A test compares these texts with the commands' own, which --help must not import.
COMMANDS = {
    "submit": ("submit", "Submit the runs of a spec."),
    "render": ("render", "Print what submit would submit."),
    "status": ("status", "List runs."),
    "top": ("top", "Watch and steer runs on a live page."),
    "show": ("show", "Show all about a run."),
    "best": ("best", "Print the best run by a metric."),
    "diff": ("diff", "Show how two runs differ: spec, code, environment, result."),
    "compare": ("compare", "Compare runs: what differs, and the metrics."),
    "logs": ("logs", "Print the logs of a run."),
    "ui": ("ui", "Show runs in MLflow, in a browser."),
    "plot": ("plot", "Draw curves of metrics."),
    "wait": ("wait", "Wait until runs have ended."),
    "resume": ("resume", "Resume a run from its newest checkpoint."),
    "rerun": ("rerun", "Submit a run again: the same plan and code."),
    "cancel": ("cancel", "Cancel runs."),
    "sync": ("sync", "Reconcile runs, registry and MLflow."),
    "watch": ("watch", "Restart interrupted runs, until stopped."),
    "tag": ("tag", "Tag runs."),
    "note": ("note", "Write a note on a run."),
    "archive": ("archive", "Leave runs out of lists."),
    "delete": ("delete", "Delete the files of runs."),
    "checkpoints": ("checkpoints", "List the checkpoints of a run."),
    "checkpoint": ("checkpoint", "Have a run save now."),
    "verify": ("verify", "Check checkpoints against their manifests."),
    "prune": ("prune", "Delete checkpoints that are not to be kept."),
    "clean": ("clean", "Remove what no run needs any more."),
    "export": ("export", "Write the model of a checkpoint to a single file."),
    "preflight": ("preflight", "Check nodes without training."),
    "doctor": ("doctor", "Predict what interruptions do here, or explain why a run failed."),
    "nodes": ("nodes", "List nodes that failed a preflight."),
    "metrics": ("metrics", "Export the state of all runs to Prometheus."),
    "registry": ("registry", "Manage the registry."),
    "completion": ("completion", "Print a shell completion script."),
}

_LISTS, _ENDS = "'slurmtrain status' lists runs", "'slurmtrain cancel RUN' ends a run"
_STARTS, _DELETES, _FREES = (
    "'slurmtrain submit SPEC' starts one",
    "'slurmtrain delete RUN' deletes the files of a run",
    "'slurmtrain prune RUN' deletes checkpoints that are not to be kept, 'slurmtrain delete RUN' all files of a run, "
    "and 'slurmtrain clean' what no run needs",
)
# What docker, git, kubectl, Slurm and the shell call these commands.
_OTHER_WORDS = {
    **dict.fromkeys(("ls", "list", "ps", "squeue", "queue", "runs", "jobs"), _LISTS),
    **dict.fromkeys(("htop", "monitor", "tui"), "'slurmtrain top' is a live page of all runs"),
    **dict.fromkeys(("mlflow", "web", "dashboard", "browse", "open"), "'slurmtrain ui' shows runs in MLflow"),
    **dict.fromkeys(
        ("prometheus", "exporter", "grafana"), "'slurmtrain metrics' exports the state of all runs to Prometheus"
    ),
    **dict.fromkeys(("stop", "kill", "scancel", "abort", "terminate", "down"), _ENDS),
    **dict.fromkeys(("run", "start", "sbatch", "launch", "train", "up"), _STARTS),
    **dict.fromkeys(("rm", "remove", "del", "erase"), _DELETES),
    **dict.fromkeys(("gc",), _FREES),
    **dict.fromkeys(("hide",), "'slurmtrain archive RUN' leaves a run out of lists"),
    **dict.fromkeys(("label", "mark"), "'slurmtrain tag RUN TAG' tags a run"),
    **dict.fromkeys(("comment", "annotate"), "'slurmtrain note RUN TEXT' writes a note on a run"),
    **dict.fromkeys(("log", "tail", "cat"), "'slurmtrain logs RUN' prints what a run has printed, -f as it comes"),
    **dict.fromkeys(("describe", "info", "inspect", "get", "sacct"), "'slurmtrain show RUN' shows all about a run"),
    **dict.fromkeys(
        ("restart", "requeue", "continue", "retry"), "'slurmtrain resume RUN' continues from its checkpoint"
    ),
    **dict.fromkeys(
        ("init", "new", "create"), "write a spec, 'name' and 'command' are enough; 'slurmtrain render SPEC' checks it"
    ),
    **dict.fromkeys(("check", "validate", "lint"), "'slurmtrain render SPEC' checks a spec, 'slurmtrain doctor' more"),
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    other_words=_OTHER_WORDS,
    package="slurmtrain.cli",
    epilog="'slurmtrain COMMAND --help' explains a command, with an example.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--runs", metavar="DIR", help="The directory of all runs.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def cli(context: click.Context, runs: str | None, debug: bool) -> None:
    """From one YAML file to a finished training run, through every preemption.

    RUN is an id, the beginning of an id, a name, or @last. Of several runs of a name, the newest that has not ended is
    meant or, if all have, the newest.
    """
    context.obj = {"runs": runs, "debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exit codes: 0 success, 1 failure, 2 wrong input, 130 interrupted."""
    if arguments is None:
        ensure_utf8()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    output.attach_streams()
    collect_rarely()
    leave_quickly()
    with private_umask():
        code = _run(arguments)
    output.discard_output()
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Execute a command, report its errors, and return the exit code."""
    try:
        _check_encoding(arguments)
        return cli.main(arguments, prog_name="slurmtrain", standalone_mode=False) or 0
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        output.echo(*text.getvalue().rstrip("\n").split("\n"), err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output, such as `head`, is gone.
        output.discard_output()
        return 1
    except Exception as error:  # noqa: BLE001 (a bug, whose traceback is printed)
        if isinstance(error.__cause__, KeyboardInterrupt):
            # Python 3.11 raises RuntimeError from whatever __set_name__ raises, in any module that is being imported.
            output.echo("interrupted", err=True)
            return INTERRUPTED
        output.discard_output()
        if "--debug" in arguments or not isinstance(error, SlurmtrainError | OSError):
            import traceback

            output.echo(*traceback.format_exc().rstrip("\n").split("\n"), err=True)
        else:
            # After an empty line, there may be the text of a file to write.
            message, empty, to_write = _describe(error).rstrip("\n").partition("\n\n")
            output.echo(*(f"error: {line}" for line in message.split("\n")), err=True)
            if empty:
                output.echo("", *to_write.split("\n"), err=True)
        return error.exit_code if isinstance(error, SlurmtrainError) else 1


def _check_encoding(arguments: list[str]) -> None:
    """Raise UserError unless all arguments can be recorded in text files."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"the argument {argument!a} is not valid UTF-8; rename the file, or correct it") from None


def _describe(error: SlurmtrainError | OSError) -> str:
    if isinstance(error, SlurmtrainError):
        return str(error)
    path = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{path}{(error.strerror or str(error)).lower()}; --debug shows where"
