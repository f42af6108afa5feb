"""`tandem bench`, also `python -m bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from bench import commands
from bench.flags import UsageError, parser
from bench.run_files import RunFileError
from bench.target import TargetError

_FAILED, _USAGE, _INTERRUPTED = 1, 64, 130


def main(arguments: Sequence[str] | None = None, prog: str = "python -m bench") -> int:
    """Runs a command; the exit code is the verdict's (0 OK, 1 SHORT, 2 VOID), 1 for a server that cannot be loaded, 64 for flags that cannot be."""
    given_arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = [*prog.split(), *given_arguments]
    try:
        given = parser(prog).parse_args(given_arguments)
        if given.command == "report":
            return commands.report(given).value
        work = commands.run if given.command == "run" else commands.sweep
        return uvloop.run(work(given, command)).value
    except UsageError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return _USAGE
    except (TargetError, RunFileError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
