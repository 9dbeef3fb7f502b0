/* The functions of functions.h. They ignore the arguments that a caller passes. */
#include "null.h"
#include "functions.h"

#define HARMLESS(name)     \
    EXPORT int name(void); \
    int name(void) { return 0; }

#define HANDLE(name)              \
    EXPORT int name(void **made); \
    int name(void **made) {       \
        *made = new_handle();     \
        return 0;                 \
    }

#define REFUSED(name)      \
    EXPORT int name(void); \
    int name(void) { return null_refuse(#name); }

NULL_HARMLESS(HARMLESS)
NULL_HANDLES(HANDLE)
NULL_REFUSED_FUNCTIONS(REFUSED)

#define ROW(name) #name,
static const char *const harmless[] = {NULL_HARMLESS(ROW) NULL_HANDLES(ROW) NULL};
static const char *const refused[] = {NULL_REFUSED_FUNCTIONS(ROW) NULL};

const char *const *null_functions(int is_refused) { return is_refused ? refused : harmless; }
