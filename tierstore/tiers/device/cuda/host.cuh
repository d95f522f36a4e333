// Look-ups in the host tier by the GPU: CPU memory that is registered with the driver, read over the bus.
//
// `tiers/host/cache/layout.py` describes the layout, and how to read it while a CPU thread writes: a line's version, then the line and
// the row, then the version again. A key whose line is being written, or that is being moved, may be missed. While kernels may read
// here, no set moves and no memory is freed, so the geometry at the launch stays valid.
#pragma once

static const u32 HOST_LINES = 8;  // of a set
static const u32 HOST_LINE_WAYS = 7;
static const u32 HOST_LINE_BYTES = 64;
static const u32 HOST_LINES_AN_ABSENT = 4;
static const u32 HOST_HEAT_AT = 4;
static const u32 HOST_USED_AT = 5;  // of a line of absent keys
static const u32 HOST_TRIES = 4;

struct Host {
  u64 lines;  // addresses; 0: kernels may not read it
  u64 absent;
  u64 rows;
  u64 sets_per_region;
  u64 cursor;
  u32 depth;
  u32 row_bytes;
};

__device__ __forceinline__ u64 host_set_of(const Host& h, u64 hashed) {
  u64 index = region_of(hashed, h.depth) * h.sets_per_region + ((hashed >> 32) * h.sets_per_region >> 32);
  u64 half = (h.sets_per_region << h.depth) >> 1;
  return index >= half && index - half < h.cursor ? index - half : index;
}

// Bytes 4 w to 4 w + 3 of a row at any alignment; no byte behind the row is read.
__device__ __forceinline__ u32 host_word(const u8* row, u32 w, u32 bytes) {
  u64 at = (u64)row + 4 * w, word = at & ~3ull;
  u32 shift = 8 * (u32)(at & 3);
  u32 low = bus_u32((const u8*)word);
  if (!shift) return low;
  u32 high = word + 4 < (u64)row + bytes ? bus_u32((const u8*)word + 4) : 0;
  return low >> shift | high << (32 - shift);
}

// Copies a row to device memory, by a team: each lane loads several words at a time.
__device__ __forceinline__ void copy_host_row(u8* to, const u8* row, u32 bytes) {
  u32 lane = team_lane();
  if (bytes % 8 == 0) {
#pragma unroll 4
    for (u32 k = lane; k < bytes / 8; k += LANES) ((u64*)to)[k] = bus_u64(row + 8 * k);
  } else {
#pragma unroll 4
    for (u32 w = lane; w < (bytes + 3) / 4; w += LANES) ((u32*)to)[w] = host_word(row, w, bytes);
  }
  team_fence();
}

// The place of `key` in a line of 7 keys or absent keys, or -1. `head` becomes the line's first word; all lanes have read the same
// even version in it before they read anything else.
__device__ __forceinline__ int host_place(const u8* line, i64 key, u32 occupied_at, u64* head) {
  u32 lane = team_lane();
  u64 mine = bus_u64(line);
  *head = team_broadcast(mine, 0);
  bool same = (u32)mine == (u32)*head && !(mine & 1);
  __threadfence_system();
  u64 word = lane ? bus_u64(line + 8 * lane) : 0;
  bool is = lane && word == (u64)key && *head >> (8 * occupied_at + lane - 1) & 1;
  u32 found = team_ballot(is);
  return team_ballot(same) == 0xff && found ? __ffs(found) - 2 : -1;
}

// Whether nothing was written to a line since its `head` was read; then what was read in between is whole.
__device__ __forceinline__ bool host_unchanged(const u8* line, u64 head) {
  __threadfence_system();
  return team_ballot((u32)bus_u64(line) == (u32)head) == 0xff;
}

// Copies the row of `key` to `to` if this line holds it. `head` becomes the line's first word.
__device__ __forceinline__ bool host_read(const Host& h, u64 number, i64 key, u8* to, u64* head) {
  u8* line = in_memory(h.lines + number * HOST_LINE_BYTES);
  for (u32 tries = 0; tries < HOST_TRIES; tries++) {
    int place = host_place(line, key, 6, head);
    if (place >= 0) {
      copy_host_row(to, in_memory(h.rows + (number * HOST_LINE_WAYS + place) * h.row_bytes), h.row_bytes);
      if (host_unchanged(line, *head)) {
        u32 heat = (u32)(*head >> 8 * (HOST_HEAT_AT + (place >> 2))) & 0xff, at = 2 * (place & 3);
        if (team_lane() == 0 && (heat >> at & 3) != MAX_HEAT)  // hits of others may be lost, as on the CPU
          *(volatile u8*)(line + HOST_HEAT_AT + (place >> 2)) = (u8)(heat + (1u << at));
        return true;
      }
    } else if (!(*head & 1)) {
      return false;
    }
  }
  return false;
}

// Looks `key` up in the host tier: STATE_HOST, with its stored row at `to`; STATE_ABSENT; or STATE_PENDING.
__device__ __forceinline__ u8 host_find(const Host& h, i64 key, u8* to) {
  u64 hashed = mix(key), first = host_set_of(h, hashed) * HOST_LINES, home = first + (hashed >> 8 & (HOST_LINES - 1)), head;
  if (host_read(h, home, key, to, &head)) return STATE_HOST;
  for (u32 away = (u32)(head >> 56); away; away &= away - 1) {
    u64 other;
    if (host_read(h, first + __ffs((int)away) - 1, key, to, &other)) return STATE_HOST;
  }
  u8* absent = in_memory(h.absent + home / HOST_LINES_AN_ABSENT * HOST_LINE_BYTES);
  int place = host_place(absent, key, 4, &head);
  if (place < 0 || !host_unchanged(absent, head)) return STATE_PENDING;
  u32 used = (u32)(head >> 8 * HOST_USED_AT) & 0xff;
  if (team_lane() == 0 && !(used >> place & 1)) *(volatile u8*)(absent + HOST_USED_AT) = (u8)(used | 1u << place);
  return STATE_ABSENT;
}
