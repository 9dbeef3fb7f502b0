/* Who called: return addresses of the calling thread, the innermost first.
 *
 * By the unwinder that every C++ program has, so that it needs no debug information and no libc but
 * any; addresses become names only when a report is read.
 */
#ifndef GPUMEM_CALLERS_H
#define GPUMEM_CALLERS_H

#include <stdint.h>
#include <unwind.h>

typedef struct Callers {
    void **frames;
    uint32_t count, most;
} Callers;

static inline _Unwind_Reason_Code callers_add(struct _Unwind_Context *at, void *to) {
    Callers *callers = to;
    if (callers->count == callers->most) return _URC_END_OF_STACK;
    callers->frames[callers->count++] = (void *)_Unwind_GetIP(at);
    return _URC_NO_REASON;
}

static inline uint32_t callers_of_this(void **frames, uint32_t most) {
    Callers callers = {frames, 0, most};
    _Unwind_Backtrace(callers_add, &callers);
    return callers.count;
}

#endif
