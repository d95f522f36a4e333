"""Lua scripts for the cluster, each one atomic step on the keys of one model, which are in one slot.

Numbers that may pass 2⁵³ (seqs, versions) are compared as text: Lua's numbers are doubles.
"""

from __future__ import annotations

RECOVERY_MS = (
    1000  # a server that has taken over is not sent new deltas before all nodes had that time to put back theirs
)
NODE_GONE_MS = 5000  # a node that has not reported for so long is not waited for any more

# `notice` notices that another server answers than before (`server`: the id of its replication history, which a
# failover and a restart change): it may lack acknowledged deltas. From then on the model is `recovering`, and all nodes
# that were there are waited for. `less` and `of` are for seqs as text, and for the digest of a seq ("<seq> <digest>").
_NOTICE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function notice(current, alive)
  if redis.call('HEXISTS', current, 'seq') == 0 then return end
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)') or ''
  local before = redis.call('HGET', current, 'server')
  if before == id then return end
  redis.call('HSET', current, 'server', id)
  if not before then return end
  redis.call('HSET', current, 'recovering', string.format('%d', now))
  for _, node in ipairs(redis.call('ZRANGE', alive, 0, -1)) do redis.call('ZADD', alive, now, node) end
end
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local function of(seq, text)
  local named, digest = string.match(text or '', '^(%d+) (%w+)$')
  if named == seq then return digest end
  return nil
end
"""

# KEYS: current, log, nodes, alive. ARGV: seq, the seq before it, digest, milliseconds now, bytes, the digest of the
# delta before it ('': not known), '1' where the log had it before. Returns a word, the seq of the newest entry, and its
# digest ('': not known): `appended`; `none`: the log has not begun; `at`: another one is next; `forked`: the delta
# before it is another one here; `owed`: of this seq there are rows of other content; `recovering`.
APPEND = (
    _NOTICE
    + """
notice(KEYS[1], KEYS[4])
local fields = redis.call('HMGET', KEYS[1], 'seq', 'digest', 'recovering', 'owed')
local last = fields[1]
if not last then return {'none', '', ''} end
local digest = of(last, fields[2]) or ''
if fields[3] and ARGV[7] ~= '1' and less(last, ARGV[1]) then return {'recovering', last, digest} end
if last ~= ARGV[2] then return {'at', last, digest} end
if digest ~= '' and ARGV[6] ~= '' and digest ~= ARGV[6] then return {'forked', last, digest} end
local owed = of(ARGV[1], fields[4])
if owed and owed ~= ARGV[3] then return {'owed', last, digest} end
local after = digest
if after == '' then after = ARGV[6] end
redis.call('XADD', KEYS[2], ARGV[1] .. '-0', 'digest', ARGV[3], 'ms', ARGV[4], 'data', ARGV[5], 'after', after)
redis.call('HSET', KEYS[1], 'seq', ARGV[1], 'digest', ARGV[1] .. ' ' .. ARGV[3])
return {'appended', ARGV[1], ARGV[3]}
"""
)

# KEYS: current, nodes, alive. ARGV: `recovering` as it was read; the seq that all rows have, its digest ('': not
# known); the delta of which some rows are there, as `owed` has it ('': none). Returns 1 where new deltas are taken from
# now on, 0 where nodes are waited for.
RECOVERED = (
    _NOTICE
    + f"""
notice(KEYS[1], KEYS[3])
local since = redis.call('HGET', KEYS[1], 'recovering')
if since ~= ARGV[1] or now - since < {RECOVERY_MS} then return 0 end
local server = redis.call('HGET', KEYS[1], 'server')
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], string.format('%d', now - {NODE_GONE_MS}), '+inf')) do
  local report = redis.call('HGET', KEYS[2], name)
  local seen = report and cjson.decode(report).server
  if seen and seen ~= server then return 0 end
end
if ARGV[2] ~= '' and less(redis.call('HGET', KEYS[1], 'seq'), ARGV[2]) then
  redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'digest', ARGV[2] .. ' ' .. ARGV[3])
end
redis.call('HDEL', KEYS[1], 'recovering', 'owed')
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'owed', ARGV[4]) end
return 1
"""
)

# KEYS: lease, epochs. ARGV: owner, milliseconds, an epoch that is over. Returns the epoch, which is above that one, or
# 0 where another node holds the lease.
ACQUIRE = """
local held = redis.call('GET', KEYS[1])
local above = tonumber(ARGV[3])
if held then
  local owner, epoch = string.match(held, '^(%S+) (%d+)$')
  if owner ~= ARGV[1] then return 0 end
  if tonumber(epoch) > above then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return tonumber(epoch)
  end
end
if tonumber(redis.call('GET', KEYS[2]) or '0') < above then redis.call('SET', KEYS[2], ARGV[3]) end
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

# KEYS: nodes, alive, current. ARGV: node, its report.
# Returns the reports of the nodes that are there, as node, report, node, report, …
BEAT = (
    _NOTICE
    + f"""
notice(KEYS[3], KEYS[2])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZADD', KEYS[2], now, ARGV[1])
end
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. string.format('%d', now - {NODE_GONE_MS}))
for _, node in ipairs(gone) do
  redis.call('ZREM', KEYS[2], node)
  redis.call('HDEL', KEYS[1], node)
end
return redis.call('HGETALL', KEYS[1])
"""
)

# KEYS: versions, current. ARGV: version, the record that is expected ('' for none), the new one ('' to remove it).
# Returns 1 where it was changed; the generation is one more then.
RECORD = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('HINCRBY', KEYS[2], 'generation', 1)
return 1
"""

# KEYS: lease, current, log. ARGV: epoch, field of `current`, its value, the seq below which the log is cut off ('' for
# none). Returns 1, or 0 where the lease is another's by now.
PROGRESS = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, ' (%d+)$') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
if ARGV[4] ~= '' then redis.call('XTRIM', KEYS[3], 'MINID', ARGV[4] .. '-0') end
return 1
"""
