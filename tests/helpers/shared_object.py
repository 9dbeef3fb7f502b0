"""Programs of tests in C and C++, compiled without a warning."""

import subprocess


def build(folder, source, *options, language="c"):
    """Compile a source to a shared object in a folder, and return its path."""
    built = folder / "program.so"
    compiler = {"c": "gcc", "c++": "g++"}[language]
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options]
    done = subprocess.run(
        [compiler, "-x", language, *options, "-", "-o", str(built)],
        input=source,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(built)
