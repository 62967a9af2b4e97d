"""A group of commands that are imported only when used, so that ``--help`` costs no more than importing click."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import click

# The entry points of plug-ins: each refers to a mapping such as ``commands_at``, whose modules have their full names.
PLUGINS = "slurmtrain.commands"


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
        self._own = {name: (f"{package}.{module}", text) for name, (module, text) in commands_at.items()}
        self._other_words = other_words

    @cached_property
    def places(self) -> dict[str, tuple[str, str]]:
        """The module and the short help of each command: slurmtrain's own, then what plug-ins add."""
        # Imported here: looking for plug-ins takes longer than importing click.
        from importlib.metadata import entry_points

        places = dict(self._own)
        for point in sorted(entry_points(group=PLUGINS), key=lambda point: point.name):
            for name, place in point.load().items():
                places.setdefault(name, place)
        return places

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names of the commands in the order of ``commands_at``: by topic, not alphabetically as in click."""
        return list(self.places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the command of this name; None if there is none."""
        place = self._own.get(cmd_name) or self.places.get(cmd_name)
        if place is None:
            return None
        command: click.Command = import_module(place[0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command named by ``args`` in the context ``ctx``; suggest a name if it is unknown."""
        if args and not args[0].startswith("-") and args[0] not in self._own and args[0] not in self.places:
            if instead := self._other_words.get(args[0]):
                ctx.fail(f"no such command {args[0]!r}; {instead}")
            if args[0].endswith((".yaml", ".yml")):
                ctx.fail(f"no such command {args[0]!r}; 'slurmtrain submit {args[0]}' submits a spec")
            from slurmtrain.model.spec.kinds import suggestion

            ctx.fail(f"no such command {args[0]!r}{suggestion(args[0], self.places)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands in ``--help``. click's own method would import every command for its short help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.places.items()])
