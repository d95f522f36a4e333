// Writing to a table: insert, absent keys, deltas, halving and doubling.
//
// Keys are distinct and, except for `fill`, sorted by set; `runs` says where each set's keys begin (runs[n] is the end), and one team
// works through a run: no two teams write to one set. Input, and output for the CPU, is in page-locked CPU memory. `totals` of the table:
// rows, absent keys, admitted, evicted; the last block copies them to `told` and reports that the kernel is done (`say_done`), with the
// number of rows handed back, or of keys marked absent.

static const u32 ROWS = 0, ABSENT_KEYS = 1, ADMITTED = 2, EVICTED = 3;

__device__ __forceinline__ void count(i64* totals, u32 which, i64 by) {
  if (by && team_lane() == 0) atomicAdd((u64*)totals + which, (u64)by);
}

__device__ __forceinline__ void write_word(u64* words, u32 index, u64 value) {
  if (team_lane() == 0) words[index] = value;
}

__device__ __forceinline__ i64 forget_absent(u64* absent, i64 key) {
  u64 head;
  int place = find_absent(absent, key, &head);
  if (place < 0) return 0;
  write_word(absent, 0, head & ~(17ull << place));
  team_fence();
  return 1;
}

// Clock: evicts the first key from the hand on that was not looked up since the hand last passed.
__device__ __forceinline__ bool mark_absent(u64* absent, i64 key, i64* added) {
  u64 head;
  if (find_absent(absent, key, &head) >= 0) return false;
  u32 hand = (u32)(head >> 8) & 3;
  for (u32 step = 0; step < 2 * ABSENT_WAYS; step++) {
    if (!(head >> hand & 1) || !(head >> (4 + hand) & 1)) break;
    head &= ~(16ull << hand);
    hand = hand + 1 < ABSENT_WAYS ? hand + 1 : 0;
  }
  *added += !(head >> hand & 1);
  head = (head | 1ull << hand) & ~(16ull << hand) & ~0x300ull;
  head |= (u64)(hand + 1 < ABSENT_WAYS ? hand + 1 : 0) << 8;
  write_word(absent, 1 + hand, (u64)key);
  write_word(absent, 0, head);
  team_fence();
  return true;
}

// Clock: the hand passes rows that have heat left, lowering it by one, and stops at a row without heat.
__device__ __forceinline__ u32 next_victim(u64* head) {
  u32 way = (u32)(*head >> HAND_AT) & 15;
  for (u32 step = 0; step < (MAX_HEAT + 1) * WAYS; step++) {
    u32 heat = heat_of(*head, way);
    if (heat == 0) break;
    *head = with_heat(*head, way, heat - 1);
    way = way + 1 < WAYS ? way + 1 : 0;
  }
  *head = (*head & ~(15ull << HAND_AT)) | (u64)(way + 1 < WAYS ? way + 1 : 0) << HAND_AT;
  return way;
}

__device__ __forceinline__ void put(const Table& t, const Set& set, u64 head, u32 way, i64 key, u32 heat,
                                    const u8* row) {
  copy_row(set.rows + (u64)way * t.stride, row, t.stride);
  write_word(set.line, 1 + way, (u64)key);
  write_word(set.line, 0, with_heat(head | 1ull << way, way, heat));
  team_fence();
}

// Fills free ways with distinct keys, in any order; a resident key keeps its row. Several teams may write to one set: the team that sets the
// bit of a free way owns it. Until it writes its key, other teams may read the way's old key; a team whose key equals that does not admit it.
extern "C" __global__ void fill(const __grid_constant__ Table t, const i64* keys, const u8* rows, i64 n, i64* totals, i64* told,
                                u32* counters, u32* done) {
  i64 i = team_index();
  u32 lane = team_lane();
  bool admitted = false;
  if (i < n) {
    i64 key = keys[i];
    Set set = set_of(t, mix(key));
    u64 head, way = WAYS;
    bool here = find_way(set.line, key, &head) >= 0;
    for (u32 free = ~(u32)head & OCCUPIED; lane == 0 && !here && free; free = ~(u32)head & OCCUPIED) {
      u32 next = __ffs(free) - 1;
      u64 seen = atomicCAS(set.line, head, with_heat(head | 1ull << next, next, 0));
      if (seen == head) {
        way = next;
        break;
      }
      head = seen;
    }
    way = team_broadcast(way, 0);
    if (way < WAYS) {
      copy_row(set.rows + way * t.stride, rows + i * t.stride, t.stride);
      if (lane == 0) set.line[1 + way] = (u64)key;
      int place = find_absent(set.absent, key, &head);
      if (place >= 0 && lane == 0 && atomicAnd(set.absent, ~(17ull << place)) >> place & 1)
        atomicAdd((u64*)totals + ABSENT_KEYS, (u64)-1);
      admitted = true;
    }
  }
  u64 let_in = __popc(__ballot_sync(ALL, admitted && lane == 0));
  if (warp_lane() == 0 && let_in) {
    atomicAdd((u64*)totals + ROWS, let_in);
    atomicAdd((u64*)totals + ADMITTED, let_in);
  }
  say_done(counters, done, totals, told);
}

// Admits keys; a resident key keeps its row. Evicted keys and rows are written to out_keys and out_rows (as many places as keys; 0 for
// neither), in any order.
extern "C" __global__ void insert(const __grid_constant__ Table t, const i64* keys, const u8* rows, const u32* runs,
                                  i64 n, i64* out_keys, u8* out_rows, i64* totals, i64* told,
                                  u32* counters, u32* done) {
  i64 run = team_index();
  if (run < n) {
    i64 admitted = 0, evicted = 0, fresh = 0, forgotten = 0;
    for (u32 j = runs[run]; j < runs[run + 1]; j++) {
      i64 key = keys[j];
      Set set = set_of(t, mix(key));
      u64 head;
      if (find_way(set.line, key, &head) >= 0) continue;
      u32 free = ~(u32)head & OCCUPIED, way;
      if (free) {
        way = __ffs(free) - 1;
        fresh++;
      } else {
        way = next_victim(&head);
        if (out_keys) {
          u64 at = 0;
          if (team_lane() == 0) {
            at = atomicAdd(counters, 1u);
            out_keys[at] = (i64)set.line[1 + way];
          }
          at = team_broadcast(at, 0);
          copy_row(out_rows + at * t.stride, set.rows + (u64)way * t.stride, t.stride);
          team_fence();  // the whole old row is read before the new row is written
        }
        evicted++;
      }
      forgotten += forget_absent(set.absent, key);
      put(t, set, head, way, key, 0, rows + (u64)j * t.stride);
      admitted++;
    }
    count(totals, ROWS, fresh);
    count(totals, ABSENT_KEYS, -forgotten);
    count(totals, ADMITTED, admitted);
    count(totals, EVICTED, evicted);
  }
  say_done(counters, done, totals, told);
}

extern "C" __global__ void insert_absent(const __grid_constant__ Table t, const i64* keys, const u32* runs, i64 n,
                                         i64* totals, i64* told, u32* counters, u32* done) {
  i64 run = team_index();
  if (run < n) {
    i64 added = 0, marked = 0;
    for (u32 j = runs[run]; j < runs[run + 1]; j++) {
      Set set = set_of(t, mix(keys[j]));
      u64 head;
      if (find_way(set.line, keys[j], &head) < 0) marked += mark_absent(set.absent, keys[j], &added);
    }
    count(totals, ABSENT_KEYS, added);
    if (marked && team_lane() == 0) atomicAdd(counters, (u32)marked);
  }
  say_done(counters, done, totals, told);
}

// Applies a delta to resident keys: rows are overwritten or erased, absent marks set and cleared. Admits no key.
extern "C" __global__ void update(const __grid_constant__ Table t, const i64* keys, const u8* rows, const u8* deleted,
                                  const u32* runs, i64 n, i64* totals, i64* told, u32* counters, u32* done) {
  i64 run = team_index();
  if (run < n) {
    i64 erased = 0, absent = 0;
    for (u32 j = runs[run]; j < runs[run + 1]; j++) {
      Set set = set_of(t, mix(keys[j]));
      u64 head;
      int way = find_way(set.line, keys[j], &head);
      if (!deleted[j]) {
        absent -= forget_absent(set.absent, keys[j]);
        if (way >= 0) copy_row(set.rows + (u64)way * t.stride, rows + (u64)j * t.stride, t.stride);
      } else if (way >= 0) {
        write_word(set.line, 0, with_heat(head & ~(1ull << way), way, 0));
        team_fence();
        erased++;
        mark_absent(set.absent, keys[j], &absent);
      }
    }
    count(totals, ROWS, -erased);
    count(totals, ABSENT_KEYS, absent);
  }
  say_done(counters, done, totals, told);
}

// Halving: merges each set of the upper half into its partner in the lower half; the hotter rows stay. `t` is the table before. One team
// for each set of the lower half.
extern "C" __global__ void merge(const __grid_constant__ Table t, i64 sets, i64* totals, i64* told, u32* counters,
                                 u32* done) {
  i64 index = team_index();
  if (index < sets) {
    u64 region = index / t.sets_per_region, within = index % t.sets_per_region;
    Set low = set_at(t, region, within), high = set_at(t, region + (1ull << (t.depth - 1)), within);
    u64 above = high.line[0];
    i64 lost = 0, forgotten = 0;
    for (int heat = MAX_HEAT; heat >= 0; heat--) {
      for (u32 from = 0; from < WAYS; from++) {
        if (!(above >> from & 1) || heat_of(above, from) != (u32)heat) continue;
        u64 head = low.line[0];
        u32 to = WAYS, least = heat;
        for (u32 way = 0; way < WAYS; way++) {
          if (!(head >> way & 1)) {
            to = way;
            break;
          }
          if (heat_of(head, way) < least) {
            to = way;
            least = heat_of(head, way);
          }
        }
        if (to == WAYS) {
          lost++;
          continue;
        }
        lost += head >> to & 1;
        team_fence();  // all lanes read the head before one writes it
        put(t, low, head, to, (i64)high.line[1 + from], heat, high.rows + (u64)from * t.stride);
      }
    }
    u64 theirs = high.absent[0];
    for (u32 from = 0; from < ABSENT_WAYS; from++) {
      if (!(theirs >> from & 1)) continue;
      u64 head = low.absent[0];
      u32 free = ~(u32)head & 7;
      team_fence();
      if (!free) {
        forgotten++;
        continue;
      }
      u32 to = __ffs(free) - 1;
      write_word(low.absent, 1 + to, high.absent[1 + from]);
      write_word(low.absent, 0, head | 1ull << to);
      team_fence();
    }
    count(totals, ROWS, -lost);
    count(totals, ABSENT_KEYS, -forgotten);
  }
  say_done(counters, done, totals, told);
}

// Doubling: moves rows that belong to the upper half there; its memory is all zeros. `t` is the table after. One team for each set of
// the lower half.
extern "C" __global__ void split(const __grid_constant__ Table t, i64 sets, i64* totals, i64* told, u32* counters,
                                 u32* done) {
  i64 index = team_index();
  if (index < sets) {
    u64 region = index / t.sets_per_region, within = index % t.sets_per_region, half = 1ull << (t.depth - 1);
    Set low = set_at(t, region, within), high = set_at(t, region + half, within);
    u64 head = low.line[0], above = 0;
    for (u32 way = 0; way < WAYS; way++) {
      if (!(head >> way & 1)) continue;
      i64 key = (i64)low.line[1 + way];
      if (!(mix(key) & half)) continue;
      copy_row(high.rows + (u64)way * t.stride, low.rows + (u64)way * t.stride, t.stride);
      write_word(high.line, 1 + way, (u64)key);
      above = with_heat(above | 1ull << way, way, heat_of(head, way));
      head = with_heat(head & ~(1ull << way), way, 0);
    }
    u64 absent = low.absent[0], absent_above = 0;
    for (u32 i = 0; i < ABSENT_WAYS; i++) {
      if (!(absent >> i & 1) || !(mix((i64)low.absent[1 + i]) & half)) continue;
      write_word(high.absent, 1 + i, low.absent[1 + i]);
      absent_above |= 1ull << i;
      absent &= ~(17ull << i);
    }
    team_fence();
    write_word(high.line, 0, above);
    write_word(low.line, 0, head);
    write_word(high.absent, 0, absent_above);
    write_word(low.absent, 0, absent);
  }
  say_done(counters, done, totals, told);
}
