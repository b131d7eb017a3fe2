"""How every command of the project ends: results on stdout, one clear line on stderr and exit code 2 for bad input."""

import sys
from collections.abc import Callable

from rlhfless.errors import RlhflessError

USER_ERROR = 2
"""Exit code for anything that the user can put right."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""


def run(app: Callable[..., object]) -> None:
    """Run a Typer application; end the process with one line instead of a traceback where the user can act on it.

    Usage errors of the command line (unknown option, not a number) end the same way as a `RlhflessError`.
    """
    try:
        code = app(standalone_mode=False)
    except RlhflessError as error:
        _end(" ".join(str(error).split()), USER_ERROR)
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a click usage error; the core does not import click
        if message is None:
            raise
        _end(" ".join(str(message()).split()), USER_ERROR)
    else:
        sys.exit(code if isinstance(code, int) else 0)


def _end(line: str, code: int) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
