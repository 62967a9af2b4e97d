"""A group of commands that are imported only when used, so that ``--help`` costs no more than importing click."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """``commands_at`` maps a command's name to (its module in ``package``, its short help)."""

    def __init__(
        self,
        *args: Any,
        commands_at: Mapping[str, tuple[str, str]],
        other_words: Mapping[str, str],
        package: str,
        **kwargs: Any,
    ) -> None:
        """``other_words``: what to type instead of names that people know from other programs."""
        super().__init__(*args, **kwargs)
        self._at = commands_at
        self._other_words = other_words
        self._package = package

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of the commands in the order of ``commands_at``: by topic, not alphabetically as in click."""
        return list(self._at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the command of this name; None if there is none."""
        if cmd_name not in self._at:
            return None
        command: click.Command = import_module(f"{self._package}.{self._at[cmd_name][0]}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command named by ``args`` in the context ``ctx``; suggest a name if it is unknown."""
        if args and args[0] not in self._at and not args[0].startswith("-"):
            if instead := self._other_words.get(args[0]):
                ctx.fail(f"no such command {args[0]!r}; {instead}")
            if args[0].endswith((".yaml", ".yml")):
                ctx.fail(f"no such command {args[0]!r}; 'slurmtrain submit {args[0]}' submits a spec")
            from slurmtrain.model.spec.kinds import suggestion

            ctx.fail(f"no such command {args[0]!r}{suggestion(args[0], self._at)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands in ``--help``. click's own method would import every command for its short help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._at.items()])
