/* Stacks of the calling thread: its Python frames, and a table of earlier stacks.
 *
 * A call is identified by its code object's *serial* and its instruction. The serial is stored in
 * the code object (PEP 523) and used once, so a code object at the address of an earlier one
 * differs; no code object is kept alive. No text is made here.
 *
 * Callers of all functions hold the interpreter lock. They run no Python code, except that a
 * garbage collection may run where stack_add_frames makes a frame object: it leaves the table.
 *
 * Included by one module only, since the serials are its own.
 */
#ifndef GPUMEM_STACKS_H
#define GPUMEM_STACKS_H

#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if PY_VERSION_HEX < 0x030C0000 /* their names before 3.12 */
#define PyUnstable_Eval_RequestCodeExtraIndex _PyEval_RequestCodeExtraIndex
#define PyUnstable_Code_GetExtra _PyCode_GetExtra
#define PyUnstable_Code_SetExtra _PyCode_SetExtra
#endif

enum {
    STACK_CALLS = 64,
    MIN_STACKS = 1 << 7,  /* of a table */
    MAX_STACKS = 1 << 16, /* of 40 calls each: 40 MiB */
};

typedef struct Call {
    uint64_t code; /* serial of the code object, from 1; 0: native code */
    uint64_t at;   /* offset of the instruction in its bytecode; native: return address */
} Call;

/* The innermost call first. `codes` are borrowed from frames of the calling thread: they live until
 * the function returns that the thread is inside of. */
typedef struct Stack {
    uint32_t count;
    Call calls[STACK_CALLS];
    PyCodeObject *codes[STACK_CALLS]; /* NULL: native code */
} Stack;

typedef struct KnownStack {
    uint16_t number;
    uint64_t begun; /* recordings that had begun when it was last defined in all */
    uint64_t hash;
    uint32_t count;
    Call calls[];
} KnownStack;

typedef struct StackTable {
    KnownStack **slots; /* open addressing; a power of two, at most half are used */
    uint64_t room;
    uint64_t used;
} StackTable;

static uint64_t stack_serials; /* used so far */
static Py_ssize_t stack_extra; /* index of the serial among the data of a code object */

/* -1: other modules have taken every index. */
static int stack_init(void) {
    stack_extra = PyUnstable_Eval_RequestCodeExtraIndex(NULL);
    return stack_extra < 0 ? -1 : 0;
}

/* ---- calls ---------------------------------------------------------------------------------- */

/* 0: no host memory, and an exception is set. */
static inline uint64_t stack_serial(PyCodeObject *code) {
    void *serial = NULL;
    if (PyUnstable_Code_GetExtra((PyObject *)code, stack_extra, &serial) != 0) return 0;
    if (serial == NULL) {
        serial = (void *)(uintptr_t)++stack_serials;
        if (PyUnstable_Code_SetExtra((PyObject *)code, stack_extra, serial) != 0) return 0;
    }
    return (uint64_t)(uintptr_t)serial;
}

static inline void stack_add(Stack *stack, uint64_t serial, uint64_t at, PyCodeObject *code) {
    stack->calls[stack->count] = (Call){serial, at};
    stack->codes[stack->count++] = code;
}

static inline void stack_add_native(Stack *stack, void *address) {
    stack_add(stack, 0, (uint64_t)(uintptr_t)address, NULL);
}

/* Adds the frames of the calling thread, as many as have room. Returns their number; -1: no host
 * memory, and an exception is set. */
static int stack_add_frames(Stack *stack) {
    uint32_t before = stack->count;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL && stack->count < STACK_CALLS) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        uint64_t serial = stack_serial(code);
        Py_DECREF(code); /* the frame has it */
        if (serial == 0) break;
        stack_add(stack, serial, (uint64_t)PyFrame_GetLasti(frame), code);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return PyErr_Occurred() != NULL ? -1 : (int)(stack->count - before);
}

/* The source line of a call that is not native; 0: it has none. */
static int stack_line(const Stack *stack, uint32_t call) {
    int line = PyCode_Addr2Line(stack->codes[call], (int)stack->calls[call].at);
    return line > 0 ? line : 0;
}

/* ---- the table ------------------------------------------------------------------------------ */

static inline uint64_t stack_hash(const Stack *stack) {
    /* D. Stafford's constants ("Better Bit Mixing", 2011); a comparison separates equal hashes. */
    uint64_t hash = stack->count;
    for (uint32_t i = 0; i < stack->count; i++) {
        hash ^= stack->calls[i].code * 0xBF58476D1CE4E5B9u + stack->calls[i].at;
        hash *= 0x94D049BB133111EBu;
        hash ^= hash >> 32;
    }
    return hash;
}

/* The slot of a stack, or the one that it would have. */
static KnownStack **stack_slot(const StackTable *table, const Stack *stack, uint64_t hash) {
    uint64_t at = hash & (table->room - 1);
    for (KnownStack *known; (known = table->slots[at]) != NULL; at = (at + 1) & (table->room - 1))
        if (known->hash == hash && known->count == stack->count &&
            memcmp(known->calls, stack->calls, stack->count * sizeof(Call)) == 0)
            break;
    return &table->slots[at];
}

/* NULL: not seen yet, or forgotten. */
static inline const KnownStack *stack_find(const StackTable *table, const Stack *stack) {
    return table->room == 0 ? NULL : *stack_slot(table, stack, stack_hash(stack));
}

static int stack_grow(StackTable *table) {
    uint64_t room = table->room == 0 ? 2 * MIN_STACKS : 2 * table->room;
    KnownStack **slots = calloc(room, sizeof(KnownStack *));
    if (slots == NULL) return 0;
    for (uint64_t i = 0; i < table->room; i++) {
        if (table->slots[i] == NULL) continue;
        uint64_t at = table->slots[i]->hash & (room - 1);
        while (slots[at] != NULL) at = (at + 1) & (room - 1);
        slots[at] = table->slots[i];
    }
    free(table->slots);
    table->slots = slots;
    table->room = room;
    return 1;
}

static void stack_forget(StackTable *table) {
    for (uint64_t i = 0; i < table->room; i++) {
        free(table->slots[i]);
        table->slots[i] = NULL;
    }
    table->used = 0;
}

/* Notes the number of a stack, if there is memory for it. A table that is full forgets all others
 * first. Python without an interpreter lock has no table: each stack is a new one. */
static void stack_keep(StackTable *table, const Stack *stack, uint16_t number, uint64_t begun) {
#ifndef Py_GIL_DISABLED
    if (table->used == MAX_STACKS) stack_forget(table);
    if (2 * (table->used + 1) > table->room && !stack_grow(table)) return;
    uint64_t hash = stack_hash(stack);
    KnownStack **slot = stack_slot(table, stack, hash);
    if (*slot == NULL) {
        size_t nbytes = stack->count * sizeof(Call);
        KnownStack *known = malloc(sizeof(KnownStack) + nbytes);
        if (known == NULL) return;
        known->hash = hash;
        known->count = stack->count;
        memcpy(known->calls, stack->calls, nbytes);
        *slot = known;
        table->used++;
    }
    (*slot)->number = number;
    (*slot)->begun = begun;
#endif
}

#endif
