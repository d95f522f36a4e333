"""The steps that the cluster does as one, as Lua: each works on the keys of one model, which lie in one slot.

Numbers that may pass 2⁵³ (seqs, versions) are compared as text: Lua's numbers are doubles.
"""

from __future__ import annotations

# KEYS: current, log. ARGV: seq, the seq before it, digest, milliseconds now, bytes.
# Returns "" where it was appended, else the seq of the newest entry ("none" where the log has not begun).
APPEND = """
local last = redis.call('HGET', KEYS[1], 'seq')
if not last then return 'none' end
if last ~= ARGV[2] then return last end
redis.call('XADD', KEYS[2], ARGV[1] .. '-0', 'digest', ARGV[3], 'ms', ARGV[4], 'data', ARGV[5])
redis.call('HSET', KEYS[1], 'seq', ARGV[1])
return ''
"""

# KEYS: lease, epochs. ARGV: owner, milliseconds. Returns the epoch, or 0 where another node holds the lease.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
if held then
  local owner, epoch = string.match(held, '^(%S+) (%d+)$')
  if owner ~= ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(epoch)
end
local epoch = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. string.format('%d', epoch), 'PX', ARGV[2])
return epoch
"""

# KEYS: lease. ARGV: owner. A lease of another node stays.
RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(%S+) ') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""

# KEYS: current. ARGV: the generation that is expected, the seq that is expected ('' for none), then fields and values.
# Returns 1 where they were set, and the generation is one more then; 0 where something else came first.
CHANGE = """
if (redis.call('HGET', KEYS[1], 'generation') or '0') ~= ARGV[1] then return 0 end
if (redis.call('HGET', KEYS[1], 'seq') or '') ~= ARGV[2] then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', KEYS[1], 'generation', 1)
return 1
"""

# KEYS: nodes, alive. ARGV: node, its report, milliseconds after which it counts as gone.
# Returns the reports of the nodes that are there, as node, report, node, report, …
BEAT = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZADD', KEYS[2], now, ARGV[1])
end
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%d', now - ARGV[3]))) do
  redis.call('ZREM', KEYS[2], gone)
  redis.call('HDEL', KEYS[1], gone)
end
return redis.call('HGETALL', KEYS[1])
"""

# KEYS: versions, current. ARGV: version, the record that is expected ('' for none), the new one ('' to remove it).
# Returns 1 where it was changed; the generation is one more then.
RECORD = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('HINCRBY', KEYS[2], 'generation', 1)
return 1
"""

# KEYS: lease, current, log. ARGV: epoch, field of `current`, its value, the seq below which the log is cut off ('' for none).
# Returns 1, or 0 where the lease is another's by now.
PROGRESS = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, ' (%d+)$') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if ARGV[4] ~= '' then redis.call('XTRIM', KEYS[3], 'MINID', ARGV[4] .. '-0') end
return 1
"""
