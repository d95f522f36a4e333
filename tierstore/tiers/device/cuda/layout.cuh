// The layout of a table's memory, and the search for a key in it.
//
// A set is one line of 128 bytes, which a team reads at once (16 bytes a lane): 8 bytes of bookkeeping and the keys of 15 ways. It also
// has one sector of 32 bytes with 3 keys that do not exist, and 15 rows. Every key value is legal: a bit for each way says whether it is
// occupied. Memory of zeros is empty sets.
//
//   line     word 0    bits 0..14 occupied   bits 16..19 hand   bits 20..49 heat, 2 bits a way
//            word 1+w  key of way w
//   absent   word 0    bits 0..2 occupied   bits 4..6 looked up lately   bits 8..9 hand
//            word 1+i  key i
//
// A table has 2^depth regions of `sets_per_region` sets. The low bits of a key's hash choose the region, its high
// half the set in it. Segment 0 of the memory is region 0, segment k is regions 2^(k-1) up to 2^k: to halve a table, its last segment
// is freed; to double it, one is added. A segment has all lines, then all absent sectors, then all rows, at a stride that is a
// multiple of 16 bytes.
//
// Kernels of one table run in one stream, one after another, so none reads while another writes. The look-ups within one kernel run
// at the same time; they write only heat and marks, by atomics.
#pragma once

static const u32 WAYS = 15;
static const u32 LINE_BYTES = 128;
static const u32 ABSENT_BYTES = 32;
static const u32 ABSENT_WAYS = 3;
static const u32 OCCUPIED = 0x7fff;
static const u32 HAND_AT = 16;
static const u32 HEAT_AT = 20;
static const u32 MAX_HEAT = 3;
static const u32 HEAT_TRIES = 4;

static const u8 STATE_PENDING = 0;
static const u8 STATE_DEVICE = 2;
static const u8 STATE_HOST = 3;
static const u8 STATE_ABSENT = 6;
static const u8 STATE_CHANGED = 254;  // maybe, by a delta; never written
static const u8 STATE_PADDING = 255;

// `source` of a key: the address of its row as stored (above 0), in the table, of a delta, or copied from the host tier; one of these constants; or, from
// FIRST_UPLOAD down, a row from the CPU, number FIRST_UPLOAD - source.
static const i64 SOURCE_ABSENT = 0;
static const i64 SOURCE_PADDING = -1;
static const i64 SOURCE_ELSEWHERE = -2;  // not in the table
static const i64 FIRST_UPLOAD = -3;

struct Table {
  u64 segments[7];  // addresses
  u64 sets_per_region;
  u64 fallback;  // address of the default vector, float32[dim]
  u32 depth;
  u32 row_bytes;
  u32 stride;
  u32 dim;
  u32 code;  // StorageDtype.code
  u32 unused;
};

struct Set {
  u64* line;
  u64* absent;
  u8* rows;
};

// 64 well mixed bits of a key (the finalizer of SplitMix64, Steele et al. 2014).
__device__ __forceinline__ u64 mix(i64 key) {
  u64 x = (u64)key + 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

__device__ __forceinline__ Set set_at(const Table& t, u64 region, u64 within) {
  u32 segment = 0;
  u64 index = within, sets = t.sets_per_region;
  if (region) {
    segment = 64 - __clzll((i64)region);
    sets = t.sets_per_region << (segment - 1);
    index = (region - (1ull << (segment - 1))) * t.sets_per_region + within;
  }
  u8* base = in_memory(t.segments[segment]);
  Set set;
  set.line = (u64*)(base + index * LINE_BYTES);
  set.absent = (u64*)(base + sets * LINE_BYTES + index * ABSENT_BYTES);
  set.rows = base + sets * (LINE_BYTES + ABSENT_BYTES) + index * WAYS * t.stride;
  return set;
}

__device__ __forceinline__ u64 region_of(u64 hashed, u32 depth) { return hashed & ((1ull << depth) - 1); }

__device__ __forceinline__ Set set_of(const Table& t, u64 hashed) {
  return set_at(t, region_of(hashed, t.depth), (hashed >> 32) * t.sets_per_region >> 32);
}

__device__ __forceinline__ u32 heat_of(u64 head, u32 way) { return head >> (HEAT_AT + 2 * way) & 3; }

__device__ __forceinline__ u64 with_heat(u64 head, u32 way, u32 heat) {
  return (head & ~(3ull << (HEAT_AT + 2 * way))) | (u64)heat << (HEAT_AT + 2 * way);
}

// Raises the heat of a way that was looked up; `head` is the line's word 0 as read. Look-ups of other keys of the set write the
// same word at the same time, so a try may fail; after the last try the hit is not counted.
__device__ __forceinline__ void raise_heat(u64* line, u64 head, u32 way) {
  for (u32 tries = 0; tries < HEAT_TRIES; tries++) {
    u32 heat = heat_of(head, way);
    if (heat == MAX_HEAT) return;
    u64 seen = atomicCAS(line, head, with_heat(head, way, heat + 1));
    if (seen == head) return;
    head = seen;
  }
}

// The lane's part of a line: the keys of ways 2 lane - 1 and 2 lane.
__device__ __forceinline__ ulonglong2 load_line(const u64* line) { return ((const ulonglong2*)line)[team_lane()]; }

// The way that holds `key`, or -1; `words` are the lane's part of the line, and `head` is its word 0.
__device__ __forceinline__ int match_way(ulonglong2 words, i64 key, u64* head) {
  u32 lane = team_lane();
  *head = team_broadcast(words.x, 0);
  u32 occupied = (u32)*head & OCCUPIED;
  bool odd = lane && words.x == (u64)key && occupied >> (2 * lane - 1) & 1;
  bool even = words.y == (u64)key && occupied >> (2 * lane) & 1;
  u32 odds = team_ballot(odd), evens = team_ballot(even);
  if (evens) return 2 * (__ffs(evens) - 1);
  if (odds) return 2 * (__ffs(odds) - 1) - 1;
  return -1;
}

__device__ __forceinline__ int find_way(const u64* line, i64 key, u64* head) {
  return match_way(load_line(line), key, head);
}

// The place of `key` among the absent keys, or -1; `head` is word 0 of the sector.
__device__ __forceinline__ int find_absent(const u64* absent, i64 key, u64* head) {
  u32 lane = team_lane();
  u64 word = lane <= ABSENT_WAYS ? absent[lane] : 0;
  *head = team_broadcast(word, 0);
  bool mine = lane >= 1 && lane <= ABSENT_WAYS && word == (u64)key && *head >> (lane - 1) & 1;
  u32 found = team_ballot(mine);
  return found ? __ffs(found) - 2 : -1;
}
