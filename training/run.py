"""A run's exit codes, its one kind of foreseen failure, and its folder: recipe, environment, result."""

from __future__ import annotations

FAILED = 1
USAGE = 2
OUT_OF_MEMORY = 3
HOST_OUT_OF_MEMORY = 4
NOT_FINITE = 5
INTERRUPTED = 6


class RunError(RuntimeError):
    """A failure whose message says all there is to say: no traceback is shown. `exit_code` ends the process."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
