/* onnx_remat::Fused: an op of ONNX Runtime whose kernels are machine code that this process was given. FusedOnDevice: the
 * same on a CUDA device.
 *
 * Python opens a table of kernels under a secret that it has just drawn, loads a model whose Fused nodes name a kernel
 * by that secret and its position in the table, and closes the table again. A node with any other secret has no kernel,
 * so a file from elsewhere can name none, and never an address. Loaded nodes keep the table's memory until they go.
 *
 * A kernel computes elements [begin, end) of its outputs; ONNX Runtime's own threads take `grain` elements at a time.
 * Before every call, the number of inputs and each one's element type and shape are compared with what the kernel was
 * compiled for; outputs are asked for with the shapes that it was compiled for.
 *
 * A kernel without code of its own is a convolution, see convolution.c, or runs on a CUDA device: then Python has loaded
 * it with the driver, and a node launches it on ONNX Runtime's stream.
 *
 * onnx_remat::Copy is found in the same table: it copies a value between a device and the host alongside the kernels, on a
 * stream of its own, or lets ONNX Runtime's stream wait for such a copy.
 *
 * An output may lie exactly where an input does that is read element by element: kernels read an element of every
 * input before they write that element of any output.
 *
 * ONNX Runtime's C interface only grows at its end, so its tables are indexed by number: no header is needed, and
 * versions from 1.18 on work. */
#define _DEFAULT_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define INSIDE __attribute__((visibility("hidden"))) /* of the library */

enum { COPIES = -2000 }; /* in place of a kernel's threads, of one that copies */
enum { API_VERSION = 18, MOST = 512, MOST_RANK = 16, VARIADIC = 2, ATTRIBUTE_INT = 1, FAIL = 1, INVALID_GRAPH = 10 };

typedef struct Status Status; /* NULL: all went well */
typedef void (*Function)(void);
typedef int (*Body)(void **inputs, void **outputs, const int64_t *sizes, int64_t begin, int64_t end);
typedef int (*Launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                      void *stream, void **arguments, void **more); /* cuLaunchKernel */

/* A copy, or one to wait for, and the CUDA runtime's functions for it. It starts when ONNX Runtime's stream reaches the
 * place where it was issued. */
enum { TO_HOST = 2, TO_DEVICE = 1, WAITS = 0 }; /* the first two as cudaMemcpyKind */
typedef struct {
    int64_t kind;
    char *host;
    size_t bytes;
    void *stream, *issued, *done; /* two events: where it was issued, and that it is done */
    int (*record)(void *event, void *stream);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*copy)(void *to, const void *from, size_t bytes, int kind, void *stream);
} Copy;

typedef struct Table Table;
typedef struct {
    Table *table;
    Body body; /* NULL: a convolution, or a kernel of a device */
    Launch launch; /* NULL: not of a device */
    void *function; /* the driver's */
    int64_t size, grain; /* elements to compute, and how many of them at a time: of a device, in a block */
    size_t inputs, outputs;
    const int64_t *reads;  /* of each input its element type, its rank and its dimensions */
    const int64_t *shapes; /* of each output, likewise */
    const int64_t *sizes;  /* for the body */
    int64_t *numbers;      /* the memory of these three */
    Copy copy;
} Kernel;
typedef struct Owned Owned;
struct Owned { /* what goes when the table goes */
    Owned *next;
    void *object;
    int (*destroy)(void *object);
};
struct Table {
    Table *next;
    Owned *owned;
    int64_t secret;
    atomic_long users; /* the list below, and every node that was loaded */
    void *code;
    size_t bytes, count;
    Kernel kernels[];
};
typedef struct {
    const Kernel *kernel;
    void **inputs, **outputs;
    atomic_int failed;
} Job;

INSIDE int convolution_before(void **inputs, void **outputs, const int64_t *sizes);
INSIDE int convolution_part(void **inputs, void **outputs, const int64_t *sizes, int64_t part);
INSIDE int convolution_after(void **inputs, void **outputs, const int64_t *sizes);
INSIDE extern const size_t convolution_sizes;

static const Function *api; /* struct OrtApi */
static Table *tables;
static atomic_flag locked = ATOMIC_FLAG_INIT; /* guards `tables`; held for a few instructions */

#define CALL(slot, ...) ((Status * (*)(__VA_ARGS__)) api[slot])
#define failure CALL(0, int, const char *)
#define create_domain CALL(26, const char *, void **)
#define add_op CALL(27, void *, const void *)
#define add_domain CALL(28, void *, void *)
#define tensor_data CALL(51, const void *, void **)
#define new_shape CALL(57, void **)
#define set_type CALL(58, void *, int)
#define set_dims CALL(59, void *, const int64_t *, size_t)
#define get_type CALL(60, const void *, int *)
#define get_rank CALL(61, const void *, size_t *)
#define get_dims CALL(62, const void *, int64_t *, size_t)
#define get_shape CALL(65, const void *, void **)
#define read_int CALL(86, const void *, const char *, int64_t *)
#define input_count CALL(88, const void *, size_t *)
#define output_count CALL(89, const void *, size_t *)
#define get_input CALL(90, const void *, size_t, const void **)
#define gpu_stream CALL(193, const void *, void **)
#define get_output CALL(91, void *, size_t, const int64_t *, size_t, void **)
#define free_shape ((void (*)(void *))api[99])
#define find_attribute CALL(269, const void *, const char *, const void **)
#define infer_output CALL(270, void *, size_t, const void *)
#define read_attribute CALL(272, const void *, int, void *, size_t, size_t *)
#define parallel_for CALL(274, const void *, void (*)(void *, size_t), size_t, size_t, void *)
#define TRY(call) do { Status *failed = (call); if (failed) return failed; } while (0)

static void lock(void) { while (atomic_flag_test_and_set_explicit(&locked, memory_order_acquire)) {} }
static void unlock(void) { atomic_flag_clear_explicit(&locked, memory_order_release); }

static void release(Table *table) {
    if (atomic_fetch_sub(&table->users, 1) > 1) return;
    for (size_t i = 0; i < table->count; i++) free(table->kernels[i].numbers);
    for (Owned *each = table->owned, *next; each; each = next) {
        next = each->next;
        each->destroy(each->object);
        free(each);
    }
    munmap(table->code, table->bytes);
    free(table);
}

/* The table of a secret, with one more user; NULL if there is none. */
static Table *find(int64_t secret) {
    lock();
    Table *table = tables;
    while (table && table->secret != secret) table = table->next;
    if (table) atomic_fetch_add(&table->users, 1);
    unlock();
    return table;
}

/* ---- for Python ---- */

/* Open a table of `count` kernels over a copy of their code. 0, or -1: no memory, none that may be executed. */
int fused_open(int64_t secret, const void *code, size_t bytes, size_t count) {
    Table *table = calloc(1, sizeof *table + count * sizeof *table->kernels);
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!table || copy == MAP_FAILED || !memcpy(copy, code, bytes) || mprotect(copy, bytes, PROT_READ | PROT_EXEC)) {
        if (copy != MAP_FAILED) munmap(copy, bytes);
        free(table);
        return -1;
    }
    table->secret = secret;
    table->users = 1; /* the list */
    table->code = copy;
    table->bytes = bytes;
    table->count = count;
    lock();
    table->next = tables, tables = table;
    unlock();
    return 0;
}

/* Describe one kernel by `count` numbers: offset of its code, elements, grain, inputs, outputs, then reads, shapes and
 * sizes as in Kernel; a convolution has -1 for the offset, and parts for elements, a kernel of a device less: its
 * threads, a copy COPIES. 0, or -1: no such place in the table, no memory, or the numbers do not add up. A kernel of a
 * device that joins several, each with as many inputs and outputs, has minus their number for grain, and blocks for
 * elements; its sizes are the first block of each, then the elements of each. */
int fused_add(int64_t secret, size_t handle, const int64_t *numbers, size_t count) {
    Table *table = find(secret);
    if (!table) return -1;
    Kernel *kernel = handle < table->count ? &table->kernels[handle] : NULL;
    int64_t *copy = count ? malloc(count * sizeof *copy) : NULL;
    int calls = count && numbers[0] == -1, device = count && ((numbers[0] < -1 && numbers[0] >= -1024) || numbers[0] == COPIES);
    int64_t joins = device && count > 2 && numbers[2] < 0 && numbers[2] >= -MOST ? -numbers[2] : 0;
    int good = kernel && !kernel->numbers && copy && count >= 5 &&
               (calls || device || (numbers[0] >= 0 && (size_t)numbers[0] < table->bytes)) && numbers[1] > 0 && (numbers[2] > 0 || joins) && numbers[3] >= 0 && numbers[3] <= MOST && numbers[4] > 0 &&
               numbers[4] <= MOST;
    size_t shapes = good ? 5 : 0, at;
    for (int64_t i = 0; good && i < numbers[3]; i++) {
        good = shapes + 2 <= count && numbers[shapes + 1] >= 0 && numbers[shapes + 1] <= MOST_RANK;
        if (good) shapes += 2 + (size_t)numbers[shapes + 1];
    }
    at = shapes;
    for (int64_t i = 0; good && i < numbers[4]; i++) {
        good = at + 2 <= count && numbers[at + 1] >= 0 && numbers[at + 1] <= MOST_RANK;
        int64_t elements = 1;
        for (int64_t d = 0; good && d < numbers[at + 1]; d++)
            if ((good = at + 2 + (size_t)d < count)) elements *= numbers[at + 2 + (size_t)d];
        if ((good = good && (calls || joins || elements % numbers[1] == 0))) at += 2 + (size_t)numbers[at + 1];
    }
    if (good && joins) good = numbers[3] % joins == 0 && numbers[4] % joins == 0 && at + 2 * (size_t)joins <= count;
    const int64_t *shape = numbers + shapes;
    for (int64_t i = 0; good && joins && i < numbers[4]; i++, shape += 2 + shape[1]) {
        int64_t elements = 1, own = numbers[at + (size_t)(joins + i / (numbers[4] / joins))];
        for (int64_t d = 0; d < shape[1]; d++) elements *= shape[2 + d];
        good = own > 0 && elements % own == 0;
    }
    good = good && (calls ? numbers[4] == 2 && at + convolution_sizes == count : at <= count);
    if (good) {
        memcpy(copy, numbers, count * sizeof *copy);
        *kernel = (Kernel){table, NULL, NULL, NULL, copy[1], joins ? 1 : copy[2], (size_t)copy[3], (size_t)copy[4],
                           copy + 5, copy + shapes, copy + at, copy, {0}};
        if (!calls && !device) kernel->body = (Body)((char *)table->code + copy[0]);
    } else {
        free(copy);
    }
    release(table);
    return good ? 0 : -1;
}

/* Pass the driver's function for a kernel of a device, and the driver's cuLaunchKernel. 0, or -1: no such kernel. */
int fused_on_device(int64_t secret, size_t handle, void *function, void *launch) {
    Table *table = find(secret);
    if (!table) return -1;
    Kernel *kernel = handle < table->count ? &table->kernels[handle] : NULL;
    int good = kernel && kernel->numbers && kernel->numbers[0] < -1 && kernel->numbers[0] != COPIES && function && launch;
    if (good) kernel->function = function, kernel->launch = (Launch)launch;
    release(table);
    return good ? 0 : -1;
}

/* Describe a copy by the fields of Copy in their order, addresses as numbers. 0, or -1: the kernel is none that copies. */
int fused_copies(int64_t secret, size_t handle, const int64_t *fields) {
    Table *table = find(secret);
    if (!table) return -1;
    Kernel *kernel = handle < table->count ? &table->kernels[handle] : NULL;
    int good = kernel && kernel->numbers && kernel->numbers[0] == COPIES;
    if (good) memcpy(&kernel->copy, fields, sizeof kernel->copy);
    release(table);
    return good ? 0 : -1;
}

/* From now on an object is the table's: `destroy` is called when no node is left that was loaded. 0, or -1: no memory, or
 * no such table. */
int fused_own(int64_t secret, void *object, int (*destroy)(void *)) {
    Table *table = find(secret);
    Owned *made = table ? malloc(sizeof *made) : NULL;
    if (made) {
        *made = (Owned){table->owned, object, destroy};
        table->owned = made; /* opened by the only thread that knows the secret */
    }
    if (table) release(table);
    return made ? 0 : -1;
}

/* No model loaded from now on finds the kernels; those that were loaded go on. */
void fused_close(int64_t secret) {
    lock();
    Table **link = &tables;
    while (*link && (*link)->secret != secret) link = &(*link)->next;
    Table *table = *link;
    if (table) *link = table->next;
    unlock();
    if (table) release(table);
}

/* Tables that hold memory under this secret: 1 while it is open, else 0. */
int fused_is_open(int64_t secret) {
    Table *table = find(secret);
    if (table) release(table);
    return table != NULL;
}

/* ---- for ONNX Runtime ---- */

/* The kernel of a node, and one more user of its table; NULL if there is none. */
static const Kernel *kernel_of(int64_t secret, int64_t handle) {
    Table *table = find(secret);
    if (table && handle >= 0 && (size_t)handle < table->count && table->kernels[handle].numbers)
        return &table->kernels[handle];
    if (table) release(table);
    return NULL;
}

static Status *no_kernel(void) {
    return failure(INVALID_GRAPH, "an onnx_remat::Fused node names no kernel of this process");
}

static Status *create(const void *op, const void *api_again, const void *info, void **made) {
    int64_t secret, handle;
    *made = NULL;
    TRY(read_int(info, "secret", &secret));
    TRY(read_int(info, "handle", &handle));
    *made = (void *)kernel_of(secret, handle);
    return *made ? NULL : no_kernel();
}

static void destroy(void *data) {
    if (data) release(((Kernel *)data)->table);
}

static void part(void *data, size_t index) {
    Job *job = data;
    const Kernel *kernel = job->kernel;
    int64_t begin = (int64_t)index * kernel->grain, end = begin + kernel->grain;
    if (end > kernel->size) end = kernel->size;
    int failed = kernel->body ? kernel->body(job->inputs, job->outputs, kernel->sizes, begin, end)
                              : convolution_part(job->inputs, job->outputs, kernel->sizes, (int64_t)index);
    if (failed) atomic_store(&job->failed, failed);
}

static int write(char *text, size_t room, const int64_t *dims, size_t rank) {
    size_t at = 0;
    for (size_t d = 0; d < rank && at < room; d++) at += (size_t)snprintf(text + at, room - at, d ? ",%lld" : "%lld", (long long)dims[d]);
    return at < room;
}

/* `wanted`: type, rank and dimensions. */
static Status *check(const void *value, const int64_t *wanted) {
    void *shape;
    int type = 0;
    size_t rank = 0;
    int64_t dims[MOST_RANK] = {0};
    TRY(get_shape(value, &shape));
    Status *failed = get_type(shape, &type);
    if (!failed) failed = get_rank(shape, &rank);
    if (!failed && rank <= MOST_RANK) failed = get_dims(shape, dims, rank);
    free_shape(shape);
    if (failed) return failed;
    if (type == wanted[0] && rank == (size_t)wanted[1] && !memcmp(dims, wanted + 2, rank * sizeof *dims)) return NULL;
    char given[MOST_RANK * 8 + 1] = "", planned[sizeof given] = "", text[2 * sizeof given + 200];
    if (type != wanted[0] || rank > MOST_RANK || !write(given, sizeof given, dims, rank) || !write(planned, sizeof planned, wanted + 2, (size_t)wanted[1]))
        return failure(INVALID_GRAPH, "an input of an onnx_remat::Fused node is not of the type and shape it was compiled for");
    snprintf(text, sizeof text, "a value that the model states to be of shape [%s] is of shape [%s]: correct the model, or pass fuse=False", planned, given);
    return failure(INVALID_GRAPH, text);
}

/* The memory of a node's inputs and outputs, all of the types and shapes that its kernel was compiled for. */
static Status *gather(const Kernel *kernel, void *context, void **inputs, void **outputs) {
    void *value;
    size_t given, made;
    TRY(input_count(context, &given));
    TRY(output_count(context, &made));
    if (given != kernel->inputs || made != kernel->outputs)
        return failure(INVALID_GRAPH, "an onnx_remat::Fused node has another number of inputs or outputs than its kernel");
    const int64_t *wanted = kernel->reads;
    for (size_t i = 0; i < given; i++, wanted += 2 + wanted[1]) {
        TRY(get_input(context, i, (const void **)&value));
        if (!value) return failure(INVALID_GRAPH, "an onnx_remat::Fused node lacks an input");
        TRY(check(value, wanted));
        TRY(tensor_data(value, &inputs[i]));
    }
    const int64_t *shape = kernel->shapes;
    for (size_t i = 0; i < made; i++, shape += 2 + shape[1]) {
        TRY(get_output(context, i, shape + 2, (size_t)shape[1], &value));
        TRY(tensor_data(value, &outputs[i]));
    }
    return NULL;
}

static Status *compute(void *data, void *context) {
    const Kernel *kernel = data;
    void *inputs[MOST], *outputs[MOST];
    if (kernel->numbers[0] < -1) return failure(INVALID_GRAPH, "an onnx_remat::Fused node lies on the CPU, its kernel on a device");
    TRY(gather(kernel, context, inputs, outputs));
    Job job = {kernel, inputs, outputs, 0};
    size_t parts = (size_t)((kernel->size - 1) / kernel->grain + 1);
    int failed = kernel->body ? 0 : convolution_before(inputs, outputs, kernel->sizes);
    if (!failed && parts > 1) TRY(parallel_for(context, part, parts, 0, &job));
    if (!failed && parts == 1) part(&job, 0);
    if (!failed) failed = atomic_load(&job.failed);
    if (!failed && !kernel->body) failed = convolution_after(inputs, outputs, kernel->sizes);
    if (!failed) return NULL;
    return failure(FAIL, kernel->body ? "an index is out of bounds in a ScatterElements of an onnx_remat::Fused node"
                                      : "oneDNN fails to compute a convolution of an onnx_remat::Fused node");
}

/* Nothing here waits for the device. */
static Status *launch(void *data, void *context) {
    const Kernel *kernel = data;
    void *inputs[MOST], *outputs[MOST], *stream;
    if (!kernel->launch) return failure(INVALID_GRAPH, "an onnx_remat::Fused node lies on a device, its kernel on the CPU");
    TRY(gather(kernel, context, inputs, outputs));
    TRY(gpu_stream(context, &stream));
    int64_t size = kernel->size;
    void *arguments[] = {inputs, outputs, (void *)kernel->sizes, &size}; /* of which it copies what the kernel takes */
    int64_t threads = -kernel->numbers[0], blocks = (size - 1) / kernel->grain + 1;
    if (blocks > INT32_MAX) return failure(FAIL, "an onnx_remat::Fused node has too many elements");
    if (!kernel->launch(kernel->function, (unsigned)blocks, 1, 1, (unsigned)threads, 1, 1, 0, stream, arguments, NULL))
        return NULL;
    return failure(FAIL, "the CUDA driver cannot launch the kernel of an onnx_remat::Fused node");
}

/* Nothing here waits for the device either: streams wait for each other. */
static Status *copies(void *data, void *context) {
    const Kernel *kernel = data;
    const Copy *copy = &kernel->copy;
    void *inputs[MOST], *outputs[MOST], *stream;
    if (!copy->record) return failure(INVALID_GRAPH, "an onnx_remat::Copy node has no stream and no memory of the host");
    TRY(gather(kernel, context, inputs, outputs));
    TRY(gpu_stream(context, &stream));
    int up = copy->kind == TO_DEVICE, failed;
    if (copy->kind == WAITS)
        failed = copy->wait(stream, copy->done, 0);
    else
        failed = copy->record(copy->issued, stream) || copy->wait(copy->stream, copy->issued, 0) ||
                 copy->copy(up ? outputs[0] : copy->host, up ? copy->host : inputs[0], copy->bytes, (int)copy->kind, copy->stream) ||
                 copy->record(copy->done, copy->stream);
    return failed ? failure(FAIL, "the CUDA runtime cannot copy for an onnx_remat::Copy node") : NULL;
}

static Status *read(const void *context, const char *name, int64_t *number) {
    const void *attribute = NULL;
    size_t bytes;
    TRY(find_attribute(context, name, &attribute));
    return attribute ? read_attribute(attribute, ATTRIBUTE_INT, number, sizeof *number, &bytes) : no_kernel();
}

static Status *infer(const void *op, void *context) {
    int64_t secret, handle;
    TRY(read(context, "secret", &secret));
    TRY(read(context, "handle", &handle));
    const Kernel *kernel = kernel_of(secret, handle);
    if (!kernel) return no_kernel();
    const int64_t *shape = kernel->shapes;
    Status *failed = NULL;
    for (size_t i = 0; !failed && i < kernel->outputs; i++, shape += 2 + shape[1]) {
        void *made;
        if ((failed = new_shape(&made))) break;
        failed = set_type(made, (int)shape[0]);
        if (!failed) failed = set_dims(made, shape + 2, (size_t)shape[1]);
        if (!failed) failed = infer_output(context, i, made);
        free_shape(made);
    }
    release(kernel->table);
    return failed;
}

static const char *name(const void *op) { return "Fused"; }
static const char *device_name(const void *op) { return "FusedOnDevice"; }
static const char *copy_name(const void *op) { return "Copy"; }
static const char *cpu(const void *op) { return "CPUExecutionProvider"; }
static const char *cuda(const void *op) { return "CUDAExecutionProvider"; }
static size_t one(const void *op) { return 1; }
static int any_type(const void *op, size_t i) { return 0; }
static int variadic(const void *op, size_t i) { return VARIADIC; }
static int in_its_memory(const void *op, size_t i) { return 0; }
static int at_least_one(const void *op) { return 1; }
static int any_number(const void *op) { return 0; }
static int mixed_types(const void *op) { return 0; }
static int first_version(const void *op) { return 1; }
static int last_version(const void *op) { return INT32_MAX; }

/* struct OrtCustomOp. No MayInplace: only the layout of a session of ours lays outputs over inputs. */
#define ON(NAME, PROVIDER, COMPUTE, LEAST) { \
    .version = API_VERSION, .name = (Function)NAME, .provider = (Function)PROVIDER, .input_type = (Function)any_type, \
    .input_types = (Function)one, .output_type = (Function)any_type, .output_types = (Function)one, \
    .destroy = (Function)destroy, .input_kind = (Function)variadic, .output_kind = (Function)variadic, \
    .input_memory = (Function)in_its_memory, .least_inputs = (Function)LEAST, \
    .inputs_alike = (Function)mixed_types, .least_outputs = (Function)at_least_one, \
    .outputs_alike = (Function)mixed_types, .create = (Function)create, .compute = (Function)COMPUTE, \
    .infer = (Function)infer, .first_version = (Function)first_version, .last_version = (Function)last_version}
static const struct {
    uint32_t version;
    Function create_1, name, provider, input_type, input_types, output_type, output_types, compute_1, destroy, input_kind,
        output_kind, input_memory, least_inputs, inputs_alike, least_outputs, outputs_alike, create, compute, infer,
        first_version, last_version, in_place, in_place_done, alias, alias_done;
} on_cpu = ON(name, cpu, compute, at_least_one), on_cuda = ON(device_name, cuda, launch, at_least_one),
  copying = ON(copy_name, cuda, copies, any_number);

Status *RegisterCustomOps(void *options, const Function *(*const *get_api)(uint32_t version)) {
    static void *domain; /* as long as the process: sessions keep it */
    if (!(api = (*get_api)(API_VERSION))) return NULL; /* too old a version: no model with the op will load */
    if (domain) return add_domain(options, domain);
    TRY(create_domain("onnx_remat", &domain));
    TRY(add_op(domain, &on_cpu));
    TRY(add_op(domain, &on_cuda));
    TRY(add_op(domain, &copying));
    return add_domain(options, domain);
}
