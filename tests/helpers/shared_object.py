"""Programs of tests in C and C++, compiled without a warning."""

from .child import program


def build(folder, source, *options, language="c"):
    """Compile a source to a shared object in a folder, and return its path."""
    built = folder / "program.so"
    compiler = {"c": "gcc", "c++": "g++"}[language]
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *options]
    program(compiler, "-x", language, *options, "-", "-o", built, input=source)
    return str(built)
