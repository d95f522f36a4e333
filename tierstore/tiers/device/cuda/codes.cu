// Codes of integer keys, as `formats/keys.py` and `formats/key_hash.py` make them on the CPU.

static const u32 NO_HASH = 0, MOD_SIGNED = 1, MOD_UNSIGNED = 2;  // `form`; otherwise with a seed

// XXH3-64 of eight bytes; `bits` is of the seed.
__device__ __forceinline__ u64 xxh3(u64 code, u64 bits) {
  const u64 factor = 0x9FB21C651E98DF25ull;
  u64 x = code ^ bits;
  x = (x << 32 | x >> 32) ^ 0x1CAD21F72C81017Cull ^ 0xDB979083E96DD4DEull;
  x ^= (x << 49 | x >> 15) ^ (x << 24 | x >> 40);
  x *= factor;
  x = (x ^ ((x >> 35) + 8)) * factor;
  return x ^ x >> 28;
}

// codes[i] of key i, which has `width` bytes. One thread a key.
extern "C" __global__ void make_codes(const u8* keys, u32 width, u32 is_signed, i64 n, u32 form, u64 mod, u64 bits, i64* codes) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u64 code;
  if (width == 8) {
    code = ((const u64*)keys)[i];
  } else {
    u32 key = width == 4 ? ((const u32*)keys)[i] : width == 2 ? ((const u16*)keys)[i] : keys[i];
    u64 sign = 1ull << (8 * width - 1);
    code = is_signed ? (key ^ sign) - sign : key;
  }
  if (form == MOD_SIGNED) {
    i64 rest = (i64)code % (i64)mod;
    code = (u64)rest + (rest < 0 ? mod : 0);
  } else if (form != NO_HASH) {
    code = (form == MOD_UNSIGNED ? code : xxh3(code, bits)) % mod;
  }
  codes[i] = (i64)code;
}
