"""``gpumem run``: a program as it is, with an arena beneath PyTorch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import click

from gpumem._budget import Budget
from gpumem._support.arguments import is_same_file
from gpumem.cli.arguments import FiniteRange, size_or_share, within, writable
from gpumem.errors import GpumemError
from gpumem.integrations.torch._startup import FOLDER, VARIABLE, Options


class _Run(click.Command):
    """A command with options that have a value only after "=", as click has none."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Write ``--pinned``, ``--offload`` before the program as options of click's."""
        given = iter(range(len(args)))
        for i in given:
            name, equals, _ = args[i].partition("=")
            if not name.startswith("-") or name == "--":
                break
            if name in ("--pinned", "--offload"):
                args[i] = args[i] if equals else f"{name}=0"
            elif name in ("--max-mem", "--node-limit", "--report", "--stacks") and not equals:
                next(given, None)
        return super().parse_args(ctx, args)


def _read_node(
    context: click.Context, option: click.Parameter, text: str | None
) -> tuple[str, int | str | None] | None:
    """Read a name and its limit."""
    if text is None:
        return None
    name, equals, limit = text.partition("=")
    return name, size_or_share(context, option, limit) if equals else None


@click.command(
    cls=_Run,
    context_settings={"allow_interspersed_args": False},
    short_help="Run a program with gpumem in place of PyTorch's allocator.",
)
@click.option(
    "--max-mem",
    metavar="SIZE",
    callback=size_or_share,
    help="Limit of each GPU's arena, in each process, such as 20GiB or 80%.",
)
@click.option(
    "--node-limit",
    "node",
    metavar="NAME[=SIZE]",
    callback=_read_node,
    help="Limit that all programs with NAME share, such as gpu0=60GiB or cuda:0/tenant-a=20%.",
)
@click.option(
    "--pinned",
    metavar="[=LIMIT]",
    callback=size_or_share,
    help="Replace PyTorch's allocator of pinned host memory alone, within LIMIT in each process.",
)
@click.option(
    "--offload",
    metavar="[=LIMIT]",
    callback=size_or_share,
    help="Move activations to pinned memory where the GPU's would exceed LIMIT, or what it has.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PAGE",
    callback=writable,
    help="Write a page about the run; each process adds itself when it ends.",
)
@click.option(
    "--stacks",
    type=within("number", FiniteRange(0, 1)),
    default=1.0,
    show_default=True,
    metavar="SHARE",
    help="Share of allocations with a stack on the page, 0 to 1; a stack takes 1 to 2 us.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.argument("program", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.Path())
def run(
    max_mem: int | str | None,
    node: tuple[str, int | str | None] | None,
    pinned: int | str | None,
    offload: int | str | None,
    report: Path | None,
    stacks: float,
    module: bool,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run PROGRAM with gpumem in place of PyTorch's allocator, in its children too.

    PROGRAM is a script, or a launcher such as torchrun or accelerate. It replaces this process.
    PYTHONPATH begins with a folder of gpumem, so that each Python that PROGRAM starts enables
    gpumem when it imports PyTorch. A Python that ignores its environment (-I, -E, -S) does not.
    --report writes the page and no other file. Without a GPU, PyTorch keeps its own memory, and
    the page shows the arenas that the program makes itself.
    """
    if report and not module and is_same_file(report, [program]):
        raise click.BadParameter(f"--report {report}: expected another file than the program")
    if max_mem is not None and pinned is not None:
        raise click.BadParameter("--max-mem limits GPU memory, which --pinned leaves to PyTorch")
    command = _command(program, module)
    name = None if node is None else _set_limit(*node)
    page = str(report.absolute()) if report else ""
    options = Options(os.getpid(), max_mem or 0, page, stacks, time.time_ns(), pinned, offload)
    options = options._replace(node=name)
    path = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{FOLDER}{os.pathsep}{path}" if path else str(FOLDER),
        VARIABLE: options.text(),
    }
    sys.stdout.flush()
    try:
        os.execve(command[0], [*command, *arguments], environment)
    except OSError as error:
        raise click.ClickException(f"{program}: {error.strerror}") from None


def _set_limit(name: str, limit: int | str | None) -> str:
    """Set the limit of a node's name before the program runs, which then joins it."""
    try:
        Budget(limit, node=name)
    except (GpumemError, ValueError) as error:
        raise click.BadParameter(f"--node-limit: {error}") from None
    return name


def _command(program: str, module: bool) -> list[str]:
    if module:
        return [sys.executable, "-m", program]
    # As in a shell, a name without a folder is searched in PATH; a script's name is not.
    if program.endswith(".py") or (os.path.isfile(program) and not os.access(program, os.X_OK)):
        return [sys.executable, program]
    found = shutil.which(program)
    if found is None:
        raise click.BadParameter(f"{program!r} is neither a file nor a command")
    return [found]
