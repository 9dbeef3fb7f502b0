/* Runs one operation on a worker, by kind. Caller holds no lock. */
#include "../device/internal.h"

#include <stdlib.h>

static void run_call(Stream *stream, const Op *op) {
    host_park(stream, PARK_CALL, (Point){NULL, 0, 0});
    host_thread.in_host_function = true; /* driver calls are refused in it */
    op->call.function(op->call.data);
    host_thread.in_host_function = false;
    host_park(stream, PARK_NONE, (Point){NULL, 0, 0});
}

static void run_value_wait(Stream *stream, const Op *op) {
    host_park(stream, PARK_VALUE, (Point){NULL, 0, 0});
    host_value_wait(stream, &op->value);
    host_park(stream, PARK_NONE, (Point){NULL, 0, 0});
}

/* A failure is the context's from now on, as a GPU's is. */
static void fail_if(Stream *stream, CUresult result) {
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
        host_context_fail(stream->context, result);
}

void host_op_run(Stream *stream, Op *op) {
    switch (op->kind) {
    case OP_COPY:
        fail_if(stream, host_copy_run(stream, &op->copy));
        free(op->copy.staged);
        break;
    case OP_FILL: fail_if(stream, host_fill_run(stream, &op->fill)); break;
    case OP_CALL: run_call(stream, op); break;
    case OP_WAIT_POINT: host_stream_follow(stream, op->point); break;
    case OP_WAIT_VALUE: run_value_wait(stream, op); break;
    case OP_WRITE_VALUE: fail_if(stream, host_value_write(stream, &op->value)); break;
    case OP_STAMP: host_event_stamp(op->stamp.event, op->stamp.record); break;
    case OP_RUN: fail_if(stream, op->run.run(stream, op->run.data)); break;
    case OP_NOTHING: break;
    }
}

void host_op_drop(Op *op) {
    if (op->kind == OP_COPY) free(op->copy.staged);
    if (op->kind == OP_RUN && op->run.drop) op->run.drop(op->run.data);
}
