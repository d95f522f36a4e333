// Basics for the other files: integer types, the team of lanes that works on one key, 16-bit floats.
//
// A team is 8 neighbouring lanes of a warp, which take the same branches. Unless a comment calls a value the lane's, it is the
// same in all 8. No header is included, so that NVRTC needs none at run time.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static const u32 LANES = 8;

__device__ __forceinline__ u32 team_lane() { return threadIdx.x & (LANES - 1); }

__device__ __forceinline__ u32 team_shift() { return threadIdx.x & 31 & ~(LANES - 1); }

static const u32 WARP = 32;
static const u32 ALL = 0xffffffffu;  // lanes of a warp

__device__ __forceinline__ u32 warp_lane() { return threadIdx.x & (WARP - 1); }

// The number of this warp in the launch: one for each bag.
__device__ __forceinline__ i64 warp_index() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }

__device__ __forceinline__ u32 team_mask() { return 0xffu << team_shift(); }

// The number of this team in the launch: one for each key, bag, run or set.
__device__ __forceinline__ i64 team_index() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES; }

// The number of teams in the launch.
__device__ __forceinline__ i64 teams() { return (i64)gridDim.x * blockDim.x / LANES; }

// A mask of the team: bit l is set if `mine` is true in lane l.
__device__ __forceinline__ u32 team_ballot(bool mine) {
  return __ballot_sync(team_mask(), mine) >> team_shift() & 0xff;
}

__device__ __forceinline__ u64 team_broadcast(u64 value, u32 from) {
  return __shfl_sync(team_mask(), value, from, LANES);
}

// After the fence, all lanes of the team see what each has written before it.
__device__ __forceinline__ void team_fence() { __syncwarp(team_mask()); }

// A pointer from a device address. The compiler cannot tell which kind of memory an integer points to, so each access would have to
// find out; told here, most are plain accesses to global memory. (With `__cvta_global_to_generic` instead, NVRTC 12.9 never
// finishes these kernels.)
__device__ __forceinline__ u8* in_memory(u64 address) {
  u8* at = (u8*)address;
  __builtin_assume(__isGlobal(at));
  return at;
}

#ifdef __CUDACC__
// Loads of memory that the CPU may be writing: each time from memory, never from a cache.
__device__ __forceinline__ u32 bus_u32(const u8* at) { return *(const volatile u32*)at; }
__device__ __forceinline__ u64 bus_u64(const u8* at) { return *(const volatile u64*)at; }

__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Rounded to nearest, ties to even; beyond the range it is Inf.
__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif
