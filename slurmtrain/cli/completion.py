"""``slurmtrain completion``."""

from __future__ import annotations

import click

from slurmtrain.cli.shared import options, output


@click.command("completion", short_help="Print a shell completion script.", epilog=options.examples("completion bash"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print a script that completes commands, options and runs.

    For bash, add to ~/.bashrc: eval "$(slurmtrain completion bash)"
    """
    from click.shell_completion import get_completion_class

    from slurmtrain.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    output.echo(*kind(cli, {}, "slurmtrain", "_SLURMTRAIN_COMPLETE").source().split("\n"))
    return 0
