// Look-ups, of single rows or pooled: a first kernel answers the keys that the GPU can read, a second kernel the others.
//
// `look_up` and `pool` answer keys of the table, or of the host tier if they may read it (`host.cuh`), and list the others. Of keys that
// are settled before (`before`), rows of deltas are in `given`, as stored: row i at i times the table's stride. Keys on the GPU, which the
// CPU does not see, are listed if the filter of a delta has them (`filters`). The CPU
// fetches the rows of listed keys, and `put_rows` or `pool_waiting` answers with them. A team works on two keys, a warp on a bag. Keys,
// states, lists and rows may be in page-locked CPU memory. The last block of a kernel reports in `done` that the kernel is done.
//
// `counters`: keys listed so far, blocks done so far. Both are 0 between kernels.

// Listed keys, which the GPU cannot answer: number r is key `keys[r]`, at position `at[r]`. There is room for `most`.
struct Listed {
  i64* keys;
  u32* at;
  u32* counters;
  i64 most;
};

static const u32 NOWHERE = 0xffffffffu;  // in place of a position: offsets on the GPU do not fit the keys

// Lists a key. Returns its number. There are too many only if offsets do not fit, which the CPU tells by their number.
__device__ __forceinline__ u32 list(const Listed& listed, i64 key, u32 at) {
  u32 number = atomicAdd(listed.counters, 1u);
  if (number >= listed.most) return 0;
  listed.keys[number] = key;
  listed.at[number] = at;
  return number;
}

// The first half of a report: a kernel is done and has listed keys; no row is missing, from the kernel or, later, from the CPU.
static const u32 DONE = 1, WHOLE = 2;

// Reports to the CPU, in one word, that all writes of this kernel are visible, and how many keys are listed; a kernel that writes to
// the table reports its totals before. `done` 0: no report.
__device__ __forceinline__ void say_done(u32* counters, u32* done, i64* totals = 0, i64* told = 0) {
  if (!done) return;
  __syncthreads();
  if (threadIdx.x) return;
  __threadfence_system();
  if (atomicAdd(counters + 1, 1u) != gridDim.x - 1) return;
  counters[1] = 0;
  for (u32 k = 0; told && k < 4; k++) told[k] = (i64)atomicAdd((u64*)totals + k, 0ull);
  if (told) __threadfence_system();
  u64 listed = atomicExch(counters, 0u);
  *(volatile u64*)done = (listed ? DONE : WHOLE) | listed << 32;
}

// What is settled before the look-up: states, of deltas or 0 for none, whose rows are in `given`; and the padding key, if `padded`.
// `filters`, or 0: of each delta the number of words, a power of two, and the words (`kernels/overlay_index.py`); then a 0.
struct Settled {
  const u8* before;
  const u8* given;
  i64 padding;
  u32 padded;
  const u64* filters;
};

// Whether a delta may have changed the key. Of those that none has changed, this is said of 1 or 2 in 100.
__device__ __forceinline__ bool may_be_changed(const u64* filters, i64 key) {
  if (!filters) return false;
  u64 h = mix(key), bits = 1ull << (h >> 58) | 1ull << (h >> 52 & 63);
  for (u64 words = *filters; words; words = *(filters += words + 1))
    if ((filters[1 + (h >> 8 & (words - 1))] & bits) == bits) return true;
  return false;
}

__device__ __forceinline__ u8 state_before(const Settled& settled, i64 i, i64 key) {
  if (settled.padded && key == settled.padding) return STATE_PADDING;
  if (may_be_changed(settled.filters, key)) return STATE_CHANGED;
  return settled.before ? settled.before[i] : STATE_PENDING;
}

// A key that is being looked up, with the load of its set's line begun.
struct Probe {
  i64 key;
  Set set;
  ulonglong2 words;
  u8 before;
};

// `before`: its state before the look-up.
__device__ __forceinline__ Probe begin_probe(const Table& t, i64 key, u8 before) {
  Probe probe;
  probe.key = key;
  probe.before = before;
  probe.set = set_of(t, mix(probe.key));
  probe.words = load_line(probe.set.line);
  return probe;
}

// The `source` of key i's row; SOURCE_ELSEWHERE if the table does not have the key.
__device__ __forceinline__ i64 locate(const Table& t, const Probe& probe, i64 i, u8* state, const u8* given) {
  u32 lane = team_lane();
  if (probe.before == STATE_CHANGED) return SOURCE_ELSEWHERE;
  if (probe.before != STATE_PENDING) {
    if (lane == 0) state[i] = probe.before;
    if (probe.before == STATE_PADDING) return SOURCE_PADDING;
    return probe.before == STATE_ABSENT ? SOURCE_ABSENT : (i64)(given + (u64)i * t.stride);
  }
  u64 head;
  int way = match_way(probe.words, probe.key, &head);
  if (way >= 0) {
    if (lane == 0) {
      state[i] = STATE_DEVICE;
      raise_heat(probe.set.line, head, way);
    }
    return (i64)(probe.set.rows + (u64)way * t.stride);
  }
  int place = find_absent(probe.set.absent, probe.key, &head);
  if (place >= 0) {
    u64 used = 16ull << place;
    if (lane == 0) {
      state[i] = STATE_ABSENT;
      if (!(head & used)) atomicOr(probe.set.absent, used);
    }
    return SOURCE_ABSENT;
  }
  return SOURCE_ELSEWHERE;
}

// The `source` of a key that the table does not have: its row is copied from the host tier to number i of `copies`, at the table's
// stride, or the key is listed; only lane 0 knows the number of a listed key.
__device__ __forceinline__ i64 locate_below(const Table& t, const Host& h, i64 key, i64 i, u8* state, u8* copies,
                                            const Settled& settled, const Listed& listed) {
  u32 lane = team_lane(), number = 0;
  if (h.lines && !may_be_changed(settled.filters, key)) {
    u8* copy = copies + i * t.stride;
    u8 found = host_find(h, key, copy);
    if (found != STATE_PENDING) {
      if (lane == 0) state[i] = found;
      return found == STATE_HOST ? (i64)copy : SOURCE_ABSENT;
    }
  }
  if (lane == 0) number = list(listed, key, (u32)i);
  return FIRST_UPLOAD - (i64)number;
}

// Writes one vector of an answer, of dtype float32 or, with `half`, float16; leaves the vector of a listed key unchanged.
__device__ __forceinline__ void answer_row(const Table& t, i64 from, u8* to, u32 half) {
  if (from > 0)
    decode_row(t.code, half, in_memory(from), to, t.dim);
  else if (from == SOURCE_ABSENT)
    decode_row(FLOAT32, half, in_memory(t.fallback), to, t.dim);
  else if (from == SOURCE_PADDING)
    for (u32 k = team_lane(); k < t.dim; k += LANES) store_one(half, to, k, 0.f);
}

// out[i] [n, dim]: rows of the table, of the host tier and of deltas, the default, zeros for padding. A team works on two keys: it loads both lines,
// then both rows, at a time.
extern "C" __global__ void look_up(const __grid_constant__ Table t, const __grid_constant__ Host h, const i64* keys,
                                   const u8* before, u8* state, i64 n, i64* missing, u32* at, u8* copies, const u8* given,
                                   i64 padding, u32 padded, const u64* filters, u8* out, u32 half, u32* counters, u32* done) {
  i64 i = 2 * team_index();
  if (i < n) {
    Listed listed = {missing, at, counters, n};
    Settled settled = {before, given, padding, padded, filters};
    bool two = i + 1 < n;
    i64 one = keys[i], other = two ? keys[i + 1] : one;
    Probe first = begin_probe(t, one, state_before(settled, i, one));
    Probe second = begin_probe(t, other, state_before(settled, two ? i + 1 : i, other));
    i64 from = locate(t, first, i, state, given), after = two ? locate(t, second, i + 1, state, given) : from;
    if (from == SOURCE_ELSEWHERE) from = locate_below(t, h, first.key, i, state, copies, settled, listed);
    if (two && after == SOURCE_ELSEWHERE) after = locate_below(t, h, second.key, i + 1, state, copies, settled, listed);
    u32 bytes = t.dim * (half ? 2 : 4);
    u8* to = out + (u64)i * bytes;
    if (two && from > 0 && after > 0 && t.code == half && bytes % 16 == 0) {
      copy_rows(to, in_memory(from), in_memory(after), bytes);
    } else {
      answer_row(t, from, to, half);
      if (two) answer_row(t, after, to + bytes, half);
    }
  }
  say_done(counters, done);
}

// out[at[r]] = rows[r], both of the answer's dtype. `listed`: where their number is by now; there may be fewer teams.
extern "C" __global__ void put_rows(const u8* rows, const u32* at, const u32* listed, u8* out, u32 dim, u32 half, u32* counters,
                                    u32* done) {
  i64 n = *(const volatile u32*)listed;
  u64 bytes = dim * (half ? 2 : 4);
  for (i64 r = team_index(); r < n; r += teams()) copy_vector(half, out + at[r] * bytes, rows + r * bytes, dim);
  say_done(counters, done);
}

// The keys [*begin, *end) of a bag. False, and no keys, if its offsets do not fit: nobody has checked those on the GPU.
__device__ __forceinline__ bool bag_of(const i64* offsets, i64 b, i64 bags, i64 n, i64* begin, i64* end) {
  *begin = offsets[b];
  *end = b + 1 < bags ? offsets[b + 1] : n;
  if (0 <= *begin && *begin <= *end && *end <= n && (b || !*begin)) return true;
  *begin = *end = 0;
  return false;
}

static const u32 AT_ONCE = 8;  // rows of a bag that are loaded at a time

// Numbers k to k + 3 of the row of key i of a bag; see `pool_bag`.
__device__ __forceinline__ float4 row_of(const Table& t, i64 from, i64 i, u32 k, const u8* uploads, const u8* kept) {
  if (from == SOURCE_ABSENT) return decode_four(FLOAT32, in_memory(t.fallback), k, t.dim);
  if (from <= FIRST_UPLOAD) return load_four(uploads + (FIRST_UPLOAD - from) * t.dim * 4, k, t.dim);
  if (uploads) return load_four(kept + i * t.dim * 4, k, t.dim);
  return decode_four(t.code, in_memory(from), k, t.dim);
}

// The divisor of a bag's sum, as in `kernels/pool.py`: for mean the sum of the weights, for sqrtn the root of the sum of their squares.
// `counted`: keys that are not padding.
__device__ __forceinline__ float divisor_of(const i64* source, i64 begin, i64 end, const float* weights, u32 combiner, u32 counted) {
  if (combiner == 0) return 1.f;
  float total = (float)counted;
  if (weights) {
    total = 0.f;
    for (i64 i = begin; i < end; i++) {
      float weight = weights[i];
      if (source[i] != SOURCE_PADDING) total = __fadd_rn(total, combiner == 2 ? __fmul_rn(weight, weight) : weight);
    }
  }
  if (total == 0.f) return 0.f;
  return combiner == 2 ? __fsqrt_rn(total) : total;
}

// The sum of a bag [begin, end) over its divisor (zeros if that is 0), by a warp, with the order and rounding of `kernels/pool.py`.
// `uploads`: float32 rows from the CPU, and then rows that the first kernel found are in `kept`. 0: the first kernel found all.
__device__ __forceinline__ void pool_bag(const Table& t, const i64* source, i64 begin, i64 end, const float* weights,
                                         u32 combiner, u32 counted, const u8* uploads, const u8* kept, u8* to, u32 half) {
  float divisor = divisor_of(source, begin, end, weights, combiner, counted);
  for (u32 k = 4 * warp_lane(); k < t.dim; k += 4 * WARP) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i64 i = begin; i < end; i += AT_ONCE) {
      float4 rows[AT_ONCE];
      float factors[AT_ONCE];
      bool counts[AT_ONCE];
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        i64 from = i + j < end ? source[i + j] : SOURCE_PADDING;
        counts[j] = from != SOURCE_PADDING;
        if (!counts[j]) continue;
        rows[j] = row_of(t, from, i + j, k, uploads, kept);
        factors[j] = weights ? weights[i + j] : 1.f;
      }
#pragma unroll
      for (u32 j = 0; j < AT_ONCE; j++) {
        if (!counts[j]) continue;
        sum.x = __fadd_rn(sum.x, __fmul_rn(factors[j], rows[j].x));
        sum.y = __fadd_rn(sum.y, __fmul_rn(factors[j], rows[j].y));
        sum.z = __fadd_rn(sum.z, __fmul_rn(factors[j], rows[j].z));
        sum.w = __fadd_rn(sum.w, __fmul_rn(factors[j], rows[j].w));
      }
    }
    if (divisor == 0.f) sum = make_float4(0.f, 0.f, 0.f, 0.f);
    else if (combiner)
      sum = make_float4(__fdiv_rn(sum.x, divisor), __fdiv_rn(sum.y, divisor), __fdiv_rn(sum.z, divisor),
                        __fdiv_rn(sum.w, divisor));
    store_four(half, to, k, t.dim, sum);
  }
}

// Pools bags b = [offsets[b], offsets[b + 1]) whose keys were all found, and marks them in `whole`; for other bags it keeps the rows
// that it found in `kept`, float32[n, dim], because the table may change before the missing rows come.
// `weights` may be 0. A warp works on a bag: it reads 32 keys at a time, and each of its teams looks up two of them at a time.
extern "C" __global__ void pool(const __grid_constant__ Table t, const __grid_constant__ Host h, const i64* keys,
                                const u8* before, u8* state, i64 n, i64* missing, u32* at, u8* copies, const u8* given,
                                i64 padding, u32 padded, const u64* filters, const i64* offsets, i64 bags, const float* weights, u32 combiner,
                                i64* source, u8* kept, u8* whole, u8* out, u32 half, u32* counters, u32* done) {
  i64 b = warp_index();
  if (b < bags) {
    Listed listed = {missing, at, counters, n};
    Settled settled = {before, given, padding, padded, filters};
    u32 lane = team_lane(), team = warp_lane() / LANES, counted = 0;
    i64 begin, end;
    bool elsewhere = false, left = !bag_of(offsets, b, bags, n, &begin, &end);
    if (left && warp_lane() == 0) list(listed, 0, NOWHERE);
    for (i64 base = begin; base < end; base += WARP) {
      i64 mine = base + warp_lane() < end ? base + warp_lane() : base;
      u64 key = (u64)keys[mine];
      u32 was = state_before(settled, mine, (i64)key);
      for (u32 r = 0; r < WARP && base + r < end; r += WARP / LANES * 2) {
        u32 place = r + 2 * team;
        i64 i = base + place;
        i64 one = (i64)__shfl_sync(ALL, key, place, WARP), other = (i64)__shfl_sync(ALL, key, place + 1, WARP);
        u8 one_was = (u8)__shfl_sync(ALL, (u64)was, place, WARP), other_was = (u8)__shfl_sync(ALL, (u64)was, place + 1, WARP);
        Probe first = begin_probe(t, one, one_was), second = begin_probe(t, other, other_was);
        i64 from = i < end ? locate(t, first, i, state, given) : SOURCE_PADDING;
        i64 after = i + 1 < end ? locate(t, second, i + 1, state, given) : SOURCE_PADDING;
        elsewhere |= from == SOURCE_ELSEWHERE || after == SOURCE_ELSEWHERE;
        counted += (from != SOURCE_PADDING) + (after != SOURCE_PADDING);
        if (lane == 0 && i < end) source[i] = from;
        if (lane == 0 && i + 1 < end) source[i + 1] = after;
      }
    }
    __syncwarp(ALL);
    if (__ballot_sync(ALL, elsewhere)) {
      for (i64 i = begin + team; i < end; i += WARP / LANES) {
        if (source[i] != SOURCE_ELSEWHERE) continue;
        team_fence();
        i64 from = locate_below(t, h, keys[i], i, state, copies, settled, listed);
        left |= from <= FIRST_UPLOAD;
        if (lane == 0) source[i] = from;
      }
      __syncwarp(ALL);
      left = __ballot_sync(ALL, left) != 0;
    }
    for (u32 distance = LANES; distance < WARP; distance *= 2)
      counted += (u32)__shfl_sync(ALL, (u64)counted, warp_lane() ^ distance, WARP);
    if (warp_lane() == 0) whole[b] = !left;
    if (left) {
      for (i64 i = begin + team; i < end; i += WARP / LANES)
        if (source[i] > 0) decode_row(t.code, 0, in_memory(source[i]), kept + i * t.dim * 4, t.dim);
    } else {
      pool_bag(t, source, begin, end, weights, combiner, counted, 0, 0, out + b * t.dim * (half ? 2 : 4), half);
    }
  }
  say_done(counters, done);
}

// Pools the bags that `pool` has left, with the rows of listed keys: `rows` float32[listed, dim]. Bags whose offsets do not fit are NaN.
extern "C" __global__ void pool_waiting(const __grid_constant__ Table t, i64 n, const i64* offsets, i64 bags,
                                     const float* weights, u32 combiner, const i64* source, const u8* kept,
                                     const u8* whole, const u8* rows, u8* out, u32 half, u32* counters, u32* done) {
  i64 b = warp_index();
  if (b < bags && !whole[b]) {
    i64 begin, end;
    u32 counted = 0;
    u8* to = out + b * t.dim * (half ? 2 : 4);
    if (bag_of(offsets, b, bags, n, &begin, &end)) {
      for (i64 i = begin; i < end; i++) counted += source[i] != SOURCE_PADDING;
      pool_bag(t, source, begin, end, weights, combiner, counted, rows, kept, to, half);
    } else {
      float nan = __fdiv_rn(0.f, 0.f);
      for (u32 k = 4 * warp_lane(); k < t.dim; k += 4 * WARP) store_four(half, to, k, t.dim, make_float4(nan, nan, nan, nan));
    }
  }
  say_done(counters, done);
}
