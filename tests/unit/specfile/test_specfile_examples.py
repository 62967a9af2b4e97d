"""Mistakes that people make in the words of other programs: what the messages propose, in braces as they wrote it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from helpers.specfiles import PYTHON, Load, Mistakes

from slurmtrain.errors import SpecError
from slurmtrain.ops.submit.command_script import missing_script
from slurmtrain.specfile import SiteRules, load_spec

COMMAND = "command: python -c pass\n"


@pytest.mark.parametrize("values", ["{range: [0, 71]}", "{linspace: [0, 1, 5]}", "{min: 0, max: 1}", "{choice: [1]}"])
def test_the_short_form_of_values_is_accepted_in_braces_too(load: Load, mistakes: Mistakes, values: str) -> None:
    [(_, _, message)] = mistakes(f"{COMMAND}params: {{s: 1}}\nsweep: {{params.s: {values}}}\n")
    proposed = re.findall(r"'([a-z.]+: [^']+)'", message)
    assert proposed, message
    load(f"{COMMAND}params: {{s: 1}}\nsweep: {{{', '.join(proposed)}}}\n")
    load(f"{COMMAND}params: {{s: 1}}\nsweep:\n" + "".join(f"  {each}\n" for each in proposed))


def test_a_call_that_a_comma_has_ended_is_to_be_put_in_quotes(mistakes: Mistakes) -> None:
    [(_, _, message), *_] = mistakes(f"{COMMAND}params: {{s: 1}}\nsweep: {{params.s: range(0, 71)}}\n")
    assert message.endswith("found 'range(0'; in braces, put all of it in quotes: a comma ends it otherwise")


@pytest.mark.parametrize("name", ["SLURM_TMPDIR", "NO_SUCH_VARIABLE"])
def test_a_variable_that_is_not_set_here_gets_a_value_or_a_shell(load: Load, mistakes: Mistakes, name: str) -> None:
    assert name not in os.environ
    [(_, key, message)] = mistakes(f"{COMMAND}env: {{D: '${{oc.env:{name}}}/x'}}\n")
    assert key == "env.D"
    [proposed] = re.findall(r"write (\$\{\S+?\})", message)
    assert load(f"{COMMAND}env: {{D: '{proposed}/x'}}\n").runs[0].plan.spec.env["D"] == "VALUE/x"
    in_shell = re.findall(r"bash -c .*$", message)
    assert bool(in_shell) == (name == "SLURM_TMPDIR")
    for command in in_shell:
        assert not load(f'command: "{command}"\n').warnings


@pytest.mark.parametrize(
    ("command", "is_warned"),
    [
        ('bash -c "python t.py $SLURM_TMPDIR | tee x"', False),
        ("/bin/bash -lc 'a && b $X'", False),
        ('bash -c "a" $X', True),
        ("bash t.sh $X", True),
        ("env X=1 python t.py $Y", True),
    ],
)
def test_a_shell_that_the_command_starts_replaces_variables(load: Load, command: str, *, is_warned: bool) -> None:
    assert bool(load(f"command: {command}\n").warnings) == is_warned


def test_a_script_that_is_missing_is_told_with_all_other_mistakes(tmp_path: Path) -> None:
    spec = tmp_path / "exp.yaml"

    def keys(text: str) -> list[str]:
        spec.write_text(text)
        with pytest.raises(SpecError) as raised:
            load_spec(spec, cwd=tmp_path, python=PYTHON, site=SiteRules(missing_script=missing_script))
        return [mistake.key for mistake in raised.value.mistakes]

    wrong = "slurm: {gres: gpu:4, mail_type: [END]}\nresources: {nodes: 2-4}\n"
    of_rest = ["slurm.mail_type", "slurm.gres", "resources.nodes"]
    assert keys(f"command: python missing.py\n{wrong}") == ["command", *of_rest]
    # What may make it, or move, or lies elsewhere, and what cannot be told.
    assert keys(f"command: python missing.py\nsetup: [touch missing.py]\n{wrong}") == of_rest
    assert keys(f"command: python missing.py\nworkdir: nowhere\n{wrong}") == of_rest
    assert keys(f"command: python -m missing\n{wrong}") == of_rest
    (tmp_path / "missing.py").touch()
    assert keys(f"command: python -u missing.py\n{wrong}") == of_rest
