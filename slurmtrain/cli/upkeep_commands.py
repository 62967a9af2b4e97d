"""Keeping order among runs, the registry, and what shells and editors need: no command here starts or ends a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from slurmtrain.cli import formatting, options, output, tables
from slurmtrain.ops.shared.workspace import Workspace


@options.command("delete 'test-*'", "delete @last --forget")
@options.runs_argument
@click.option("--forget", is_flag=True, help="Remove the whole directory, and the run from all lists.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; required without a terminal.")
@options.verbose_option
@options.json_option
def delete_command(
    workspace: Workspace, names: tuple[str, ...], forget: bool, yes: bool, verbose: bool, as_json: bool
) -> int:
    """Delete the checkpoints, logs and other files of each RUN, which must have ended.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. Its journals, metrics and plans stay: 'status --all' lists it.
    Its CSV, TensorBoard and W&B files are deleted too; files that its script wrote elsewhere, and anything already sent
    to a server, stay. Exits with 1 if something could not be deleted.
    """
    from slurmtrain.errors import UserError
    from slurmtrain.ops.delete import delete, find_deletable

    runs = find_deletable(workspace, names, forget=forget)
    # All is looked up before anybody is asked, so that the question can name the size of what goes.
    if runs and not yes:
        size = formatting.size(sum(run.removal.bytes for run in runs.values()))
        trackers = sorted({name for run in runs.values() for name in run.removal.trackers})
        also = f" and what was written for {', '.join(trackers)}" if trackers else ""
        results = sum(run.results for run in runs.values())
        written = f" ({formatting.size(results)} written by scripts next to their code)" if results else ""
        target = f"{'everything' if forget else 'the files'} of {len(runs)} run(s){also}, {size}{written}"
        # A script that deletes has to say that it means it.
        if not output.can_ask():
            unasked = "nothing was deleted: without a terminal, confirm with -y"
            raise UserError(f"this deletes {target}; {unasked}")
        lines = [
            f"{run_id}  {run.listed.name}  {run.listed.state}  {formatting.size(run.removal.bytes)}"
            for run_id, run in runs.items()
        ]
        output.require_consent(f"delete {target}?", lines)
    deleted = delete(workspace, runs, forget=forget)
    output.warn(deleted.problems)
    if as_json:
        removed = [
            {
                "id": run_id,
                "forgotten": forget,
                "bytes": removal.bytes,
                "links": removal.links,
                "trackers": removal.trackers,
                "forks": [fork for forks in runs[run_id].forks.values() for fork in forks],
            }
            for run_id, removal in deleted.removed.items()
        ]
        output.print_json({"schema": 1, "runs": removed, "bytes": deleted.bytes, "problems": deleted.problems})
    else:
        verb, lines = "forgotten" if forget else "deleted", []
        for run_id, removal in deleted.removed.items():
            lines.append(f"run {run_id} is {verb}: {formatting.size(removal.bytes)} freed")
            for step, forks in runs[run_id].forks.items():
                lines += [f"run {fork} began with its step {step} and keeps its own copy" for fork in forks]
            lines += [f"{link} was a link; its target is still there" for link in removal.links]
        output.notes(output.few(lines, verbose=verbose))
        if len(deleted.removed) > 1:
            output.note(f"{len(deleted.removed)} runs are {verb}: {formatting.size(deleted.bytes)} freed")
        if not deleted.removed and not deleted.problems:
            output.note("nothing to delete: the files of these runs are gone already")
    return 1 if deleted.problems else 0


# A century: longer than any file is old.
_LONGEST_S = 100 * 365 * 86400
_FLAGS = {
    "logs": "Logs of ranks, agents and jobs.",
    "jobs": "submitit's pickles and batch scripts.",
    "copies": "Runs' own copies of their code, unless scripts have changed them.",
    "code": "Snapshots of code that no run's plan names.",
    "arrays": "Files that the elements of job arrays shared.",
    "caches": "Caches of runs that are gone.",
    "keys": "Idempotency keys.",
    "litter": "Leftovers of killed commands.",
    "aside": "Checkpoints that 'resume --from-start' or '--step' has put aside: never removed without this option.",
}


class Age(click.ParamType[int]):
    """A time such as ``30d`` in seconds; ``0`` is one, too."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The seconds that ``value`` stands for; a usage error names ``param`` in ``ctx``."""
        from slurmtrain.model.experiment.values import read_length

        seconds = read_length("0s" if value == "0" else str(value))
        if seconds is None:
            self.fail(f"{value!r} is not a length of time; write 2w, 30d, 12h or 90m", param, ctx)
        return min(seconds, _LONGEST_S)


@options.command(
    "clean --dry-run", "clean --logs --older-than 7d", "clean --aside -y",
    params=[click.Option([f"--{kind}"], is_flag=True, help=text) for kind, text in _FLAGS.items()],
)  # fmt: skip
@click.option(
    "--older-than",
    type=Age(),
    default="30d",
    show_default=True,
    metavar="TIME",
    help="Only files of runs that ended at least this long ago.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask; required without a terminal.")
@options.json_option
def clean_command(workspace: Workspace, older_than: int, dry_run: bool, yes: bool, as_json: bool, **kinds: bool) -> int:
    """Remove logs and other files that are no longer needed. It prints what would go, and asks.

    By default it removes all kinds except --aside; options choose kinds. It leaves alone runs that have not ended, and
    the checkpoints, journals, metrics and plans of all runs: 'status' and 'show' say the same before and after. Exits
    with 1 if something could not be removed.
    """
    from slurmtrain.ops.clean import KINDS, ON_REQUEST, find_removable, remove

    chosen = {kind for kind, is_chosen in kinds.items() if is_chosen} or KINDS.keys() - ON_REQUEST
    cleaned = find_removable(workspace, chosen, older_than)
    kinds_json = cleaned.to_dict()["kinds"]
    if kinds_json and not as_json:
        rows = [(each["kind"], str(each["count"]), formatting.size(each["bytes"]), each["what"]) for each in kinds_json]
        tables.print_table(("KIND", "COUNT", "SIZE", "WHAT"), rows)
    elif not as_json:
        output.note("nothing to remove")
    if cleaned.parts and not dry_run:
        if not yes and output.can_ask():
            output.require_consent(f"remove {formatting.size(sum(cleaned.bytes.values()))}?")
        if yes or output.can_ask():
            cleaned = remove(workspace, cleaned)
            output.note(f"{formatting.size(sum(cleaned.bytes.values()))} are free now")
        else:
            output.note("nothing was removed: without a terminal, confirm with -y")
    output.warn(cleaned.problems)
    if as_json:
        output.print_json(cleaned.to_dict())
    return 1 if cleaned.problems else 0


@options.command("tag 'cnn-*' good", looks=True)
@click.argument("words", metavar="RUN... TAG", nargs=-1, required=True, shell_complete=options.complete_run_or_tag)
@click.option("--remove", is_flag=True, help="Remove the tag.")
@options.verbose_option
@options.json_option
def tag_command(workspace: Workspace, words: tuple[str, ...], remove: bool, verbose: bool, as_json: bool) -> int:
    """Tag each RUN with TAG, a word such as 'good'.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. With a RUN alone, print its tags.
    """
    from slurmtrain.ops.marks import add_tag, remove_tag
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe

    *names, tag = words
    if names:
        run_ids = (remove_tag if remove else add_tag)(workspace, names, tag)
    else:
        run_ids, _ = find(workspace, [tag], ask_slurm=False)
    if names and not as_json:
        output.note(f"{'removed' if remove else 'added'} tag {tag}: {', '.join(output.few(run_ids, verbose=verbose))}")
        return 0
    if as_json:
        return _print_runs_json(workspace, run_ids)
    for each in observe(workspace, run_ids, ask_slurm=False).runs[run_ids[0]].tags:
        output.echo(each)
    return 0


@options.command("note @last the learning rate is too high", looks=True)
@options.run_argument
@click.argument("words", metavar="[TEXT]...", nargs=-1)
@options.json_option
def note_command(workspace: Workspace, run: str, words: tuple[str, ...], as_json: bool) -> int:
    """Write TEXT on RUN, in place of its note; without TEXT, print the note.

    'slurmtrain show' prints it, too. An empty TEXT ('') removes it.
    """
    from slurmtrain.ops.marks import write_note
    from slurmtrain.ops.shared.find import find
    from slurmtrain.ops.shared.observe import observe

    text = " ".join(words)
    if words:
        run_id = write_note(workspace, run, text)
    else:
        [run_id], _ = find(workspace, [run], ask_slurm=False)
    if words and not as_json:
        output.echo(f"{'wrote the note' if text else 'removed the note'} on run {run_id}", err=True)
        return 0
    if as_json:
        return _print_runs_json(workspace, [run_id])
    listed = observe(workspace, [run_id], ask_slurm=False).runs[run_id]
    if listed.row["note"]:
        output.verbatim(str(listed.row["note"]))
    return 0


@options.command("archive 'test-*'", looks=True)
@options.runs_argument
@click.option("--undo", is_flag=True, help="List them again.")
@options.verbose_option
@options.json_option
def archive_command(workspace: Workspace, names: tuple[str, ...], undo: bool, verbose: bool, as_json: bool) -> int:
    """Leave each RUN out of 'status' once it has ended, unless it is named or --all is given.

    A RUN may be a sweep, or a pattern such as 'cnn-*'. Nothing else changes; 'slurmtrain delete' frees space.
    """
    from slurmtrain.ops.marks import archive

    run_ids = archive(workspace, names, undo=undo)
    if as_json:
        return _print_runs_json(workspace, run_ids)
    output.note(f"{'listed again' if undo else 'archived'}: {', '.join(output.few(run_ids, verbose=verbose))}")
    return 0


def _print_runs_json(workspace: Workspace, run_ids: Sequence[str]) -> int:
    from slurmtrain.ops.shared.observe import observe
    from slurmtrain.ops.shared.views import runs_json

    # Observed once more, since the marks have just been written.
    output.print_json(runs_json(workspace, observe(workspace, run_ids, ask_slurm=False).runs.fetch(run_ids)))
    return 0


# Without a workspace: the commands of the group have their own.
@click.group(epilog=options.examples("registry rebuild"))
def registry_command() -> None:
    """Manage the registry, a projection of the run directories that can be deleted and rebuilt."""


@options.command(
    "registry rebuild", group=registry_command, short_help="Rebuild the registry from the run directories."
)
@options.json_option
def rebuild_command(workspace: Workspace, as_json: bool) -> int:
    """Rebuild the registry from the run directories.

    A damaged file is kept next to it as registry.db.damaged, and one that is not a registry as registry.db.old.
    """
    from slurmtrain.cli.tables import count_progress
    from slurmtrain.ops.shared.observe import rebuild

    with count_progress("runs") as show:
        observed = rebuild(workspace, show)
    output.warn_about(observed)
    if as_json:
        output.print_json({"schema": 1, "runs": len(observed.runs), "registry": str(workspace.config.registry)})
    else:
        output.echo(f"{len(observed.runs)} runs in {workspace.config.registry}", err=True)
    return 0


# Bash splits words at "=" and ":", and replaces the last part only; the program is asked about, and answers with, whole
# words. No space follows what can go on.
_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' type value response line=${COMP_LINE:0:COMP_POINT} words
    local word=${line##*[[:space:]]}
    local before=${word%%"${word##*[=:]}"}
    IFS=$' \\t\\n' read -r -a words <<< "$line"
    [[ -n $word ]] || words+=("")
    COMPREPLY=()
    response=$(env COMP_WORDS="$line" COMP_CWORD=$((${#words[@]} - 1)) %(complete_var)s=bash_complete "$1" 2>/dev/null)
    for value in $response; do
        IFS=',' read -r type value <<< "$value"
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        else
            COMPREPLY+=("${value#"$before"}")
            [[ $value != *[=./] ]] || compopt -o nospace
        fi
    done
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""
# What click's own script for zsh does, and the same without a space behind what can go on.
_ZSH = "compadd -U -V unsorted -a completions"
_ZSH_OPEN = """\
local -a open=(${(M)completions:#*[=./]})
        completions=(${completions:#*[=./]})
        compadd -U -S '' -V unsorted -a open
        """


# Without a workspace: in ~/.bashrc it runs in any directory, and must not stumble over a mistake in a configuration.
@click.command(epilog=options.examples("completion bash"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print a script that completes commands, options, runs, sweeps, tags, metrics and keys of the spec.

    For bash, add to ~/.bashrc: eval "$(slurmtrain completion bash)"

    For zsh, add to ~/.zshrc after compinit: eval "$(slurmtrain completion zsh)"

    For fish: slurmtrain completion fish > ~/.config/fish/completions/slurmtrain.fish
    """
    from click.shell_completion import get_completion_class

    from slurmtrain.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    own = _BASH if shell == "bash" else kind.source_template.replace(_ZSH, _ZSH_OPEN + _ZSH)
    script = own % kind(cli, {}, "slurmtrain", "_SLURMTRAIN_COMPLETE").source_vars()
    output.verbatim(*script.split("\n"))
    return 0


@click.command("schema", short_help="Print the JSON Schema of specs, for editors.", epilog=options.examples("schema"))
def schema_command() -> int:
    """Print the JSON Schema of specs, by which editors complete keys, explain them and mark mistakes.

    With the language server for YAML, as in VS Code, write at the top of a spec: # yaml-language-server:
    $schema=spec.json
    """
    from slurmtrain.specfile.json_schema import json_schema

    output.verbatim(*json.dumps(json_schema(), indent=2).split("\n"))
    return 0
