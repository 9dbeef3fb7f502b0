/* Graphs: captured operations that can be launched any number of times.
 *
 * An executable is a counted, unchanging list of operations; a launch is one operation
 * in a stream that runs them in the order of capture. Branches are not run side by side.
 */
#include "../device/internal.h"

#include <stdlib.h>
#include <string.h>

bool host_nodes_add(Nodes *nodes, const Op *op) {
    if (nodes->count == nodes->capacity) {
        size_t capacity = nodes->capacity ? 2 * nodes->capacity : 16;
        Op *grown = realloc(nodes->at, capacity * sizeof *grown);
        if (!grown) return false;
        nodes->at = grown;
        nodes->capacity = capacity;
    }
    nodes->at[nodes->count++] = *op;
    return true;
}

/* ---- user objects: destroyed with their last reference ---- */

static void user_object_release(UserObject *object, unsigned count) {
    if (atomic_fetch_sub(&object->references, count) != count) return;
    uint64_t handle = atomic_load(&object->object.handle);
    object->destroy(object->data);
    host_object_hide(&host.user_objects, object, handle);
    host_object_give(&host.user_objects, object);
}

static void objects_release(UserObject **objects, size_t count) {
    for (size_t i = 0; i < count; i++) user_object_release(objects[i], 1);
    free(objects);
}

CUresult host_cuUserObjectCreate(CUuserObject *out, void *pointer, CUhostFn destroy,
                                 unsigned int references, unsigned int flags) {
    ENTER(UserObjectCreate);
    if (!out || !destroy || references == 0 || references > INT32_MAX || flags != 1)
        return CUDA_ERROR_INVALID_VALUE; /* 1: the destructor may run on any thread */
    UserObject *object = host_object_take(&host.user_objects);
    if (!object) return CUDA_ERROR_OUT_OF_MEMORY;
    object->data = pointer;
    object->destroy = destroy;
    atomic_store(&object->references, references);
    *out = (CUuserObject)(uintptr_t)host_object_publish(&host.user_objects, object);
    return CUDA_SUCCESS;
}

CUresult host_cuUserObjectRelease(CUuserObject handle, unsigned int count) {
    ENTER(UserObjectRelease);
    UserObject *object = host_object_find(&host.user_objects, (uint64_t)(uintptr_t)handle);
    if (!object || count == 0 || count > atomic_load(&object->references)) return CUDA_ERROR_INVALID_VALUE;
    user_object_release(object, count);
    return CUDA_SUCCESS;
}

/* ---- graphs ---- */

CUresult host_graph_new(uint64_t *handle) {
    Graph *graph = host_object_take(&host.graphs);
    if (!graph) return CUDA_ERROR_OUT_OF_MEMORY;
    graph->nodes = (Nodes){NULL, 0, 0};
    graph->objects = NULL;
    graph->object_count = 0;
    *handle = host_object_publish(&host.graphs, graph);
    return CUDA_SUCCESS;
}

void host_graph_fill(uint64_t handle, Nodes *nodes) {
    Graph *graph = host_object_lock(&host.graphs, (CUgraph)(uintptr_t)handle);
    if (!graph) {
        free(nodes->at);
        return;
    }
    graph->nodes = *nodes;
    pthread_mutex_unlock(&graph->object.lock);
}

CUresult host_cuGraphCreate(CUgraph *graph, unsigned int flags) {
    ENTER(GraphCreate);
    uint64_t handle;
    if (!graph || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    HOST_TRY(host_graph_new(&handle));
    *graph = (CUgraph)(uintptr_t)handle;
    return CUDA_SUCCESS;
}

CUresult host_cuGraphDestroy(CUgraph handle) {
    ENTER(GraphDestroy);
    Graph *graph = HOST_LOCKED(graphs, handle, CUDA_ERROR_INVALID_VALUE);
    UserObject **objects = graph->objects;
    size_t count = graph->object_count;
    free(graph->nodes.at);
    graph->nodes = (Nodes){NULL, 0, 0};
    graph->objects = NULL;
    host_object_end(&host.graphs, graph);
    objects_release(objects, count);
    return CUDA_SUCCESS;
}

/* A node's handle is made of the graph's and the node's index. No call accepts it. */
CUresult host_cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    ENTER(GraphGetNodes);
    if (!count) return CUDA_ERROR_INVALID_VALUE;
    Graph *graph = HOST_LOCKED(graphs, handle, CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->nodes.count ? (CUgraphNode)((uintptr_t)handle + i + 1) : NULL;
    if (!nodes || *count > graph->nodes.count) *count = graph->nodes.count;
    pthread_mutex_unlock(&graph->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuGraphRetainUserObject(CUgraph handle, CUuserObject object_handle, unsigned int count,
                                      unsigned int flags) {
    enum { MOVE = 1 }; /* the caller's references become the graph's */
    ENTER(GraphRetainUserObject);
    UserObject *object = host_object_find(&host.user_objects, (uint64_t)(uintptr_t)object_handle);
    if (!object || count == 0 || flags > MOVE) return CUDA_ERROR_INVALID_VALUE;
    Graph *graph = HOST_LOCKED(graphs, handle, CUDA_ERROR_INVALID_VALUE);
    size_t total = graph->object_count + count;
    UserObject **grown = realloc(graph->objects, total * sizeof *grown);
    if (grown) { /* one entry per reference, so that each is released by itself */
        graph->objects = grown;
        while (graph->object_count < total) grown[graph->object_count++] = object;
        if (!(flags & MOVE)) atomic_fetch_add(&object->references, count);
    }
    pthread_mutex_unlock(&graph->object.lock);
    return grown ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- executables ---- */

static void program_drop(void *pointer) {
    Program *program = pointer;
    if (atomic_fetch_sub(&program->references, 1) > 1) return;
    objects_release(program->objects, program->object_count);
    free(program);
}

/* Copies the graph, which may be destroyed or changed while the copy runs. Caller holds the
 * graph's lock. */
static Program *program_new(const Graph *graph) {
    size_t bytes = graph->nodes.count * sizeof(Op);
    Program *program = malloc(sizeof *program + bytes);
    UserObject **objects = malloc((graph->object_count + 1) * sizeof *objects);
    if (!program || !objects) {
        free(program);
        free(objects);
        return NULL;
    }
    atomic_init(&program->references, 1);
    program->count = graph->nodes.count;
    if (bytes) memcpy(program->ops, graph->nodes.at, bytes);
    for (size_t i = 0; i < graph->object_count; i++) {
        objects[i] = graph->objects[i];
        atomic_fetch_add(&objects[i]->references, 1);
    }
    program->objects = objects;
    program->object_count = graph->object_count;
    return program;
}

CUresult host_cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    enum { AUTO_FREE_ON_LAUNCH = 1, USE_NODE_PRIORITY = 8 }; /* neither changes anything here */
    ENTER_CONTEXT(GraphInstantiateWithFlags);
    if (!out || (flags & ~(unsigned long long)(AUTO_FREE_ON_LAUNCH | USE_NODE_PRIORITY)))
        return CUDA_ERROR_INVALID_VALUE;
    Graph *graph = HOST_LOCKED(graphs, handle, CUDA_ERROR_INVALID_VALUE);
    Program *program = program_new(graph);
    pthread_mutex_unlock(&graph->object.lock);
    GraphExec *exec = program ? host_object_take(&host.graph_execs) : NULL;
    if (!exec) {
        if (program) program_drop(program);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&exec->object.lock);
    exec->program = program;
    *out = (CUgraphExec)(uintptr_t)host_object_publish(&host.graph_execs, exec);
    pthread_mutex_unlock(&exec->object.lock);
    return CUDA_SUCCESS;
}

CUresult host_cuGraphExecDestroy(CUgraphExec handle) {
    ENTER(GraphExecDestroy);
    GraphExec *exec = HOST_LOCKED(graph_execs, handle, CUDA_ERROR_INVALID_VALUE);
    Program *program = exec->program;
    host_object_end(&host.graph_execs, exec);
    program_drop(program);
    return CUDA_SUCCESS;
}

static CUresult program_run(Stream *stream, void *data) {
    Program *program = data;
    for (size_t i = 0; i < program->count && !host_stop_requested(stream); i++) {
        Op op = program->ops[i];
        host_op_run(stream, &op);
    }
    program_drop(program);
    return CUDA_SUCCESS;
}

CUresult host_cuGraphLaunch(CUgraphExec handle, CUstream stream) {
    Context *context = ENTER_STREAM(GraphLaunch, stream);
    Stream *found;
    GraphExec *exec = HOST_LOCKED(graph_execs, handle, CUDA_ERROR_INVALID_VALUE);
    Program *program = exec->program;
    atomic_fetch_add(&program->references, 1);
    pthread_mutex_unlock(&exec->object.lock);
    Op op = {.kind = OP_RUN, .run = {program_run, program_drop, program}};
    CUresult result = host_stream_begin(context, stream, &found);
    if (result == CUDA_SUCCESS) {
        result = host_stream_push(found, &op);
        if (result == CUDA_SUCCESS) WATCH(host_order_program(found, program));
        host_stream_end(found);
    }
    if (result != CUDA_SUCCESS) program_drop(program); /* else the operation owns the reference */
    return result;
}
