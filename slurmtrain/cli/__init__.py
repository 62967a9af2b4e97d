"""The command line: argument parsing and output, no logic. Each command's module is imported when it is used."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module

import click

from slurmtrain.cli import output
from slurmtrain.errors import SlurmtrainError, UserError
from slurmtrain.system.inherited import private_umask
from slurmtrain.system.interpreter import collect_rarely, ensure_utf8, leave_quickly
from slurmtrain.version import __version__

# 128 and the number of SIGINT, as shells report a process that it ended.
INTERRUPTED = 130

# Name: (module, short help). --help imports none of the modules.
COMMANDS = {
    "submit": ("start_commands", "Submit the runs of a spec."),
    "render": ("start_commands", "Print what submit would submit."),
    "status": ("status_commands", "List runs."),
    "why": ("check_commands", "Say why a run waits, is slow or has failed, and what to do."),
    "show": ("status_commands", "Show all about a run."),
    "best": ("compare_commands", "Print the best run by a metric."),
    "diff": ("compare_commands", "Show how two runs differ: spec, code, environment, result."),
    "compare": ("compare_commands", "Compare runs: what differs, and the metrics."),
    "cost": ("cost_commands", "Show what runs cost, and the share lost to interruptions."),
    "logs": ("log_commands", "Print the logs of a run."),
    "ui": ("log_commands", "Show runs in MLflow, in a browser."),
    "plot": ("log_commands", "Draw curves of metrics."),
    "wait": ("watch_commands", "Wait until runs have ended."),
    "resume": ("start_commands", "Resume a run from its newest checkpoint."),
    "rerun": ("start_commands", "Submit a run again: the same plan and code."),
    "cancel": ("watch_commands", "Cancel runs."),
    "sync": ("watch_commands", "Reconcile runs, registry and MLflow."),
    "watch": ("watch_commands", "Restart interrupted runs, until stopped."),
    "tag": ("upkeep_commands", "Tag runs."),
    "note": ("upkeep_commands", "Write a note on a run."),
    "archive": ("upkeep_commands", "Leave runs out of lists."),
    "delete": ("upkeep_commands", "Delete the files of runs."),
    "checkpoints": ("checkpoint_commands", "List the checkpoints of a run."),
    "checkpoint": ("checkpoint_commands", "Ask a run to save now."),
    "verify": ("checkpoint_commands", "Check checkpoints against their manifests."),
    "prune": ("checkpoint_commands", "Delete checkpoints that no rule keeps."),
    "clean": ("upkeep_commands", "Remove what no run needs any more."),
    "preflight": ("check_commands", "Check nodes without training."),
    "doctor": ("check_commands", "Predict how a run survives interruptions, or explain why one failed."),
    "nodes": ("check_commands", "List nodes that failed a preflight."),
    "registry": ("upkeep_commands", "Manage the registry."),
    "completion": ("upkeep_commands", "Print a shell completion script."),
    "schema": ("upkeep_commands", "Print the JSON Schema of specs, for editors."),
}

# How --help groups the commands, plug-ins' too: what people do most first.
SECTIONS = {
    "Start runs": "submit render resume rerun",
    "Look at runs": "status why show logs top plot report serve ui",
    "Compare runs": "compare best diff scale cost",
    "Steer runs": "cancel wait",
    "Checkpoints": "checkpoint checkpoints verify prune export",
    "Keep order": "tag note archive delete clean",
    "Cluster and machines": "preflight doctor drill nodes watch sync notify metrics",
    "This installation": "completion schema registry",
}
_UNGROUPED = "More commands"
# By name: the module that has the function ``name_command``, and the short help.
_OWN = {name: (f"slurmtrain.cli.{module}", text) for name, (module, text) in COMMANDS.items()}
# The entry points of plug-ins: each refers to such a mapping.
PLUGINS = "slurmtrain.commands"
# What docker, git, kubectl, Slurm and the shell call these commands.
_OTHER_WORDS = {
    word: instead
    for words, instead in (
        ("ls list ps squeue queue runs jobs", "'slurmtrain status' lists runs"),
        ("htop monitor tui", "'slurmtrain top' is a live page of all runs"),
        ("mlflow open", "'slurmtrain ui' shows runs in MLflow"),
        ("costs price bill budget", "'slurmtrain cost RUN' says what a run cost"),
        ("html page", "'slurmtrain report RUN' writes a page about a run"),
        (
            "web dashboard browse site http",
            "'slurmtrain serve' shows live pages of all runs, 'slurmtrain ui' curves in MLflow",
        ),
        ("notifications alert alerts slack mail webhook", "'slurmtrain notify' shows who is told about runs"),
        ("prometheus exporter grafana", "'slurmtrain metrics' exports the state of all runs to Prometheus"),
        ("stop kill scancel abort terminate down", "'slurmtrain cancel RUN' ends a run"),
        ("run start sbatch launch train up", "'slurmtrain submit SPEC' starts one"),
        ("rm remove del erase", "'slurmtrain delete RUN' deletes the files of a run"),
        (
            "gc",
            "'slurmtrain prune RUN' deletes checkpoints that no rule keeps, 'slurmtrain delete RUN' all files of "
            "a run, and 'slurmtrain clean' what no run needs",
        ),
        ("hide", "'slurmtrain archive RUN' leaves a run out of lists"),
        ("label mark", "'slurmtrain tag RUN TAG' tags a run"),
        ("comment annotate", "'slurmtrain note RUN TEXT' writes a note on a run"),
        ("log tail cat", "'slurmtrain logs RUN' prints what a run has printed, -f as it comes"),
        ("describe info inspect get sacct", "'slurmtrain show RUN' shows all about a run"),
        ("restart requeue continue retry", "'slurmtrain resume RUN' continues from its checkpoint"),
        ("scaling benchmark bench speedup", "'slurmtrain scale SPEC' runs it in several sizes, and compares them"),
        ("init new create", "write a spec, 'name' and 'command' are enough; 'slurmtrain render SPEC' checks it"),
        ("check validate lint", "'slurmtrain render SPEC' checks a spec, 'slurmtrain doctor' more"),
    )
    for word in words.split()
}


class LazyGroup(click.Group):
    """The commands, each imported only when it is used, so that ``--help`` costs no more than importing click."""

    @cached_property
    def places(self) -> dict[str, tuple[str, str]]:
        """The module and the short help of each command: slurmtrain's own by topic, then what plug-ins add."""
        # Imported here: looking for plug-ins takes longer than importing click.
        from slurmtrain.system.interpreter import declared

        places = dict(_OWN)
        for point in sorted(declared(PLUGINS), key=lambda point: point.name):
            for name, place in point.load().items():
                places.setdefault(name, place)
        return places

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of the commands in the order of ``places``, not alphabetically as in click."""
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the command of this name; None if there is none."""
        place = _OWN.get(cmd_name) or self.places.get(cmd_name)
        if place is None:
            return None
        command: click.Command = getattr(import_module(place[0]), f"{cmd_name}_command")
        command.short_help = place[1]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command named by ``args`` in the context ``ctx``; suggest a name if it is unknown."""
        if args and not args[0].startswith("-") and args[0] not in _OWN and args[0] not in self.places:
            if instead := _OTHER_WORDS.get(args[0]):
                ctx.fail(f"no such command {args[0]!r}; {instead}")
            if args[0].endswith((".yaml", ".yml")):
                ctx.fail(f"no such command {args[0]!r}; 'slurmtrain submit {args[0]}' submits a spec")
            from slurmtrain.model.experiment.kinds import suggestion

            ctx.fail(f"no such command {args[0]!r}{suggestion(args[0], self.places)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands in ``--help``, by section. click's own method would import each for its short help."""
        width = max(map(len, self.places))
        for title, names in self.sections().items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.places[name][1]) for name in names])

    def sections(self) -> dict[str, list[str]]:
        """The names of the commands by section; last what plug-ins add that no section names."""
        sections = {title: [name for name in names.split() if name in self.places] for title, names in SECTIONS.items()}
        grouped = {name for names in sections.values() for name in names}
        if others := [name for name in self.places if name not in grouped]:
            sections[_UNGROUPED] = others
        return sections


@click.group(
    cls=LazyGroup,
    epilog="'slurmtrain COMMAND --help' explains a command, with an example.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--runs", metavar="DIR", help="The directory of all runs.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def cli(context: click.Context, runs: str | None, debug: bool) -> None:
    """From one YAML file to a finished training run, through every preemption.

    RUN is an id, the beginning of an id, a name, or @last. A name means its newest submission: one run or, if that was
    a sweep, all its runs; so does the id of a sweep. A command for one run then says which run it takes.
    """
    context.obj = {"runs": runs, "debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exit codes: 0 success, 1 failure, 2 wrong input, 130 interrupted."""
    if arguments is None:
        # Only as a program: it may replace this process, which a test that passes arguments would not survive.
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
        for argument in arguments:
            # What is no UTF-8 could not be recorded in text files.
            if argument.encode(errors="replace").decode() != argument:
                raise UserError(f"the argument {argument!a} is not valid UTF-8; rename the file, or correct it")
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
            from slurmtrain.system.files import describe_os_error_at

            sentence = str(error)
            if not isinstance(error, SlurmtrainError):
                sentence = f"{describe_os_error_at(error)}; --debug shows where"
            # After an empty line, there may be the text of a file to write.
            message, empty, to_write = sentence.rstrip("\n").partition("\n\n")
            output.echo(*(f"error: {line}" for line in message.split("\n")), err=True)
            if empty:
                output.echo("", *to_write.split("\n"), err=True)
        return error.exit_code if isinstance(error, SlurmtrainError) else 1
