"""Text in a command that stands there only if there is a checkpoint: ``{resume_from?--init_from=resume}``. Pure."""

from __future__ import annotations

import re

from slurmtrain.model.spec.kinds import suggestion
from slurmtrain.model.spec.launcher import split_command

OF_CHECKPOINT = ("resume_from", "resume_dir", "resume_tag")
"""The placeholders for the checkpoint to continue from."""
CONDITIONAL = re.compile(rf"\{{({'|'.join(OF_CHECKPOINT)})\?((?:[^{{}}]|\{{\w+\}})*)\}}")
"""The name of a placeholder, and the text, which may have placeholders itself."""


def conditional_problem(command: str) -> str:
    """What is wrong with a command's ``{resume_from?TEXT}``, as a sentence without a full stop; empty if nothing is."""
    for word in split_command(command):
        for name in re.findall(r"\{([A-Za-z_]\w*)\?", CONDITIONAL.sub("", word)):
            if name in OF_CHECKPOINT:
                return (
                    f"'{{{name}?...' does not end in the same argument; with blanks in it, the whole needs quotes: "
                    f"'{{{name}?a b}}'"
                )
            if near := suggestion(name, OF_CHECKPOINT):
                return f"'{{{name}?...}}' is no placeholder{near}"
    return ""
