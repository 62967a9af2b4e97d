"""The start of each worker process, before the user's command: ``python -I -S rank_main.py COMMAND ARGUMENT...``.

Standard library only, since it runs without site-packages. It sends both output streams to the rank's log, or the
node's if the command starts the ranks itself (``launcher: node`` or ``none``), asks the kernel for a stop signal if the
node agent dies, restores the limit of open files, makes the environment the command's own, and executes the command.

A script that does not use ``slurmtrain.session()`` is asked to stop by one signal, from the agent. Slurm sends others
to all processes of a step, and these kill by default, so they are ignored here. That persists across exec, and the
script's children inherit it unless they set handlers: if the chosen signal is not SIGTERM, ``Process.terminate()`` has
no effect on them. Signals are ignored, not blocked: a data-loader worker with SIGTERM blocked could not be terminated,
which multiprocessing does at exit, and then waits for it. The session sets its own handlers, and its children have the
default action again.
"""

import ctypes
import os
import resource
import signal
import sys

# prctl(2).
_PR_SET_PDEATHSIG = 1
# Signals that Slurm sends at a preemption, a cancel or a time limit.
_SENT_TO_ALL = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def execute(argv: list[str]) -> None:
    """Execute this command. If that fails, exit as a shell does: with 127 if there is no such program, else 126."""
    stop = signal.Signals[os.environ.get("SLURMTRAIN_STOP_SIGNAL", "SIGTERM")]
    for each in _SENT_TO_ALL:
        if each != stop:
            signal.signal(each, signal.SIG_IGN)
    launcher = os.environ.get("SLURMTRAIN_LAUNCHER", "ranks")
    writer = f"rank-{os.environ['RANK']}" if launcher == "ranks" else f"node-{os.environ['SLURMTRAIN_NODE']}"
    log = os.path.join(os.environ["SLURMTRAIN_LOG_DIR"], f"{writer}.log")  # noqa: PTH118
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    # The agent's own umask is private. Rights of the owner stay: the library creates files in this process.
    os.umask(int(os.environ.pop("SLURMTRAIN_UMASK", "077"), 8) & 0o077)
    # It stays set across exec, unlike signal handlers.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(stop), 0, 0, 0)
    files = int(os.environ.pop("SLURMTRAIN_OPEN_FILES"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    # CPUs of each rank of the node, such as 0-3;4-7; empty: anywhere.
    if lists := os.environ.pop("SLURMTRAIN_CPUS", ""):
        spans = [span.partition("-") for span in lists.split(";")[int(os.environ["LOCAL_RANK"])].split(",")]
        cpus = {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            print(f"slurmtrain: cannot bind this rank to CPUs: {error.strerror}", file=sys.stderr, flush=True)
    # Only now: an agent that died before the call above would never cause a signal.
    if os.getppid() != int(os.environ.pop("SLURMTRAIN_AGENT_PID")):
        sys.exit("the node agent is gone")
    # As runtime/environment/ranks.py has written them: a line NAME=VALUE, or NAME alone.
    for line in os.environ.pop("SLURMTRAIN_CHANGES", "").splitlines():
        name, equals, value = line.partition("=")
        if equals:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    if "SLURM_PROCID" in os.environ:
        # What srun sets for each of its tasks.
        os.environ["SLURM_TASK_PID"] = str(os.getpid())
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        print(f"slurmtrain: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


execute(sys.argv[1:])
