"""gpumem.h as programs in C and C++ compile it."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest
from helpers import shared_object

import gpumem
import gpumem.integrations.c
from gpumem.integrations.c._calls import address_of

INCLUDE = Path(sysconfig.get_path("include"))
pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not found"),
    pytest.mark.skipif(not (INCLUDE / "Python.h").exists(), reason="no Python.h here"),
]

# `arena_of` takes an arena out of a capsule; `capsule_of` makes one of a table that only says which
# version it has and how many bytes.
PROGRAM = """\
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <gpumem.h>

static PyObject *arena_of(PyObject *self, PyObject *capsule) {
    gpumem_arena *arena = gpumem_arena_of(capsule);
    (void)self;
    return arena == NULL ? NULL : PyLong_FromVoidPtr(arena);
}

static PyObject *capsule_of(PyObject *self, PyObject *args) {
    static gpumem_calls calls;
    static gpumem_arena arena;
    unsigned int version, missing;
    (void)self;
    if (!PyArg_ParseTuple(args, "II", &version, &missing)) return NULL;
    calls.version = version;
    calls.size = (uint32_t)sizeof(calls) - missing;
    arena.calls = &calls;
    return PyCapsule_New(&arena, GPUMEM_CAPSULE, NULL);
}

static PyMethodDef methods[] = {
    {"arena_of", arena_of, METH_O, ""},
    {"capsule_of", capsule_of, METH_VARARGS, ""},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "c_header", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_c_header(void) { return PyModule_Create(&module); }
"""
LANGUAGES = {"c99": ("c", "-std=c99"), "c++17": ("c++", "-std=c++17")}


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory):
    language, standard = LANGUAGES[request.param]
    options = [standard, "-Wpedantic", f"-I{gpumem.get_include()}", "-isystem", str(INCLUDE)]
    folder = tmp_path_factory.mktemp("c_header")
    built = shared_object.build(folder, PROGRAM, *options, language=language)
    spec = importlib.util.spec_from_file_location("c_header", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_program_without_warnings_takes_the_arena_out_of_its_capsule(program):
    capsule = gpumem.integrations.c.allocator(gpumem.Arena("host"))
    assert program.arena_of(capsule) == address_of(capsule)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        program.arena_of(None)


def test_table_of_another_version_is_refused(program):
    program.arena_of(program.capsule_of(1, 0))
    with pytest.raises(ImportError, match="has version 2 of its C functions"):
        program.arena_of(program.capsule_of(2, 0))


def test_table_that_lacks_members_of_the_header_is_refused(program):
    with pytest.raises(ImportError, match=r"in 88 bytes; .* version 1, in 96 bytes, or more"):
        program.arena_of(program.capsule_of(1, 8))
