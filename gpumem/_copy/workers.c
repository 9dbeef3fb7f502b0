/* A queue of jobs and the threads that run them; see workers.h. */
#include "workers.h"
#include "lock.h"
#include "threads.h"

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

enum {
    /* How long a worker, or a caller that waits, spins before it sleeps. Waking a thread costs about as
     * much as copying one piece, and pieces come every few tens of microseconds. */
    SPIN_NS = 200000,
    SPINS = 64 /* polls between two readings of the clock */
};

static pthread_mutex_t workers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_added = PTHREAD_COND_INITIALIZER;
static WorkJob *first_job, *last_job; /* queued, in order */
static int32_t waiting_jobs; /* jobs in the queue */
static int32_t detached_jobs; /* jobs without a batch that have not run yet */
static pthread_cond_t none_detached = PTHREAD_COND_INITIALIZER;
static int worker_count, sleeping_workers, spinning_workers; /* workers: all, asleep, awake without work */
static __thread int is_worker; /* whether this thread is a worker */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT, cpus_once = PTHREAD_ONCE_INIT;
static int cpu_count;

/* The lock is held around a fork, so that the child finds a consistent queue. The child empties it: the
 * threads, and the callers that wait for them, stay in the parent. */
static void before_fork(void) { pthread_mutex_lock(&workers_lock); }
static void after_fork(void) { pthread_mutex_unlock(&workers_lock); }
static void in_child(void) {
    after_fork(); /* the locks are made again, because threads of the parent may wait for them */
    pthread_mutex_init(&workers_lock, NULL);
    pthread_cond_init(&work_added, NULL);
    pthread_cond_init(&none_detached, NULL);
    first_job = last_job = NULL;
    worker_count = sleeping_workers = spinning_workers = waiting_jobs = detached_jobs = 0;
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

/* Caller holds `workers_lock`. Removes the first waiting job from the queue. */
static WorkJob *take_job(void) {
    WorkJob *job = first_job;
    if (job == NULL) return NULL;
    first_job = job->next;
    if (first_job == NULL) last_job = NULL;
    __atomic_sub_fetch(&waiting_jobs, 1, __ATOMIC_RELAXED);
    return job;
}

/* Caller holds `workers_lock`; it is released for the work. A detached job may free itself. */
static void run_job(WorkJob *job) {
    WorkBatch *batch = job->batch;
    pthread_mutex_unlock(&workers_lock);
    job->run(job->work, job->number);
    pthread_mutex_lock(&workers_lock);
    if (batch == NULL) {
        if (--detached_jobs == 0) pthread_cond_broadcast(&none_detached);
        return;
    }
    __atomic_store_n(&job->finished, 1, __ATOMIC_RELEASE);
    pthread_cond_signal(&batch->changed);
}

static void count_cpus(void) {
    cpu_set_t set;
    cpu_count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

int worker_cpus(void) {
    pthread_once(&cpus_once, count_cpus);
    return cpu_count;
}

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Caller holds no lock. Spins until the word is not zero; false: it still was after SPIN_NS. */
static bool spin_until_set(const int32_t *word) {
    if (worker_cpus() < 2) return false;
    int64_t end = monotonic_ns() + SPIN_NS;
    do
        for (int i = 0; i < SPINS; i++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != 0) return true;
            lock_pause();
        }
    while (monotonic_ns() < end);
    return false;
}

static void *worker_main(void *nothing) {
    (void)nothing;
    is_worker = 1;
    pthread_mutex_lock(&workers_lock);
    for (;;) {
        WorkJob *job = take_job();
        if (job != NULL) {
            run_job(job);
            continue;
        }
        spinning_workers++;
        pthread_mutex_unlock(&workers_lock);
        bool found = spin_until_set(&waiting_jobs);
        pthread_mutex_lock(&workers_lock);
        spinning_workers--;
        if (found || first_job != NULL) continue;
        sleeping_workers++;
        pthread_cond_wait(&work_added, &workers_lock);
        sleeping_workers--;
    }
    return NULL;
}

/* Caller holds `workers_lock`. If a thread cannot be started, callers run their jobs themselves. */
static void start_worker(void) {
    pthread_t thread;
    if (thread_start(&thread, 1, 0, worker_main, NULL) == 0) worker_count++;
}

int batch_begin(WorkBatch *batch, void *work) {
    pthread_once(&fork_once, watch_forks);
    batch->work = work;
    return pthread_cond_init(&batch->changed, NULL);
}

void batch_end(WorkBatch *batch) { pthread_cond_destroy(&batch->changed); }

static void queue_job(WorkJob *job, int threads) {
    pthread_mutex_lock(&workers_lock);
    if (job->batch == NULL) detached_jobs++;
    if (last_job == NULL)
        first_job = job;
    else
        last_job->next = job;
    last_job = job;
    __atomic_add_fetch(&waiting_jobs, 1, __ATOMIC_RELAXED);
    if (waiting_jobs > spinning_workers) {
        if (waiting_jobs > spinning_workers + sleeping_workers && worker_count < threads &&
            worker_count < MAX_WORKERS)
            start_worker();
        pthread_cond_signal(&work_added);
    }
    pthread_mutex_unlock(&workers_lock);
}

void batch_add(WorkBatch *batch, WorkJob *job, int64_t number, void (*run)(void *, int64_t), int threads) {
    *job = (WorkJob){.run = run, .work = batch->work, .batch = batch, .number = number};
    queue_job(job, threads);
}

void job_detach(WorkJob *job, void *work, void (*run)(void *, int64_t)) {
    pthread_once(&fork_once, watch_forks);
    *job = (WorkJob){.run = run, .work = work};
    queue_job(job, 1);
}

/* A worker that waits runs other jobs, because all workers might wait for each other. */
void batch_wait(WorkBatch *batch, WorkJob *job) {
    if (!is_worker && worker_count > 0) spin_until_set(&job->finished);
    pthread_mutex_lock(&workers_lock);
    while (!job->finished) {
        WorkJob *other = worker_count == 0 || is_worker ? take_job() : NULL;
        if (other != NULL)
            run_job(other);
        else
            pthread_cond_wait(&batch->changed, &workers_lock);
    }
    pthread_mutex_unlock(&workers_lock);
}

/* A worker inside a detached job would wait for itself. If no thread could be started, the caller
 * does the work. */
void jobs_wait_detached(void) {
    if (is_worker) return;
    pthread_mutex_lock(&workers_lock);
    while (detached_jobs != 0) {
        WorkJob *job = worker_count == 0 ? take_job() : NULL;
        if (job != NULL)
            run_job(job);
        else
            pthread_cond_wait(&none_detached, &workers_lock);
    }
    pthread_mutex_unlock(&workers_lock);
}
