/* Faults on demand, and the costs that calls have on an H200. Off: one relaxed load a call. */
#include "../device/internal.h"

#include <string.h>

_Atomic bool host_faults_armed; /* a rule, a delay or the costs are on */

enum { RULES = 32, ANY_CALL = -1 };
typedef struct Rule {
    int call;             /* Call, or ANY_CALL */
    uint64_t seen;        /* calls that the rule has counted */
    uint64_t first, last; /* of those, which fail */
    CUresult error;
    bool of_thread;       /* only calls of `thread` count */
    pthread_t thread;
} Rule;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf; guards all below */
static Rule rules[RULES];
static int rule_count;
static uint64_t records_to_delay, record_delay; /* 0: none; 1: the next */
static _Atomic bool costs_on;
static int last_fault; /* Call + 1; 0: none */

/* ---- costs ---- */

/* Nanoseconds a call, or a handle where one call can name many. */
static const uint32_t costs[HOST_CALL_COUNT] = {
    [HOST_CALL_MemAlloc] = 1100,       [HOST_CALL_MemFree] = 1100,
    [HOST_CALL_MemAllocAsync] = 500,   [HOST_CALL_MemAllocFromPoolAsync] = 500,
    [HOST_CALL_MemFreeAsync] = 500,    [HOST_CALL_EventCreate] = 45,
    [HOST_CALL_EventDestroy] = 45,     [HOST_CALL_EventRecord] = 93,
    [HOST_CALL_EventQuery] = 74,       [HOST_CALL_StreamWaitEvent] = 93,
    [HOST_CALL_MemAddressReserve] = 3000, [HOST_CALL_MemCreate] = 9400,
    [HOST_CALL_MemMap] = 1800,         [HOST_CALL_MemSetAccess] = 26600,
    [HOST_CALL_MemUnmap] = 15000,      [HOST_CALL_MemRelease] = 10900,
};

static void spend(uint64_t nanoseconds) {
    if (host_clock_is_virtual()) {
        host_clock_advance_to(host_now() + nanoseconds);
        return;
    }
    uint64_t end = host_now() + nanoseconds;
    while (host_now() < end) {
    }
}

void host_spend(Call call, size_t handles) {
    if (atomic_load(&costs_on) && costs[call] > 0) spend(costs[call] * handles);
}

/* ---- rules ---- */

static bool rule_applies(Rule *rule, Call call) {
    bool text = call == HOST_CALL_GetErrorName || call == HOST_CALL_GetErrorString;
    if (rule->call == ANY_CALL ? text : rule->call != (int)call) return false;
    if (rule->of_thread && !pthread_equal(rule->thread, pthread_self())) return false;
    rule->seen++;
    return rule->seen >= rule->first && rule->seen <= rule->last;
}

CUresult host_fault(Call call) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < rule_count; i++) /* every rule counts, the first that applies wins */
        if (rule_applies(&rules[i], call) && result == CUDA_SUCCESS) result = rules[i].error;
    if (result != CUDA_SUCCESS) last_fault = (int)call + 1;
    pthread_mutex_unlock(&lock);
    host_spend(call, 1);
    return result;
}

static void rearm(void) { /* caller holds `lock` */
    atomic_store(&host_faults_armed, rule_count > 0 || records_to_delay > 0 || atomic_load(&costs_on));
}

static int add_rule(const char *function, uint64_t call, uint64_t times, int error, bool of_thread) {
    int number = function ? host_call_number(function) : ANY_CALL;
    if (call == 0 || error == CUDA_SUCCESS || (function && number < 0)) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool room = rule_count < RULES;
    uint64_t last = times == 0 || times > UINT64_MAX - call ? UINT64_MAX : call + times - 1;
    if (room) rules[rule_count++] = (Rule){number, 0, call, last, (CUresult)error, of_thread, pthread_self()};
    rearm();
    pthread_mutex_unlock(&lock);
    return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

int hostdev_fail(const char *function, uint64_t call, uint64_t times, int error) {
    return add_rule(function, call, times, error, false);
}

int hostdev_fail_here(const char *function, uint64_t call, uint64_t times, int error) {
    return add_rule(function, call, times, error, true);
}

/* ---- late events, lost devices ---- */

int hostdev_delay_record(uint64_t record, uint64_t nanoseconds) {
    if (record == 0) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    records_to_delay = record;
    record_delay = nanoseconds;
    rearm();
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

uint64_t host_record_delay(void) {
    pthread_mutex_lock(&lock);
    bool now = records_to_delay == 1;
    if (records_to_delay > 0) records_to_delay--;
    if (now) rearm();
    uint64_t delay = now ? record_delay : 0;
    pthread_mutex_unlock(&lock);
    return delay;
}

int hostdev_lose_device(int ordinal, int error) {
    host_setup();
    CUresult result = host_device_check(ordinal);
    if (result != CUDA_SUCCESS || error == CUDA_SUCCESS) return CUDA_ERROR_INVALID_VALUE;
    host_context_fail(&host.devices[ordinal].context, (CUresult)error);
    return CUDA_SUCCESS;
}

void hostdev_clear_faults(void) {
    pthread_mutex_lock(&lock);
    rule_count = 0;
    records_to_delay = 0;
    last_fault = 0;
    rearm();
    pthread_mutex_unlock(&lock);
}

const char *hostdev_last_fault(void) {
    pthread_mutex_lock(&lock);
    const char *name = last_fault ? driver_entries[last_fault - 1].name : "";
    pthread_mutex_unlock(&lock);
    return name;
}

void hostdev_use_h200_costs(int on) {
    pthread_mutex_lock(&lock);
    atomic_store(&costs_on, on != 0);
    rearm();
    pthread_mutex_unlock(&lock);
}
