// Look-ups: which keys are here, and their rows, one by one or pooled.
//
// `probe` says where each key's row lies and gathers the distinct keys that are not here; `resolve` numbers those;
// `gather` or `pool` answers what is here, `scatter` or `pool` again the others, with uploaded rows.
// One team a key, or a bag. Addresses in `source` are good until the next kernel that writes to the table: the
// kernels that use them are put into the stream together with `probe`.

// In: keys, state. Out: source, and for keys still pending a claim: slots hold 1 + the position of the key that
// claimed them, ranks its number among the `count` distinct keys in `misses`. `claims` (all zero, a power of two of
// them) may be 0: then misses are only left pending.
extern "C" __global__ void probe(const __grid_constant__ Table t, const i64* keys, u8* state, i64 n, i64* source,
                                 u32* claims, u64 claim_mask, u32* ranks, i64* misses, u32* count) {
  i64 i = team_index();
  if (i >= n) return;
  u32 lane = team_lane();
  if (state[i] != STATE_PENDING) {
    if (lane == 0) source[i] = state[i] == STATE_PADDING ? SOURCE_PADDING : SOURCE_GIVEN;
    return;
  }
  i64 key = keys[i];
  u64 hashed = mix(key), head;
  Set set = set_of(t, hashed);
  int way = find_way(set.line, key, &head);
  if (way >= 0) {
    if (lane) return;
    source[i] = (i64)(set.rows + (u64)way * t.stride);
    state[i] = STATE_DEVICE;
    raise_heat(set.line, head, way);
    return;
  }
  int place = find_absent(set.absent, key, &head);
  if (lane) return;
  if (place >= 0) {
    source[i] = SOURCE_ABSENT;
    state[i] = STATE_ABSENT;
    u64 used = 16ull << place;
    if (!(head & used)) atomicOr(set.absent, used);
    return;
  }
  source[i] = FIRST_UPLOAD;
  if (!claims) return;
  u64 slot = hashed >> 20 & claim_mask;
  for (;;) {
    u32 owner = atomicCAS(claims + slot, 0u, (u32)i + 1);
    if (owner == 0) {
      u32 rank = atomicAdd(count, 1u);
      ranks[slot] = rank;
      misses[rank] = key;
      break;
    }
    if (keys[owner - 1] == key) break;
    slot = (slot + 1) & claim_mask;
  }
  source[i] = FIRST_UPLOAD - (i64)slot;
}

// Turns claims into numbers of rows that will come from the host. One thread a key.
extern "C" __global__ void resolve(i64* source, i64 n, const u32* ranks) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n || source[i] > FIRST_UPLOAD || source[i] == SOURCE_GIVEN) return;
  source[i] = FIRST_UPLOAD - (i64)ranks[FIRST_UPLOAD - source[i]];
}

// Numbers the rows of keys that were answered before `probe`: at[k] gets row first + k. One thread each.
extern "C" __global__ void place(i64* source, const i64* at, i64 n, i64 first) {
  i64 k = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (k < n) source[at[k]] = FIRST_UPLOAD - (first + k);
}

// out[i] of dtype float32 or, with `half`, float16 [n, dim]: rows of the table, the default, zeros for padding. What
// is to come from the host is left as it is.
extern "C" __global__ void gather(const __grid_constant__ Table t, const i64* source, i64 n, u8* out, u32 half) {
  i64 i = team_index();
  if (i >= n) return;
  i64 from = source[i];
  if (from <= FIRST_UPLOAD) return;
  u8* to = out + (u64)i * t.dim * (half ? 2 : 4);
  if (from > 0)
    decode_row(t.code, half, in_memory(from), to, t.dim);
  else if (from == SOURCE_ABSENT)
    decode_row(FLOAT32, half, in_memory(t.fallback), to, t.dim);
  else
    for (u32 k = team_lane(); k < t.dim; k += LANES) store_one(half, to, k, 0.f);
}

// out[i] = uploads[number of i], both of the answer's dtype, where the row comes from the host.
extern "C" __global__ void scatter(const __grid_constant__ Table t, const i64* source, i64 n, const u8* uploads,
                                   u8* out, u32 half) {
  i64 i = team_index();
  if (i >= n || source[i] > FIRST_UPLOAD) return;
  u64 bytes = t.dim * (half ? 2 : 4);
  copy_vector(half, out + i * bytes, uploads + (FIRST_UPLOAD - source[i]) * bytes, t.dim);
}

// state[i] becomes that of the uploaded row. One thread a key.
extern "C" __global__ void set_states(const i64* source, i64 n, const u8* states, u8* state) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && source[i] <= FIRST_UPLOAD) state[i] = states[FIRST_UPLOAD - source[i]];
}

// Pools bags b = [offsets[b], offsets[b + 1]) of keys; the sums are those of `kernels/pool.py`, in the same order and
// rounding. The first pass (`uploads` 0) answers bags that are all here, and says so in `done`; of the others it
// keeps the rows that are here in `kept`, float32[n, dim]. The second pass answers those, with float32 rows that came
// from the host. `weights` may be 0.
extern "C" __global__ void pool(const __grid_constant__ Table t, const i64* source, i64 n, const i64* offsets, i64 bags,
                                const float* weights, u32 combiner, const u8* uploads, u8* kept, u8* done, u8* out,
                                u32 half) {
  i64 b = team_index();
  if (b >= bags) return;
  u32 lane = team_lane();
  i64 begin = offsets[b], end = b + 1 < bags ? offsets[b + 1] : n;
  if (uploads) {
    if (done[b]) return;
  } else {
    bool left = false;
    for (i64 i = begin + lane; i < end; i += LANES) left |= source[i] <= FIRST_UPLOAD;
    u32 any = team_ballot(left);
    if (lane == 0) done[b] = !any;
    if (any) {
      for (i64 i = begin; i < end; i++)
        if (source[i] > 0) decode_row(t.code, 0, in_memory(source[i]), kept + i * t.dim * 4, t.dim);
      return;
    }
  }
  float total = 0.f;
  for (i64 i = begin; i < end; i++) {
    if (source[i] == SOURCE_PADDING) continue;
    float weight = weights ? weights[i] : 1.f;
    total = __fadd_rn(total, combiner == 2 ? __fmul_rn(weight, weight) : weight);
  }
  float divisor = combiner == 0 ? 1.f : combiner == 2 ? __fsqrt_rn(total) : total;
  bool nothing = combiner != 0 && total == 0.f;
  u8* to = out + b * t.dim * (half ? 2 : 4);
  for (u32 k = 4 * lane; k < t.dim; k += 4 * LANES) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i64 i = begin; i < end; i++) {
      i64 from = source[i];
      if (from == SOURCE_PADDING) continue;
      float4 row;
      if (from == SOURCE_ABSENT)
        row = decode_four(FLOAT32, in_memory(t.fallback), k, t.dim);
      else if (from <= FIRST_UPLOAD)
        row = load_four(uploads + (FIRST_UPLOAD - from) * t.dim * 4, k, t.dim);
      else if (uploads)
        row = load_four(kept + i * t.dim * 4, k, t.dim);
      else
        row = decode_four(t.code, in_memory(from), k, t.dim);
      float weight = weights ? weights[i] : 1.f;
      sum.x = __fadd_rn(sum.x, __fmul_rn(weight, row.x));
      sum.y = __fadd_rn(sum.y, __fmul_rn(weight, row.y));
      sum.z = __fadd_rn(sum.z, __fmul_rn(weight, row.z));
      sum.w = __fadd_rn(sum.w, __fmul_rn(weight, row.w));
    }
    if (nothing) sum = make_float4(0.f, 0.f, 0.f, 0.f);
    else if (combiner)
      sum = make_float4(__fdiv_rn(sum.x, divisor), __fdiv_rn(sum.y, divisor), __fdiv_rn(sum.z, divisor),
                        __fdiv_rn(sum.w, divisor));
    store_four(half, to, k, t.dim, sum);
  }
}
