/* A C library that works in an arena made in Python: a ring of frames on two streams.
 *
 * c_program.py compiles it, hands it the arena and runs it. It is a Python module so that Python can
 * call it; gpumem.h needs no more than the pointer in the capsule.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <gpumem.h>

enum { FRAMES = 8, FRAME_BYTES = 1 << 20 };

static PyObject *refused(gpumem_arena *arena, int status) {
    return PyErr_Format(PyExc_RuntimeError, "gpumem: %s", arena->calls->text(status));
}

/* run(capsule, producer, consumer): the streams' handles as int. Returns what the arena holds. */
static PyObject *run(PyObject *self, PyObject *args) {
    PyObject *capsule;
    unsigned long long producer, consumer;
    (void)self;
    if (!PyArg_ParseTuple(args, "OKK", &capsule, &producer, &consumer)) return NULL;
    gpumem_arena *arena = gpumem_arena_of(capsule);
    if (arena == NULL) return NULL;
    void *writes = (void *)(uintptr_t)producer, *reads = (void *)(uintptr_t)consumer;

    int status = GPUMEM_OK;
    Py_BEGIN_ALLOW_THREADS /* nothing below needs the interpreter */
    for (int i = 0; i < FRAMES && status == GPUMEM_OK; i++) {
        void *frame;
        status = arena->calls->allocate(arena, FRAME_BYTES, 256, writes, &frame);
        if (status != GPUMEM_OK) break;
        /* A kernel of the producer would write the frame here, and one of the consumer read it: the
           block is handed out again only behind both. */
        status = arena->calls->record_stream(arena, frame, reads);
        int freed = arena->calls->deallocate(arena, frame);
        if (status == GPUMEM_OK) status = freed;
    }
    Py_END_ALLOW_THREADS
    if (status != GPUMEM_OK) return refused(arena, status);

    gpumem_stats stats = {sizeof(stats), 0, 0, 0, 0, 0, 0, 0};
    status = arena->calls->stats(arena, &stats);
    if (status != GPUMEM_OK) return refused(arena, status);
    return Py_BuildValue("{sKsKsK}", "allocations", (unsigned long long)stats.allocations,
                         "in_use", (unsigned long long)stats.in_use,
                         "reserved", (unsigned long long)stats.reserved);
}

/* fail(capsule): what a refusal looks like. */
static PyObject *fail(PyObject *self, PyObject *capsule) {
    gpumem_arena *arena = gpumem_arena_of(capsule);
    void *block;
    (void)self;
    if (arena == NULL) return NULL;
    return refused(arena, arena->calls->allocate(arena, (size_t)1 << 40, 0, NULL, &block));
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, "Pass frames from one stream to another."},
    {"fail", fail, METH_O, "Ask for a tebibyte."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "c_program", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_c_program(void) {
    return PyModule_Create(&module);
}
