/* A queue of jobs and the threads that take from it; see crew.h. */
#include "workers.h"

#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

enum {
    /* How long a thread looks for work before it sleeps, and a caller before it does: to wake one costs
     * about as much as a piece of a copy takes, which come every few tens of microseconds. */
    LOOK_NS = 200000,
    LOOKS = 64 /* between two readings of the clock */
};

static pthread_mutex_t crew_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t crew_wanted = PTHREAD_COND_INITIALIZER;
static CrewJob *crew_first, *crew_last; /* waiting, in the order they were given */
static int32_t crew_waiting; /* jobs in the queue */
static int32_t crew_left; /* jobs that nobody waits for, and that have not run */
static pthread_cond_t crew_none_left = PTHREAD_COND_INITIALIZER;
static int crew_size, crew_idle, crew_looking; /* threads: all, asleep, awake without work */
static __thread int crew_member; /* this thread is one of them */
static pthread_once_t crew_once = PTHREAD_ONCE_INIT, crew_counted = PTHREAD_ONCE_INIT;
static int crew_cpu_count;

/* Around a fork the lock is held, so that the child finds the queue whole: and empties it, since the
 * threads, and the callers that wait for them, are the parent's. */
static void crew_before_fork(void) { pthread_mutex_lock(&crew_lock); }
static void crew_after_fork(void) { pthread_mutex_unlock(&crew_lock); }
static void crew_in_child(void) {
    crew_after_fork(); /* then new ones: threads of the parent may be noted in them as waiting */
    pthread_mutex_init(&crew_lock, NULL);
    pthread_cond_init(&crew_wanted, NULL);
    pthread_cond_init(&crew_none_left, NULL);
    crew_first = crew_last = NULL;
    crew_size = crew_idle = crew_looking = crew_waiting = crew_left = 0;
}
static void crew_watch_forks(void) { pthread_atfork(crew_before_fork, crew_after_fork, crew_in_child); }

/* With the lock held: the first waiting job, off the queue. */
static CrewJob *crew_take(void) {
    CrewJob *job = crew_first;
    if (job == NULL) return NULL;
    crew_first = job->next;
    if (crew_first == NULL) crew_last = NULL;
    __atomic_sub_fetch(&crew_waiting, 1, __ATOMIC_RELAXED);
    return job;
}

/* With the lock held; it is let go for the work itself. A job that nobody waits for may free itself. */
static void crew_do(CrewJob *job) {
    CrewBatch *batch = job->batch;
    pthread_mutex_unlock(&crew_lock);
    job->run(job->work, job->number);
    pthread_mutex_lock(&crew_lock);
    if (batch == NULL) {
        if (--crew_left == 0) pthread_cond_broadcast(&crew_none_left);
        return;
    }
    __atomic_store_n(&job->finished, 1, __ATOMIC_RELEASE);
    pthread_cond_signal(&batch->changed);
}

static void crew_count_cpus(void) {
    cpu_set_t set;
    crew_cpu_count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

int crew_cpus(void) {
    pthread_once(&crew_counted, crew_count_cpus);
    return crew_cpu_count;
}

static int64_t crew_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void crew_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Without the lock: until the word is not zero, or it has taken too long. */
static bool crew_look(const int32_t *word) {
    if (crew_cpus() < 2) return false;
    int64_t end = crew_clock() + LOOK_NS;
    do
        for (int i = 0; i < LOOKS; i++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != 0) return true;
            crew_pause();
        }
    while (crew_clock() < end);
    return false;
}

static void *crew_thread(void *nothing) {
    (void)nothing;
    crew_member = 1;
    pthread_mutex_lock(&crew_lock);
    for (;;) {
        CrewJob *job = crew_take();
        if (job != NULL) {
            crew_do(job);
            continue;
        }
        crew_looking++;
        pthread_mutex_unlock(&crew_lock);
        bool found = crew_look(&crew_waiting);
        pthread_mutex_lock(&crew_lock);
        crew_looking--;
        if (found || crew_first != NULL) continue;
        crew_idle++;
        pthread_cond_wait(&crew_wanted, &crew_lock);
        crew_idle--;
    }
    return NULL;
}

/* With the lock held. A thread that cannot be started is not missed: callers work themselves. */
static void crew_grow(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0) return;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* signals are the program's own threads' */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &attributes, crew_thread, NULL) == 0) crew_size++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

int crew_begin(CrewBatch *batch, void *work) {
    pthread_once(&crew_once, crew_watch_forks);
    batch->work = work;
    return pthread_cond_init(&batch->changed, NULL);
}

void crew_end(CrewBatch *batch) { pthread_cond_destroy(&batch->changed); }

static void crew_push(CrewJob *job, int threads) {
    pthread_mutex_lock(&crew_lock);
    if (job->batch == NULL) crew_left++;
    if (crew_last == NULL)
        crew_first = job;
    else
        crew_last->next = job;
    crew_last = job;
    __atomic_add_fetch(&crew_waiting, 1, __ATOMIC_RELAXED);
    if (crew_waiting > crew_looking) {
        if (crew_waiting > crew_looking + crew_idle && crew_size < threads && crew_size < CREW_MOST)
            crew_grow();
        pthread_cond_signal(&crew_wanted);
    }
    pthread_mutex_unlock(&crew_lock);
}

void crew_give(CrewBatch *batch, CrewJob *job, int64_t number, void (*run)(void *, int64_t), int threads) {
    *job = (CrewJob){.run = run, .work = batch->work, .batch = batch, .number = number};
    crew_push(job, threads);
}

void crew_leave(CrewJob *job, void *work, void (*run)(void *, int64_t)) {
    pthread_once(&crew_once, crew_watch_forks);
    *job = (CrewJob){.run = run, .work = work};
    crew_push(job, 1);
}

/* A crew's own thread works too: else all of them might wait for each other. */
void crew_wait(CrewBatch *batch, CrewJob *job) {
    if (!crew_member && crew_size > 0) crew_look(&job->finished);
    pthread_mutex_lock(&crew_lock);
    while (!job->finished) {
        CrewJob *other = crew_size == 0 || crew_member ? crew_take() : NULL;
        if (other != NULL)
            crew_do(other);
        else
            pthread_cond_wait(&batch->changed, &crew_lock);
    }
    pthread_mutex_unlock(&crew_lock);
}

/* A crew's own thread, inside such a job, would wait for itself. Where no thread could be started
 * the caller does the work. */
void crew_wait_left(void) {
    if (crew_member) return;
    pthread_mutex_lock(&crew_lock);
    while (crew_left != 0) {
        CrewJob *job = crew_size == 0 ? crew_take() : NULL;
        if (job != NULL)
            crew_do(job);
        else
            pthread_cond_wait(&crew_none_left, &crew_lock);
    }
    pthread_mutex_unlock(&crew_lock);
}
