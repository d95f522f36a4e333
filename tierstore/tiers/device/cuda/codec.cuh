// Decoding of rows: the storage dtypes of `kernels/codec.py`, with the same rounding.
//
// Rows start at multiples of 16 bytes. A lane handles four numbers at a time.
#pragma once

static const u32 FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, INT8 = 3, INT4 = 4;

// Decodes the lower four bits of `codes`, with the scale and offset at the row's beginning.
__device__ __forceinline__ float decode_int4(const u8* row, u32 codes) {
  return __fmaf_rn(half_to_float(((const u16*)row)[0]), (float)(codes & 15), half_to_float(((const u16*)row)[1]));
}

__device__ __forceinline__ float decode_one(u32 code, const u8* row, u32 k) {
  if (code == FLOAT32) return ((const float*)row)[k];
  if (code == FLOAT16) return half_to_float(((const u16*)row)[k]);
  if (code == BFLOAT16) return __uint_as_float((u32)((const u16*)row)[k] << 16);
  if (code == INT8) return __fmaf_rn(((const float*)row)[0], (float)row[8 + k], ((const float*)row)[1]);
  return decode_int4(row, row[4 + k / 2] >> 4 * (k & 1));
}

// Numbers k to k + 3 of a row; k is a multiple of 4. Numbers beyond the row's end are 0.
__device__ __forceinline__ float4 decode_four(u32 code, const u8* row, u32 k, u32 dim) {
  if (k + 4 > dim) {
    float4 part = make_float4(0.f, 0.f, 0.f, 0.f);
    part.x = decode_one(code, row, k);
    if (k + 1 < dim) part.y = decode_one(code, row, k + 1);
    if (k + 2 < dim) part.z = decode_one(code, row, k + 2);
    return part;
  }
  if (code == FLOAT32) return *(const float4*)(row + 4 * k);
  if (code == INT8) {
    float scale = ((const float*)row)[0], offset = ((const float*)row)[1];
    uchar4 codes = *(const uchar4*)(row + 8 + k);
    return make_float4(
        __fmaf_rn(scale, (float)codes.x, offset), __fmaf_rn(scale, (float)codes.y, offset),
        __fmaf_rn(scale, (float)codes.z, offset), __fmaf_rn(scale, (float)codes.w, offset));
  }
  if (code == INT4) {
    u32 codes = *(const u16*)(row + 4 + k / 2);
    return make_float4(
        decode_int4(row, codes), decode_int4(row, codes >> 4), decode_int4(row, codes >> 8), decode_int4(row, codes >> 12));
  }
  ushort4 bits = *(const ushort4*)(row + 2 * k);
  if (code == FLOAT16)
    return make_float4(half_to_float(bits.x), half_to_float(bits.y), half_to_float(bits.z), half_to_float(bits.w));
  return make_float4(
      __uint_as_float((u32)bits.x << 16), __uint_as_float((u32)bits.y << 16),
      __uint_as_float((u32)bits.z << 16), __uint_as_float((u32)bits.w << 16));
}

__device__ __forceinline__ void store_one(u32 half, u8* out, u32 k, float value) {
  if (half)
    ((u16*)out)[k] = float_to_half(value);
  else
    ((float*)out)[k] = value;
}

// Numbers k to k + 3 of a vector of the answer, at any alignment that its dtype allows.
__device__ __forceinline__ void store_four(u32 half, u8* out, u32 k, u32 dim, float4 value) {
  if (dim % 4 == 0) {
    if (half) {
      ushort4 bits;
      bits.x = float_to_half(value.x);
      bits.y = float_to_half(value.y);
      bits.z = float_to_half(value.z);
      bits.w = float_to_half(value.w);
      *(ushort4*)(out + 2 * k) = bits;
    } else {
      *(float4*)(out + 4 * k) = value;
    }
    return;
  }
  store_one(half, out, k, value.x);
  if (k + 1 < dim) store_one(half, out, k + 1, value.y);
  if (k + 2 < dim) store_one(half, out, k + 2, value.z);
  if (k + 3 < dim) store_one(half, out, k + 3, value.w);
}

// Numbers k to k + 3 of a float32 vector at any alignment.
__device__ __forceinline__ float4 load_four(const u8* vector, u32 k, u32 dim) {
  const float* from = (const float*)vector;
  if (dim % 4 == 0) return *(const float4*)(from + k);
  float4 part = make_float4(from[k], 0.f, 0.f, 0.f);
  if (k + 1 < dim) part.y = from[k + 1];
  if (k + 2 < dim) part.z = from[k + 2];
  if (k + 3 < dim) part.w = from[k + 3];
  return part;
}

// Copies one vector, by a team: 16 bytes a lane, two loads at a time.
__device__ __forceinline__ void copy_row(u8* to, const u8* from, u32 bytes) {
  u32 lane = team_lane(), chunks = bytes / 16;
  u32 c = lane;
  for (; c + LANES < chunks; c += 2 * LANES) {
    uint4 first = ((const uint4*)from)[c], second = ((const uint4*)from)[c + LANES];
    ((uint4*)to)[c] = first;
    ((uint4*)to)[c + LANES] = second;
  }
  if (c < chunks) ((uint4*)to)[c] = ((const uint4*)from)[c];
}

// Copies two vectors of any alignment to `to`, end to end, loading a part of each at a time.
__device__ __forceinline__ void copy_rows(u8* to, const u8* first, const u8* second, u32 bytes) {
  u32 chunks = bytes / 16;
  for (u32 c = team_lane(); c < chunks; c += LANES) {
    uint4 one = ((const uint4*)first)[c], other = ((const uint4*)second)[c];
    ((uint4*)to)[c] = one;
    ((uint4*)(to + bytes))[c] = other;
  }
}

// The same for a vector of an answer, at any alignment that its dtype allows.
__device__ __forceinline__ void copy_vector(u32 half, u8* to, const u8* from, u32 dim) {
  u32 bytes = half ? 2 * dim : 4 * dim;
  if (bytes % 16 == 0)
    copy_row(to, from, bytes);
  else if (half)
    for (u32 k = team_lane(); k < dim; k += LANES) ((u16*)to)[k] = ((const u16*)from)[k];
  else
    for (u32 k = team_lane(); k < dim; k += LANES) ((u32*)to)[k] = ((const u32*)from)[k];
}

__device__ __forceinline__ void decode_row(u32 code, u32 half, const u8* row, u8* out, u32 dim) {
  u32 bytes = half ? 2 * dim : 4 * dim;
  if (code == half && bytes % 16 == 0) {
    copy_row(out, row, bytes);
    return;
  }
  for (u32 k = 4 * team_lane(); k < dim; k += 4 * LANES)
    store_four(half, out, k, dim, decode_four(code, row, k, dim));
}
