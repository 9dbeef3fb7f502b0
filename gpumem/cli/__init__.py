"""The ``gpumem`` command: one module per subcommand, one place that turns errors into exit codes.

Exit codes: 0 done, 1 failed, 2 bad input, 3 more memory than allowed, 130 interrupted. Every error
is one line on stderr; with ``--json`` stdout holds exactly one JSON object, or nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

import click

import gpumem
from gpumem._support.texts import visible
from gpumem.errors import ConfigError, GpumemError, TraceError

__all__ = ["commands", "main"]

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130


COMMANDS = {
    "info": "info",
    "run": "run",
    "predict": "predict",
    "replay": "replay",
    "report": "report",
    "peak": "show_peak",
    "plan": "plan",
    "top": "top",
    "keep": "keep",
    "node": "node",
    "bench": "bench",
    "demo": "demo",
    "completion": "completion",
}
"""Modules of this package, each with its function."""


class Commands(Mapping[str, click.Command]):
    """The subcommands by name; the module of one is imported at its first use."""

    def __getitem__(self, name: str) -> click.Command:
        function = COMMANDS[name]
        command: click.Command = getattr(import_module(f"{__name__}.{name}"), function)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@click.group(
    commands=Commands(),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(gpumem.__version__, prog_name="gpumem", message="%(prog)s %(version)s")
@click.pass_context
def commands(context: click.Context) -> None:
    """GPU memory in Python: see it, predict it, limit it, and share it between libraries."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Arguments after the program's name; those of the process if None.

    Returns
    -------
    int
        The exit code.

    Examples
    --------
    >>> from gpumem.cli import main
    >>> main(["--version"])
    gpumem 0.1.0
    0
    """
    if sys.stdout is None:  # its descriptor was closed before the process began
        return _fail("stdout: it is closed", FAILED)
    try:
        result = commands.main(arguments, prog_name="gpumem", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (ConfigError, TraceError) as error:
        return _fail(str(error), BAD_INPUT)
    except GpumemError as error:
        return _fail(f"{type(error).__name__}: {error}", FAILED)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _abandon_stdout()  # the reader has closed the pipe
        return FAILED
    except OSError as error:
        # Errors of files that a command opens have a file name; without one it is stdout.
        _abandon_stdout()
        return _fail(f"{error.filename or 'stdout'}: {error.strerror or error}", FAILED)
    return result if isinstance(result, int) else 0


def _abandon_stdout() -> None:
    """Redirect stdout, so that its flush at exit does not fail again."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    click.echo(f"gpumem: {visible(' '.join(message.split()))}", err=True)
    return code
