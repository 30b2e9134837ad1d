"""Every failure that cbgen names.

    CbgenError                   exit code
    ├── UsageError               2    an option, path, column or job spec that the user can correct
    ├── ModelError               1    a model that is missing, gated or not supported
    ├── MemoryPlanError          1    the cache does not fit the memory there is
    ├── OutputError              1    results cannot be written: full disk, permissions, a foreign file
    ├── InputError               1    an input file cannot be read, or changed while the job ran
    ├── ResumeRefusedError       4    the output belongs to another job, or to a job that is running
    ├── DeviceFaultError         75   the device is of no more use to this process; a new one goes on with the job
    ├── ForwardPassError         1    the model failed; in a job only the rows at fault end, as error rows
    │   └── PassMemoryError      1    for want of memory; in a job the batches get smaller first
    └── RowError                 -    one row cannot be generated: never fatal, it becomes an error row

A message is one line: what is wrong, where, what to do. Exit code 0 is a finished job without failed rows, 3 a finished
job with some, 5 a job of which all rows failed or more than --max-errors allows, 75 a job that was stopped and that the
same command continues, 128 and the number of a signal a job that a second signal ended at once.
"""

EXIT_DONE = 0
EXIT_FATAL = 1
EXIT_USAGE = 2
EXIT_FAILED_ROWS = 3
EXIT_RESUME_REFUSED = 4
EXIT_TOO_MANY_FAILED = 5
EXIT_RESUMABLE = 75
EXIT_SIGNALLED = 128  # and the number of the signal
EXIT_INTERRUPTED = 130


class CbgenError(Exception):
    """A failure with a message for the user and the exit code of the command."""

    exit_code = EXIT_FATAL


class UsageError(CbgenError):
    """The command, the job spec or the input's shape is wrong, and the user can correct it."""

    exit_code = EXIT_USAGE


class ModelError(CbgenError):
    """The model cannot be loaded, or does something that the engine cannot serve."""


class MemoryPlanError(CbgenError):
    """The KV cache does not fit the memory there is."""


class OutputError(CbgenError):
    """Results cannot be written where they should go."""


class InputError(CbgenError):
    """An input file cannot be read to its end, or was changed between the first and the last reading of one run."""


class ResumeRefusedError(CbgenError):
    """What lies at the output belongs to another job."""

    exit_code = EXIT_RESUME_REFUSED


class DeviceFaultError(CbgenError):
    """A fault of the device after which every call of this process fails; the same command continues the job."""

    exit_code = EXIT_RESUMABLE


class ForwardPassError(CbgenError):
    """The model or a kernel raised in a forward pass."""


class PassMemoryError(ForwardPassError):
    """A forward pass found too little memory."""


class RowError(CbgenError):
    """One row cannot be generated; its message goes to the row's `error` column."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, or the error's name when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
