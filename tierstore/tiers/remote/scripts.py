"""What runs on the servers: a script in Lua, as one step. All its keys have the same tag."""

from __future__ import annotations

APPLIED, ALREADY, GAP, FENCED, MISSING = range(5)  # what it returns first

# KEYS: the watermark, then the rows of a table for each piece. ARGV: epoch, seq, chunk, whether it is the last; then for each
# piece: bytes of a row, codes, rows, codes of deleted keys. Returns an outcome, and the epoch or seq that it is about.
APPLY = b"""
local mark = redis.call('HMGET', KEYS[1], 'seq', 'applying', 'epoch', 'chunk')
if not mark[1] then return {4, 0} end
local epoch, seq, chunk = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local stored = tonumber(mark[3] or '0')
if epoch < stored then return {3, stored} end
if epoch > stored then redis.call('HSET', KEYS[1], 'epoch', ARGV[1]) end
local at = tonumber(mark[1])
if seq <= at then return {1, at} end
local done = 0
if tonumber(mark[2] or '0') == seq then done = tonumber(mark[4] or '0') end
if seq > at + 1 or chunk > done then return {2, at + 1} end
for piece = 2, #KEYS do
  local first = 5 + (piece - 2) * 4
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
if ARGV[4] == '1' then
  redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'applying', ARGV[2], 'chunk', '0')
else
  redis.call('HSET', KEYS[1], 'applying', ARGV[2], 'chunk', tostring(chunk + 1))
end
return {0, seq}
"""
