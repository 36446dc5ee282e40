/* Runs the threads of a kernel that ptx.py has translated for the host. Those of a block that exchange values run as
 * contexts of one thread, each up to its next exchange. Every access of a kernel to memory asks `warp_at` for it, or
 * `warp_shared`. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { WARP = 32, STACK = 1 << 16, MOST = 4096, THREADS = 1024, SHARED = 1 << 10 };
typedef void (*Code)(const void *, const void *, const void *, const void *, int thread, int block, int threads);
typedef struct {
  Code code;
  void **arguments;
  int thread, block, threads;
} Work;

int64_t warp_strays; /* accesses outside all memory that a kernel may touch */
static struct { int64_t at, bytes; } allowed[MOST];
static int allowed_count;
static char nowhere[16];

void warp_allow(int64_t at, int64_t bytes) { /* 0 bytes: nothing any more */
  if (!bytes) allowed_count = 0;
  else if (allowed_count < MOST) allowed[allowed_count].at = at, allowed[allowed_count++].bytes = bytes;
}

static void *among_allowed(int64_t at, int64_t bytes) {
  for (int i = 0; i < allowed_count; i++)
    if (at >= allowed[i].at && at + bytes <= allowed[i].at + allowed[i].bytes) return (void *)at;
  return NULL;
}
void *(*warp_memory)(int64_t at, int64_t bytes) = among_allowed;

void *warp_at(int64_t at, int64_t bytes) {
  void *found = warp_memory(at, bytes);
  if (found) return found;
  warp_strays++;
  return nowhere;
}

/* ---- Exchanges --------------------------------------------------------------------------------------------------- */

static ucontext_t scheduler, lanes[THREADS];
static char *stacks, shared[SHARED];
static uint32_t given[THREADS], exchanged[THREADS];
static int lane, done[THREADS], waits[THREADS]; /* at the block's barrier */
static int asks[THREADS]; /* for an exchange */
static Work *work;

static void pause_lane(void) { swapcontext(&lanes[lane], &scheduler); }
void warp_sync(void) { pause_lane(); }
void warp_barrier(void) {
  waits[lane] = 1;
  pause_lane();
}
uint32_t warp_shuffle(uint32_t value, uint32_t distance) {
  given[lane] = value;
  asks[lane] = 1;
  pause_lane();
  return exchanged[lane ^ (distance & (WARP - 1))];
}
void *warp_shared(int64_t at, int64_t bytes) {
  if (at >= 0 && at + bytes <= SHARED) return shared + at;
  warp_strays++;
  return nowhere;
}

static void call(Work *w) {
  void **a = w->arguments;
  w->code(a[0], a[1], a[2], a[3], w->thread, w->block, w->threads);
}
static void start_lane(void) {
  Work own = *work;
  own.thread = lane;
  call(&own);
  done[lane] = 1;
}

static void run_block(Work *w) {
  if (!stacks) stacks = malloc((size_t)THREADS * STACK);
  work = w;
  memset(shared, 0xff, SHARED); /* not numbers: what is read before it is written shows */
  for (lane = 0; lane < w->threads; lane++) {
    done[lane] = waits[lane] = 0;
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = stacks + (size_t)lane * STACK;
    lanes[lane].uc_stack.ss_size = STACK;
    lanes[lane].uc_link = &scheduler;
    makecontext(&lanes[lane], start_lane, 0);
  }
  for (int left = w->threads; left;) {
    int waiting = left = 0;
    for (lane = 0; lane < w->threads; lane++) {
      if (!done[lane] && !waits[lane]) swapcontext(&scheduler, &lanes[lane]);
      left += !done[lane];
      waiting += !done[lane] && waits[lane];
    }
    memcpy(exchanged, given, sizeof given);
    for (int first = 0; first < w->threads; first += WARP) { /* all threads of a warp take part, or none */
      int asking = 0;
      for (int i = first; i < first + WARP; i++) asking += asks[i];
      warp_strays += asking && asking != WARP;
    }
    memset(asks, 0, sizeof asks);
    if (waiting == left) memset(waits, 0, sizeof waits);
  }
}

void warp_launch(Code code, void **arguments, int blocks, int threads, int exchanges) {
  for (int block = 0; block < blocks; block++)
    for (int thread = 0; thread < threads; thread += exchanges ? threads : 1) {
      Work w = {code, arguments, thread, block, threads};
      exchanges ? run_block(&w) : call(&w);
    }
}
