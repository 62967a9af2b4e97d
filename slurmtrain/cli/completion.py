"""``slurmtrain completion`` and ``slurmtrain schema``: for shells and editors."""

from __future__ import annotations

import json

import click

from slurmtrain.cli import options, output

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


@click.command(epilog=options.examples("completion bash"))
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
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
def schema() -> int:
    """Print the JSON Schema of specs, by which editors complete keys, explain them and mark mistakes.

    With the language server for YAML, as in VS Code, write at the top of a spec: # yaml-language-server:
    $schema=spec.json
    """
    from slurmtrain.specfile.json_schema import json_schema

    output.verbatim(*json.dumps(json_schema(), indent=2).split("\n"))
    return 0
