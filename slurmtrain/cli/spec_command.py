"""Commands that take a spec, whose keys people may write as options."""

from __future__ import annotations

import click

_RENDER = "'slurmtrain render SPEC' prints what would be submitted"
_OTHER_WORDS = dict.fromkeys(("dry_run", "dryrun", "test_only", "print", "check"), _RENDER)


class SpecCommand(click.Command):
    """A command with KEY=VALUE arguments: who writes ``--nodes 2`` is told ``resources.nodes=2``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with its ``ctx`` and ``args``. Raises click.UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            cure = _cure(error.option_name.lstrip("-"), list(error.possibilities or ()))
            raise click.UsageError(f"no such option {error.option_name}; {cure}", ctx) from error


def _cure(name: str, possibilities: list[str]) -> str:
    """What to write instead of an option, as half a sentence; ``possibilities``: options with similar names."""
    # It imports what reads specs, which is only needed for mistakes.
    import slurmtrain.model.spec.spec  # noqa: F401 (it makes its keys known)
    from slurmtrain.model.spec.kinds import hint_for_unknown_key, nearest

    key = tuple(name.replace("-", "_").split("."))
    if instead := _OTHER_WORDS.get(key[0]):
        return instead
    near = nearest(f"--{name}", possibilities, 0.75)
    if near is not None:
        return f"did you mean {near}?"
    if len(name) == 1:
        return "keys of the spec are set as in resources.nodes=2"
    meant = key if len(key) > 1 else hint_for_unknown_key(key, ()).key
    if meant == ("sweep",):
        return "write --sweep params.lr=0.1,0.3"
    if meant and meant[0] != "params":
        return f"write {'.'.join(meant)}=... to set that key of the spec"
    return f"write params.{key[-1]}=... to set a parameter"
