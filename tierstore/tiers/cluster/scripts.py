"""Scripts in Lua that run on the servers. All keys of a call have the same tag.

On Redis and Valkey a script is one step. On Kvrocks each call is, if the server dies, and a reader may see what is
between two of them: the watermark says that a delta is being applied before its first row is there, and that it is
applied after its last.
"""

from __future__ import annotations

APPLIED, ALREADY, GAP, FENCED, MISSING, FORKED = range(6)  # the first of the returned values

# KEYS: the watermark, then the rows of a table for each piece. ARGV: epoch, seq, the seq before it, digest ('': unknown), chunk, whether it is the last
# chunk; then for each piece: bytes of a row, codes, rows, codes of deleted keys. Returns an outcome, and the epoch or seq that it refers to. Seqs are
# compared as text: Lua's numbers are doubles, which are exact only up to 2⁵³.
APPLY = b"""
local mark = redis.call('HMGET', KEYS[1], 'seq', 'applying', 'epoch', 'chunk', 'digest')
if not mark[1] then return {4, 0} end
local epoch, seq, digest, chunk = tonumber(ARGV[1]), ARGV[2], ARGV[4], tonumber(ARGV[5])
local stored = tonumber(mark[3] or '0')
if epoch < stored then return {3, stored} end
if epoch > stored then redis.call('HSET', KEYS[1], 'epoch', ARGV[1]) end
local at, is_begun = mark[1], mark[2] == seq
local named, held = string.match(mark[5] or '', '^(%d+) (%w+)$')
if is_begun and named == seq and digest ~= '' and held ~= digest then return {5, seq} end
if #seq < #at or (#seq == #at and seq <= at) then return {1, at} end
local done = 0
if is_begun then done = tonumber(mark[4] or '0') end
if at ~= ARGV[3] or chunk > done then return {2, at} end
if #KEYS > 1 and not is_begun then
  redis.call('HSET', KEYS[1], 'applying', seq, 'chunk', '0', 'digest', seq .. ' ' .. digest)
end
for piece = 2, #KEYS do
  local first = 7 + (piece - 2) * 4
  local size, codes, rows, gone = tonumber(ARGV[first]), ARGV[first + 1], ARGV[first + 2], ARGV[first + 3]
  local count = #codes / 8
  local i = 0
  while i < count do
    local words, n = {}, 0
    while i < count and n < 2000 do
      words[n + 1] = string.sub(codes, i * 8 + 1, i * 8 + 8)
      words[n + 2] = string.sub(rows, i * size + 1, i * size + size)
      n = n + 2
      i = i + 1
    end
    redis.call('HSET', KEYS[piece], unpack(words))
  end
  count = #gone / 8
  i = 0
  while i < count do
    local words, n = {}, 0
    while i < count and n < 2000 do
      words[n + 1] = string.sub(gone, i * 8 + 1, i * 8 + 8)
      n = n + 1
      i = i + 1
    end
    redis.call('HDEL', KEYS[piece], unpack(words))
  end
end
if ARGV[6] == '1' then
  redis.call('HSET', KEYS[1], 'seq', seq, 'applying', seq, 'chunk', '0', 'digest', seq .. ' ' .. digest)
else
  redis.call('HSET', KEYS[1], 'applying', seq, 'chunk', tostring(chunk + 1), 'digest', seq .. ' ' .. digest)
end
return {0, seq}
"""
