"""Shell completion: scripts that a shell accepts, and the words they offer."""

import json
import os
import shutil
import subprocess
import sys

import click
import pytest
from helpers.child import program, python

from gpumem import observe
from gpumem.cli import commands, main

SHELLS = ("bash", "zsh", "fish")
ASK = """
eval "$(gpumem completion bash)"
COMP_WORDS=(gpumem repl) COMP_CWORD=1
_gpumem_completion gpumem
echo "${COMPREPLY[@]}"
complete -p gpumem
"""


def completed(*words):
    """Return what completing the last of `words` offers, as (type, value)."""
    asked = {
        "_GPUMEM_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("gpumem", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = python("-m", "gpumem", env=asked)
    assert done.stderr == ""
    return [tuple(line.split(",", 1)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_is_valid_in_its_shell(capsys, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes_after_sourcing_the_script(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    command = tmp_path / "gpumem"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpumem "$@"\n')
    command.chmod(0o755)
    done = program("bash", "--norc", "-c", ASK, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.stderr == ""
    replies, registered = done.stdout.splitlines()
    assert replies == "replay"
    assert registered.endswith("-F _gpumem_completion gpumem")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_as_json(capsys, shell):
    assert main(["completion", shell, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["shell"] == shell
    assert "_GPUMEM_COMPLETE" in facts["script"]


def test_completion_script_is_printed_without_the_shell(capsys, monkeypatch):
    """It is made on one machine for another, or while an image is built."""
    monkeypatch.setenv("PATH", "")
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [(), ("tcsh",), ("bash", "zsh")])
def test_completion_bad_input_is_one_line_and_exit_code_2(capsys, arguments):
    assert main(["completion", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_completion_offers_commands_options_devices_and_traces():
    assert ("plain", "replay") in completed("")
    assert ("plain", "--max-mem") in completed("replay", "--max")
    assert ("plain", "host:0") in completed("replay", "--device", "h")
    assert completed("replay", "multi")[-1] == ("plain", "multistream_train")
    assert ("file", "./x") in completed("replay", "./x")


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_every_command_completes_its_argument_and_prints_json(name):
    command = commands.commands[name]
    context = click.Context(command)
    for each in command.params:
        if isinstance(each, click.Argument):
            # Processes and nodes are those that this machine has.
            assert each.name in ("process", "name") or each.shell_complete(context, "")
    options = [option for each in command.params for option in each.opts]
    assert "--json" in options or name == "run"


def test_completion_offers_publishing_processes():
    with observe.publish():
        assert ("plain", str(os.getpid())) in completed("top", str(os.getpid())[:1])
        assert str(os.getpid()) not in str(completed("top", "x"))
