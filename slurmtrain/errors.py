"""Every error that slurmtrain raises on purpose.

SlurmtrainError            something failed                                        exit code 1
+-- UserError              the user's input is wrong, or cannot be carried out     exit code 2
|   +-- SpecError          mistakes in a spec, a config file or an override
|   +-- QueryError         a condition on runs, an order or a field that means nothing
|   +-- RunNotFound        a name that matches no run, or several
|   +-- RunBusy            a run whose state does not allow the request
|   |   +-- RunCancelled   a run that was cancelled while it was being started
|   +-- LockHeld           a lock that another process holds for longer than a command waits
|   +-- NoCheckpoint       a run without a checkpoint to resume from
|   +-- NotAvailable       a feature that this executor or this machine does not have
|   +-- RequestRefused     a request that the scheduler can never satisfy
|   +-- NoSnapshot         code that no snapshot can be taken of: too much, or no project's
|   +-- PathError          a file or directory that cannot be used
|   |   +-- UntrustedPath  one that somebody else owns or can write to, or that is not a regular file
|   |   +-- RunUnreadable  a run whose journals cannot be read
|   |   +-- RegistryFailed a registry that cannot be read or written now: its disk is full, somebody holds it
|   +-- RegistryUnusable   a file that is not a registry
|       +-- RegistryNewer  a registry that was made by a newer version
|       +-- RegistryDamaged
|                          a registry that can only be read in part
+-- SubmitFailed           a submission that failed after runs were created; names them
|   +-- SubmitInterrupted  one that was interrupted                              exit code 130
+-- LaunchError            a job that could not be started
|   +-- SubmissionUncertain
|                          a job that the scheduler may or may not have accepted
+-- SlurmDown              a command of Slurm that failed
+-- CheckpointError        a checkpoint that could not be written or read
+-- StrategyError          a model that cannot be distributed as the spec demands
+-- OutputError            standard output could not be written
+-- WaitTimedOut           runs that had not ended when a wait was to
+-- TrackingError          the MLflow store did not accept the sent data

A message is a sentence that names what is wrong, where, and what to do. What is no failure, but should be known, the
Python interface reports as a SlurmtrainWarning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class SlurmtrainError(Exception):
    """Base of all errors; ``str(error)`` is what a person reads."""

    exit_code = 1


class UserError(SlurmtrainError):
    """The user's input is wrong; nothing was created or changed."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a file or on the command line.

    ``where`` is ``file:line`` or the command-line argument, ``key`` the dotted path in the file, or empty.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"


class SpecError(UserError):
    """All mistakes of a spec, a configuration file or a command line, in the order of the file."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("\n".join(str(mistake) for mistake in mistakes))


class QueryError(UserError):
    """A question about runs, such as a condition, cannot be answered as it is."""


class RunNotFound(UserError):
    """No run, or more than one, has this name."""


class RunBusy(UserError):
    """The state of the run does not allow what was requested."""


class RunCancelled(RunBusy):
    """The run was cancelled while this command was starting it."""


class LockHeld(UserError):
    """Another process has held a lock for longer than this command waits."""

    def __init__(self, lock: str, holder: str, waited_s: float) -> None:
        """Somebody has waited for ``lock``, a noun with its path, for ``waited_s`` seconds.

        ``holder``: ``held by`` whom, as the end of a sentence.
        """
        self.holder = holder
        super().__init__(
            f"{lock} is still {holder}, after {waited_s:.0f} s: wait for that process, or end it, and try again"
        )


class NoCheckpoint(UserError):
    """The run has no complete checkpoint to resume from."""


class NotAvailable(UserError):
    """This executor, or this machine, does not have what was requested."""


class NoPrice(UserError):
    """The configuration has no price for what a run used."""


class RequestRefused(UserError):
    """The scheduler refuses the request, or could never satisfy it."""


class NoSnapshot(UserError):
    """There is too much in a directory for a snapshot of code, or it is not the directory of a project."""


class PathError(UserError):
    """A file or directory that is needed cannot be read or written."""


class UntrustedPath(PathError):
    """A file or directory that somebody else owns or can write to, or a file that is not a regular one.

    ``why``: what is wrong with it; ``cure``: what to do.
    """

    def __init__(self, why: str, cure: str) -> None:
        self.why = why
        self.cure = cure
        super().__init__(f"{why}; {cure}")


class RunUnreadable(PathError):
    """The journals of a run cannot be read, so nothing may be done on the ground of what is known about it."""


class RegistryFailed(PathError):
    """The registry cannot be read or written now."""


class ConnectionLost(RegistryFailed):
    """The server of the registry has ended the connection; a new one may work."""


class RegistryUnusable(UserError):
    """What is there is not a registry of slurmtrain, or cannot be used as one."""


class RegistryDamaged(RegistryUnusable):
    """It is a registry of slurmtrain, but not everything in it can be read."""


class RegistryNewer(RegistryUnusable):
    """The registry was made by a newer version of slurmtrain."""


class SubmitFailed(SlurmtrainError):
    """A submission failed, and some of its runs exist."""

    def __init__(self, message: str, run_ids: Sequence[str] = ()) -> None:
        """``run_ids``: the runs that exist."""
        self.run_ids = tuple(run_ids)
        super().__init__(message)


class SubmitInterrupted(SubmitFailed):
    """A submission was interrupted; the runs that exist may be none."""

    exit_code = 130


class LaunchError(SlurmtrainError):
    """A job could not be started."""


class SubmissionUncertain(LaunchError):
    """The scheduler did not say whether it accepted the job; ``sync`` finds out."""


class SlurmDown(SlurmtrainError):
    """One of Slurm's commands failed, or did not answer."""


class CheckpointError(SlurmtrainError):
    """A checkpoint could not be written, or none could be read."""


class StrategyError(SlurmtrainError):
    """A model cannot be distributed as the spec's ``strategy`` demands."""


class DataError(SlurmtrainError):
    """A dataset cannot be divided over the processes of a run, or a loader is used in a way that would lose samples."""


class OutputError(SlurmtrainError):
    """What a command printed could not be written to standard output."""


class WaitTimedOut(SlurmtrainError, TimeoutError):
    """Some runs had not ended when a wait for them was to end."""


class TrackingError(SlurmtrainError):
    """The tracking store did not accept the sent data; the next ``sync`` sends it again."""


class SlurmtrainWarning(UserWarning):
    """What the caller of the Python interface should know, although nothing has failed."""
