"""What each worker process is before it becomes the user's command: ``python -I -S shim.py COMMAND ARGUMENT...``.

Standard library only, since it runs without site-packages. It sends both output streams to the rank's log, asks the
kernel for a SIGTERM should the node agent die, takes away the launcher's own variables, and becomes the command.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    rank = os.environ["RANK"]
    log = os.path.join(os.environ["SLURMTRAIN_LOG_DIR"], f"rank-{rank}.log")  # noqa: PTH118
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(os.environ.pop("SLURMTRAIN_AGENT_PID")):
        sys.exit("the node agent is gone")
    for name in [name for name in os.environ if name.startswith("SUBMITIT_")]:
        del os.environ[name]
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        print(f"slurmtrain: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


main(sys.argv[1:])
