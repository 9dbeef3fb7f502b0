/* Threads of gpumem: they handle no signal, because signals are for the program's own threads. */
#ifndef GPUMEM_THREADS_H
#define GPUMEM_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stddef.h>

/* `stack_bytes`: 0 is the process's default. Returns an errno. */
static inline int thread_start(pthread_t *thread, int detached, size_t stack_bytes,
                               void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    sigset_t all, before;
    int code = pthread_attr_init(&attributes);
    if (code != 0) return code;
    if (detached) pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (stack_bytes != 0) pthread_attr_setstacksize(&attributes, stack_bytes);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = pthread_create(thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return code;
}

#endif
