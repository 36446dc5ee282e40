/* Runs the threads of a kernel that ptx.py has translated for the host. Those of a warp that exchange values run as
 * contexts of one thread, each up to its next exchange. Every access of a kernel to memory asks `warp_at` for it. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

enum { WARP = 32, STACK = 1 << 16, MOST = 4096 };
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

static ucontext_t scheduler, lanes[WARP];
static char *stacks;
static uint32_t given[WARP], exchanged[WARP];
static int lane, done[WARP];
static Work *work;

static void pause_lane(void) { swapcontext(&lanes[lane], &scheduler); }
void warp_sync(void) { pause_lane(); }
uint32_t warp_shuffle(uint32_t value, uint32_t distance) {
  given[lane] = value;
  pause_lane();
  return exchanged[lane ^ (distance & (WARP - 1))];
}

static void call(Work *w) {
  void **a = w->arguments;
  w->code(a[0], a[1], a[2], a[3], w->thread, w->block, w->threads);
}
static void start_lane(void) {
  Work own = *work;
  own.thread += lane;
  call(&own);
  done[lane] = 1;
}

static void run_warp(Work *w) {
  if (!stacks) stacks = malloc(WARP * STACK);
  work = w;
  for (lane = 0; lane < WARP; lane++) {
    done[lane] = 0;
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = stacks + lane * STACK;
    lanes[lane].uc_stack.ss_size = STACK;
    lanes[lane].uc_link = &scheduler;
    makecontext(&lanes[lane], start_lane, 0);
  }
  for (int left = WARP; left;) {
    left = 0;
    for (lane = 0; lane < WARP; lane++)
      if (!done[lane]) swapcontext(&scheduler, &lanes[lane]), left += !done[lane];
    for (int i = 0; i < WARP; i++) exchanged[i] = given[i];
  }
}

void warp_launch(Code code, void **arguments, int blocks, int threads, int exchanges) {
  for (int block = 0; block < blocks; block++)
    for (int thread = 0; thread < threads; thread += exchanges ? WARP : 1) {
      Work w = {code, arguments, thread, block, threads};
      exchanges ? run_warp(&w) : call(&w);
    }
}
