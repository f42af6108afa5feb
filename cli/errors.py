"""What a user can do wrong, said in one line and without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Printed as it is; the process ends with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
