/* Convolutions and their gradients by oneDNN's C interface, version 3: its functions come as addresses, from Python.
 *
 * A part is what one thread computes: some of a batch's images, for some of the output channels. It goes through its
 * images chunk by chunk. For each chunk it copies what it reads into oneDNN's own formats, computes, and copies the
 * result back; a gradient of weights is summed over chunks in oneDNN's format. Copies lie in scratch memory that the
 * node makes as its second output. */
#include <stdint.h>
#include <stddef.h>

#define INSIDE __attribute__((visibility("hidden"))) /* of the library */

enum { OPERANDS = 4, WEIGHTS = 1, FROM = 1, TO = 17, SCRATCHPAD = 80 };

/* What a convolution reads or computes: images, weights, output, bias, in this order. */
typedef struct {
    int64_t argument;            /* oneDNN's number of it; 0: there is none */
    int64_t input;               /* position among the node's inputs; -1: its first output */
    int64_t per_chunk, per_part; /* elements from one chunk, or part of the channels, to the next */
    int64_t plain, own;          /* descriptions of the node's format and of oneDNN's; own is 0 where it is the same */
    int64_t reorder;             /* the primitive that copies from one to the other */
    int64_t at;                  /* where the copy lies in scratch memory */
} Operand;
typedef struct {
    int64_t primitive, scratchpad; /* and the description of its scratch memory, 0 without */
    int64_t made;                  /* elements of its output */
    Operand operands[OPERANDS];
} Call;
/* `sizes` of a kernel. The last chunk may have fewer images: it has a call of its own. */
typedef struct {
    int64_t result; /* which operand is computed */
    int64_t chunks, batch_parts, channel_parts;
    int64_t shared, each;         /* bytes of scratch memory for all parts, and for each */
    int64_t sum, addend, rest;    /* where a part has its sum of gradients, what is added to it, and other scratch */
    int64_t elements;             /* of the sum */
    int64_t added, relu;          /* which input is added to the output, -1: none; whether negative elements become 0 */
    Call usual, last;
    int64_t engine, create_stream, destroy_stream, create_memory, destroy_memory, execute, threads, set_threads;
} Convolution;
INSIDE const size_t convolution_sizes = sizeof(Convolution) / sizeof(int64_t);
typedef struct { int argument; void *memory; } Argument;
typedef struct { int64_t argument, description; void *at; } Given;

/* Execute a primitive on memory: 0, or oneDNN's number of an error. */
static int execute(const Convolution *c, void *stream, int64_t primitive, const Given *given, int count) {
    Argument arguments[OPERANDS + 1];
    int made = 0, failed = 0;
    for (; !failed && made < count; made += !failed) {
        arguments[made].argument = (int)given[made].argument;
        failed = ((int (*)(void **, void *, void *, void *))c->create_memory)(
            &arguments[made].memory, (void *)given[made].description, (void *)c->engine, given[made].at);
    }
    if (!failed)
        failed = ((int (*)(void *, void *, int, const Argument *))c->execute)((void *)primitive, stream, count, arguments);
    while (made--) ((int (*)(void *))c->destroy_memory)(arguments[made].memory);
    return failed;
}

static int copy(const Convolution *c, void *stream, const Operand *o, int into_own, void *plain, void *own) {
    Given given[] = {{FROM, into_own ? o->plain : o->own, into_own ? plain : own},
                     {TO, into_own ? o->own : o->plain, into_own ? own : plain}};
    return execute(c, stream, o->reorder, given, 2);
}

static float *place(const Operand *o, void **inputs, void **outputs) {
    return o->input < 0 ? outputs[0] : inputs[o->input];
}

static void add(float *restrict to, const float *restrict from, int64_t elements) {
    for (int64_t i = 0; i < elements; i++) to[i] += from[i];
}

/* As ONNX Runtime's Relu, which keeps NaNs. */
static void relu(float *at, int64_t elements) {
    for (int64_t i = 0; i < elements; i++) at[i] = at[i] < 0 ? 0 : at[i];
}

static char *scratch(void **outputs) { return (char *)(((uintptr_t)outputs[1] + 63) & ~(uintptr_t)63); }

static void *begin(const Convolution *c, int *threads) {
    void *stream = NULL;
    *threads = ((int (*)(void))c->threads)();
    ((void (*)(int))c->set_threads)(1); /* of this thread: OpenMP starts no others */
    if (((int (*)(void **, void *, unsigned))c->create_stream)(&stream, (void *)c->engine, 1)) return NULL;
    return stream;
}

static void end(const Convolution *c, int threads, void *stream) {
    if (stream) ((int (*)(void *))c->destroy_stream)(stream);
    ((void (*)(int))c->set_threads)(threads);
}

/* One chunk of a part. */
static int compute(const Convolution *c, const Call *call, void *stream, void **inputs, void **outputs, char *mine,
                   int64_t chunk, int64_t channels, int first) {
    Given given[OPERANDS + 1];
    int count = 0, failed = 0;
    float *result = NULL, *made = NULL;
    for (int i = 0; i < OPERANDS; i++) {
        const Operand *o = &call->operands[i];
        if (!o->argument) continue;
        float *plain = place(o, inputs, outputs) + chunk * o->per_chunk + channels * o->per_part;
        void *at = plain;
        if (i == c->result) {
            if (i == WEIGHTS) at = mine + (first ? c->sum : c->addend);
            else if (o->own) at = mine + o->at;
            result = plain, made = at;
        } else if (o->own) {
            at = (i == WEIGHTS ? scratch(outputs) : mine) + o->at;
            if (i != WEIGHTS && (failed = copy(c, stream, o, 1, plain, at))) return failed;
        }
        given[count++] = (Given){o->argument, o->own ? o->own : o->plain, at};
    }
    if (call->scratchpad) given[count++] = (Given){SCRATCHPAD, call->scratchpad, mine + c->rest};
    if ((failed = execute(c, stream, call->primitive, given, count))) return failed;
    if (c->result != WEIGHTS) {
        const Operand *o = &call->operands[c->result];
        if (result != made && (failed = copy(c, stream, o, 0, result, made))) return failed;
        if (c->added >= 0) add(result, (float *)inputs[c->added] + chunk * o->per_chunk, call->made);
        if (c->relu) relu(result, call->made);
        return 0;
    }
    if (!first) add((float *)(mine + c->sum), (float *)(mine + c->addend), c->elements);
    return 0;
}

/* Before the parts: copy weights that they all read. 0, or oneDNN's number of an error. */
INSIDE int convolution_before(void **inputs, void **outputs, const int64_t *sizes) {
    const Convolution *c = (const Convolution *)sizes;
    const Operand *weights = &c->usual.operands[WEIGHTS];
    if (c->result == WEIGHTS || !weights->own) return 0;
    int threads;
    void *stream = begin(c, &threads);
    int failed = !stream || copy(c, stream, weights, 1, place(weights, inputs, outputs), scratch(outputs) + weights->at);
    end(c, threads, stream);
    return failed;
}

INSIDE int convolution_part(void **inputs, void **outputs, const int64_t *sizes, int64_t part) {
    const Convolution *c = (const Convolution *)sizes;
    char *mine = scratch(outputs) + c->shared + part * c->each;
    int64_t batch = part / c->channel_parts, channels = part % c->channel_parts;
    int64_t first = c->chunks * batch / c->batch_parts, after = c->chunks * (batch + 1) / c->batch_parts;
    int threads;
    void *stream = begin(c, &threads);
    int failed = !stream;
    for (int64_t chunk = first; !failed && chunk < after; chunk++)
        failed = compute(c, chunk + 1 < c->chunks ? &c->usual : &c->last, stream, inputs, outputs, mine, chunk, channels,
                         chunk == first);
    end(c, threads, stream);
    return failed;
}

/* After the parts: add up what they have summed, and copy it to the result. */
INSIDE int convolution_after(void **inputs, void **outputs, const int64_t *sizes) {
    const Convolution *c = (const Convolution *)sizes;
    const Operand *weights = &c->usual.operands[WEIGHTS];
    if (c->result != WEIGHTS) return 0;
    int threads;
    void *stream = begin(c, &threads);
    int failed = !stream;
    for (int64_t channels = 0; !failed && channels < c->channel_parts; channels++) {
        char *parts = scratch(outputs) + c->shared + channels * c->each + c->sum;
        for (int64_t batch = 1; batch < c->batch_parts; batch++)
            add((float *)parts, (float *)(parts + batch * c->channel_parts * c->each), c->elements);
        failed = copy(c, stream, weights, 0, place(weights, inputs, outputs) + channels * weights->per_part, parts);
    }
    end(c, threads, stream);
    return failed;
}
