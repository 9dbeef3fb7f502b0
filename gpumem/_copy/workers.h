/* Threads that move bytes, shared by everything that copies.
 *
 * A job is a short piece of CPU work that waits for nothing, so jobs of several callers never block
 * each other. Threads start when they are first wanted, sleep between jobs, hold no interpreter and
 * call no driver; they are detached and end with the process. A fork's child starts with none.
 */
#ifndef GPUMEM_CREW_H
#define GPUMEM_CREW_H

#include <pthread.h>
#include <stdint.h>

enum { CREW_MOST = 16 }; /* threads */

/* Jobs that one caller waits for. */
typedef struct CrewBatch {
    pthread_cond_t changed;
    void *work;
} CrewBatch;

/* The caller's memory, until it has waited for it. */
typedef struct CrewJob {
    struct CrewJob *next;
    void (*run)(void *work, int64_t number);
    void *work;
    CrewBatch *batch; /* NULL: nobody waits for it */
    int64_t number;
    int32_t finished;
} CrewJob;

/* Returns an errno if the host has no memory for it. */
int crew_begin(CrewBatch *batch, void *work);
/* Every job of the batch must have been waited for. */
void crew_end(CrewBatch *batch);
/* Let one of at most `threads` threads do run(batch->work, number), after what was given before. */
void crew_give(CrewBatch *batch, CrewJob *job, int64_t number, void (*run)(void *, int64_t), int threads);
/* Until the job is finished. Works itself if there are no threads. */
void crew_wait(CrewBatch *batch, CrewJob *job);
/* The same for one that nobody waits for; run(work, 0) may free the job. Never blocks. */
void crew_leave(CrewJob *job, void *work, void (*run)(void *, int64_t));
/* Until all jobs that were left have run. */
void crew_wait_left(void);
/* CPUs that this process may use, as it was first asked. */
int crew_cpus(void);

#endif
