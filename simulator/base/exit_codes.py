"""Exit codes of commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes. (1 is Python's own: a defect of ours, with its traceback.)"""

    OK = 0
    USAGE = 2
    BAD_INPUT = 3
    DOES_NOT_FIT = 4
    RUN_FAILED = 5
    INTERRUPTED = 130
    READER_LEFT = 141  # as if by SIGPIPE
