"""The command, run in the process of a test."""

import pytest

from gpumem.cli import main


@pytest.fixture
def gpumem_command(capsys):
    """Run the command in this process; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        code = main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        return code, out, err

    return run
