// The few words of CUDA that the kernels use, on a CPU: every lane of a warp is a fiber, and a collective lets the
// others run until all lanes that it names have come. A lane that is named and has ended is a fault, as on a GPU. In
// between lanes run one after another, in an order that differs from warp to warp. A warp runs until its lanes have ended
// or wait for the block, then the next one does.
#pragma once

#include <sched.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __builtin_assume(what)

struct Index { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };

static thread_local Index blockIdx, blockDim, threadIdx, gridDim;

inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }  // built without contraction
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clzll(long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline float half_to_float(unsigned short bits) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
inline unsigned short float_to_half(float value) {
  _Float16 half = (_Float16)value;
  unsigned short bits;
  memcpy(&bits, &half, 2);
  return bits;
}

template <class T> inline T atomicAdd(T* at, T by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
template <class T> inline T atomicExch(T* at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
template <class T> inline T atomicAnd(T* at, T bits) { return __atomic_fetch_and(at, bits, __ATOMIC_RELAXED); }
template <class T> inline T atomicOr(T* at, T bits) { return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
template <class T> inline T atomicCAS(T* at, T expected, T wanted) {
  __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

// ---- fibers

#if defined(__x86_64__)
extern "C" void shim_switch(void** save, void* to);
asm(R"(
.text
.type shim_switch,@function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
#error "the shim switches stacks in x86-64 assembly"
#endif

struct Warp {
  static const int LANES = 32;
  static const size_t STACK = 32 << 10;
  void* caller;
  void* lane_sp[LANES];
  bool ended[LANES];
  bool at_barrier[LANES];
  // of collectives of a part of the warp, and of all of it; a lane is at most one ahead of those it meets
  unsigned arrived[2][LANES];
  unsigned long long posted[2][LANES][2];
  int current;
  int stride;  // to the lane that runs next: odd, so that all have their turn
  unsigned first_thread;
  void (*run)(void**);
  void** args;
  alignas(16) char stacks[LANES][STACK];
};

static thread_local Warp* warp;

static void shim_fault(const char* what) {
  fprintf(stderr, "cuda shim: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  abort();
}

// Run the next lane that can; with `leaving`, when there is none, whoever runs the warps of the block.
static void shim_yield(bool leaving) {
  Warp* w = warp;
  int from = w->current;
  for (int step = 1; step <= Warp::LANES; step++) {
    int to = (from + w->stride * step) % Warp::LANES;
    if (w->ended[to] || w->at_barrier[to]) continue;
    if (to == from) return;
    w->current = to;
    threadIdx.x = w->first_thread + to;
    shim_switch(&w->lane_sp[from], w->lane_sp[to]);
    return;
  }
  if (leaving) shim_switch(&w->lane_sp[from], w->caller);
}

static void shim_lane() {
  warp->run(warp->args);
  warp->ended[warp->current] = true;
  shim_yield(true);
  shim_fault("a lane ran on after its end");
}

// Wait for all lanes of `mask` and post a value for them. Returns which of the two slots they posted in.
static unsigned shim_meet(unsigned mask, unsigned long long value) {
  Warp* w = warp;
  int me = w->current;
  if (!(mask >> me & 1)) shim_fault("a lane meets others and is not named itself");
  unsigned kind = mask == 0xffffffffu, turn = ++w->arrived[kind][me];
  w->posted[kind][me][turn & 1] = value;
  for (int lane = 0; lane < Warp::LANES; lane++) {
    if (!(mask >> lane & 1)) continue;
    while ((int)(w->arrived[kind][lane] - turn) < 0) {
      if (w->ended[lane]) shim_fault("a lane that is named has ended");
      if (w->at_barrier[lane]) shim_fault("a lane that is named waits for the block");
      shim_yield(false);
    }
  }
  return turn & 1;
}

inline unsigned __ballot_sync(unsigned mask, bool mine) {
  unsigned slot = shim_meet(mask, mine), bits = 0;
  for (int lane = 0; lane < Warp::LANES; lane++)
    if (mask >> lane & 1 && warp->posted[mask == 0xffffffffu][lane][slot]) bits |= 1u << lane;
  return bits;
}

inline unsigned long long __shfl_sync(unsigned mask, unsigned long long value, unsigned from, unsigned width) {
  unsigned lane = (warp->current & ~(width - 1)) + from;
  if (!(mask >> lane & 1)) shim_fault("a value is asked of a lane that is not named");
  unsigned slot = shim_meet(mask, value);
  return warp->posted[mask == 0xffffffffu][lane][slot];
}

inline void __syncwarp(unsigned mask) { shim_meet(mask, 0); }

inline void __syncthreads() {
  warp->at_barrier[warp->current] = true;
  shim_yield(true);
}

// ---- memory of the CPU that is read over the bus: the ranges that are registered, of which the last one is empty

struct Range { unsigned long long begin, end; };
static const Range shim_nothing = {0, 0};
static const Range* volatile shim_registered = &shim_nothing;
extern "C" void shim_register(const Range* ranges) { shim_registered = ranges; }

// Before the load of this number, counted down, a kernel waits until it is told to go on.
extern "C" {
volatile long shim_pause_before = 0;
volatile int shim_paused = 0, shim_go_on = 0;
}

template <class T> inline T shim_bus(const void* at) {
  if (shim_pause_before && --shim_pause_before == 0) {
    shim_paused = 1;
    while (!shim_go_on) sched_yield();
    shim_paused = shim_go_on = 0;
  }
  const Range* range = shim_registered;
  while (range->end && !(range->begin <= (unsigned long long)at && (unsigned long long)at + sizeof(T) <= range->end)) range++;
  if (!range->end) shim_fault("memory is read over the bus that is not registered");
  return __atomic_load_n((const T*)at, __ATOMIC_RELAXED);
}
inline unsigned bus_u32(const unsigned char* at) { return shim_bus<unsigned>(at); }
inline unsigned long long bus_u64(const unsigned char* at) { return shim_bus<unsigned long long>(at); }

inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- launching

template <class... A, size_t... I>
inline void shim_apply(void (*kernel)(A...), void** args, std::integer_sequence<size_t, I...>) {
  kernel(*(A*)args[I]...);
}
template <class... A> inline void shim_call(void (*kernel)(A...), void** args) {
  shim_apply(kernel, args, std::make_integer_sequence<size_t, sizeof...(A)>());
}

template <class... A> inline unsigned shim_sizes(void (*)(A...), unsigned* sizes) {
  unsigned count = 0;
  ((sizes[count++] = sizeof(A)), ...);
  return count;
}

static void shim_begin(Warp* w, unsigned first, void (*run)(void**), void** args) {
  w->run = run;
  w->args = args;
  w->first_thread = first;
  for (int lane = 0; lane < Warp::LANES; lane++) {
    void** top = (void**)(w->stacks[lane] + Warp::STACK);
    *--top = nullptr;              // keeps the stack aligned as a call would
    *--top = (void*)shim_lane;     // where the switch returns to
    for (int k = 0; k < 6; k++) *--top = nullptr;
    w->lane_sp[lane] = top;
    w->ended[lane] = w->at_barrier[lane] = false;
    w->arrived[0][lane] = w->arrived[1][lane] = 0;
  }
  // Lanes of a warp run in no order that may be relied on: each warp begins elsewhere, and goes on otherwise.
  static thread_local unsigned warps;
  static const int strides[] = {1, 31, 13, 19, 5};
  unsigned turn = warps++;
  w->stride = strides[turn % 5];
  w->current = turn * 11 % Warp::LANES;
}

// Run the lanes that can from the current one on, until all have ended or wait. Returns whether some wait.
static bool shim_advance(Warp* w) {
  warp = w;
  threadIdx.x = w->first_thread + w->current;
  shim_switch(&w->caller, w->lane_sp[w->current]);
  bool some = false;
  for (int lane = 0; lane < Warp::LANES; lane++)
    if (w->at_barrier[lane]) {
      w->at_barrier[lane] = false;
      w->current = lane;
      some = true;
    }
  return some;
}

static void shim_launch(void (*run)(void**), unsigned blocks, unsigned threads, void** args) {
  static thread_local Warp* warps = nullptr;
  const unsigned most = 8, count = threads / Warp::LANES;
  if (!warps) warps = (Warp*)aligned_alloc(64, (most * sizeof(Warp) + 63) / 64 * 64);
  if (count > most) shim_fault("a block has too many warps");
  blockDim.x = threads;
  gridDim.x = blocks;
  for (unsigned block = 0; block < blocks; block++) {
    blockIdx.x = block;
    bool waits[most];
    for (unsigned k = 0; k < count; k++) {
      shim_begin(warps + k, k * Warp::LANES, run, args);
      waits[k] = true;
    }
    for (bool some = true; some;) {
      some = false;
      for (unsigned k = 0; k < count; k++)
        if (waits[k]) some |= waits[k] = shim_advance(warps + k);
    }
  }
}
