"""What a shell of ``setup`` has made of its variables and limits: ``python -m slurmtrain.runtime.setup.report HANDLE``.

It runs in the place of that shell, and writes to the descriptor ``HANDLE``.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Write the environment and the limits of this process as JSON."""
    numbers = {value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}
    limits = {str(number): resource.getrlimit(number) for number in sorted(numbers)}
    report = json.dumps({"environ": dict(os.environ), "limits": limits})
    with os.fdopen(int(sys.argv[1]), "wb", closefd=False) as file:
        file.write(report.encode())


if __name__ == "__main__":
    main()
