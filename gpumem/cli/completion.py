"""``gpumem completion``: the script with which a shell completes this command."""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from gpumem.cli.output import json_option, print_json

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_GPUMEM_COMPLETE"  # set by click's script when it calls `gpumem` for completions

_HELP = {
    "bash": 'eval "$(gpumem completion bash)"   in ~/.bashrc',
    "zsh": 'eval "$(gpumem completion zsh)"    in ~/.zshrc',
    "fish": "gpumem completion fish | source   in ~/.config/fish/config.fish",
}


@click.command(
    epilog="\b\n" + "\n".join(_HELP.values()),
    short_help="Print a script for completion in bash, zsh or fish.",
)
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script for SHELL that completes commands, options, devices and traces."""
    made = get_completion_class(shell)
    assert made is not None, f"click has no completion for {shell}"
    # The method of the base class: bash's own runs bash, which may be missing, for its version.
    complete = made(context.find_root().command, {}, "gpumem", VARIABLE)
    script = ShellComplete.source(complete).strip()
    if as_json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
