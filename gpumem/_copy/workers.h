/* Worker threads that copy bytes, shared by all copies.
 *
 * A job is a short piece of CPU work that waits for nothing, so jobs of several callers never block
 * each other. Threads start when they are first needed, sleep between jobs, and call neither the
 * interpreter nor the driver; they are detached and end with the process. A forked child starts with
 * none.
 */
#ifndef GPUMEM_WORKERS_H
#define GPUMEM_WORKERS_H

#include <pthread.h>
#include <stdint.h>

enum { MAX_WORKERS = 16 }; /* threads */

/* Jobs that one caller waits for. */
typedef struct WorkBatch {
    pthread_cond_t changed;
    void *work;
} WorkBatch;

/* In the caller's memory, until batch_wait has returned. */
typedef struct WorkJob {
    struct WorkJob *next;
    void (*run)(void *work, int64_t number);
    void *work;
    WorkBatch *batch; /* NULL: detached, no caller waits for it */
    int64_t number;
    int32_t finished;
} WorkJob;

/* Returns 0, or an errno if the host has no memory. */
int batch_begin(WorkBatch *batch, void *work);
/* After batch_wait for every job of the batch. */
void batch_end(WorkBatch *batch);
/* Queues run(batch->work, number) for one of at most `threads` workers. */
void batch_add(WorkBatch *batch, WorkJob *job, int64_t number, void (*run)(void *, int64_t), int threads);
/* Waits until the job is finished; runs it itself if there are no workers. */
void batch_wait(WorkBatch *batch, WorkJob *job);
/* Queues run(work, 0), which may free the job. Never blocks. */
void job_detach(WorkJob *job, void *work, void (*run)(void *, int64_t));
/* Waits until all detached jobs have run. */
void jobs_wait_detached(void);
/* CPUs that this process may use, counted at the first call. */
int worker_cpus(void);

#endif
