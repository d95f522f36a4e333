"""Lua scripts for the cluster, on the keys of one model, which are in one slot.

On Redis and Valkey a script is one step. On Kvrocks each call is, if the server dies, and a reader may see what is
between two of them. So in each script one call decides, what leads to it has no effect of its own or may be done again,
and what follows is made up for by the next call of any node (tests/engine/placements/cluster/test_cuts.py).

What decides, and what a cut after it leaves:

- append: XADD; an entry above `seq`. The next append or report of any node sets `seq` and `digest` by it.
- another server is noticed: the HSET of `server` and `recovering`, after all nodes are marked as waited for; it is
  noticed again.
- the end of a recovery: removing `recovering`, after `owed` and `seq`; it is done again.
- change of the pointer: one HSET of all its fields with `generation`; nothing.
- record of a version: the record, then `generation`; nodes see it after the next change, and who repeats it is told
  that it is so.
- lease: SET, after the epoch was counted; an epoch that nobody has.
- progress: the mark, then the log is cut off; entries that go with the next cut.
- dense parts of a delta, and the way back: each by itself, what it replaces is kept first; some of them. The delta is
  applied again, or put back, as a whole.
- a note of a load, its end, a side file: the HSET of the note, then fields that are not needed go; these fields, until
  the load ends.
- report of a node: its time before its report, removal the other way round; a node without a report for 5 s.

Numbers that may pass 2⁵³ (seqs, versions) are compared as text: Lua's numbers are doubles.
"""

from __future__ import annotations

RECOVERY_MS = (
    1000  # a server that has taken over is not sent new deltas before all nodes had that time to put back theirs
)
NODE_GONE_MS = 5000  # a node that has not reported for so long is not waited for any more

# `notice` notices that another server answers than before (`server`: its mark): it may lack acknowledged deltas. From
# then on the model is `recovering`, and all nodes that were there are waited for. `doubt` says so where the log itself
# shows that; the token after '#' tells nodes that looked before from those that looked since. `finish` has `seq` and
# `digest` follow the log's newest entry, which is what acknowledges a delta. `less` and `of` are for seqs as text, and
# for the digest of a seq ("<seq> <digest>").
#
# `mark_of` is the id of the server's replication history (`master_replid`, which a failover and a restart change), or
# of its process: `run_id`, or process, port and the second of its start, which may come out as the one beside it.
_COMMON = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end
local function of(seq, text)
  local named, digest = string.match(text or '', '^(%d+) (%w+)$')
  if named == seq then return digest end
  return nil
end
local function mark_of()
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%w+)')
  if id then return id end
  local about = redis.call('INFO', 'server')
  id = string.match(about, 'run_id:(%w+)')
  if id then return id end
  local process, port = string.match(about, 'process_id:(%d+)'), string.match(about, 'tcp_port:(%d+)')
  local up = string.match(about, 'uptime_in_seconds:(%d+)')
  if not (process and port and up) then return '' end
  return string.format('%s-%s-%d', process, port, t[1] - up)
end
local function same(a, b)
  if a == b then return true end
  local process, start = string.match(a, '^(%d+%-%d+)%-(%d+)$')
  local process_b, start_b = string.match(b, '^(%d+%-%d+)%-(%d+)$')
  return process ~= nil and process == process_b and math.abs(start - start_b) <= 1
end
local function recover(current, alive, server)
  local nodes = redis.call('ZRANGE', alive, 0, -1)
  if #nodes > 0 then
    local words = {}
    for i, node in ipairs(nodes) do words[2 * i - 1], words[2 * i] = now, node end
    redis.call('ZADD', alive, unpack(words))
  end
  redis.call('HSET', current, 'recovering', string.format('%d', now), 'server', server)
end
local function notice(current, alive)
  local held = redis.call('HMGET', current, 'seq', 'server')
  if not held[1] then return end
  local mark = mark_of()
  if not held[2] then
    redis.call('HSET', current, 'server', mark)
  elseif not same(string.match(held[2], '^[^#]*'), mark) then
    recover(current, alive, mark)
  end
end
local function doubt(current, alive)
  recover(current, alive, string.format('%s#%d', mark_of(), now))
end
local function finish(current, log)
  local seq = redis.call('HGET', current, 'seq')
  if not seq then return end
  local top = redis.call('XREVRANGE', log, '+', seq .. '-1', 'COUNT', 1)[1]
  if not top then return end
  local newest, digest = string.match(top[1], '^%d+'), ''
  for i = 1, #top[2], 2 do
    if top[2][i] == 'digest' then digest = top[2][i + 1] end
  end
  redis.call('HSET', current, 'seq', newest, 'digest', newest .. ' ' .. digest)
end
"""

# KEYS: current, log, nodes, alive. ARGV: seq, the seq before it, digest, milliseconds now, bytes, the digest of the
# delta before it ('': not known), '1' where the log had it before. Returns a word, the seq of the newest entry, and its
# digest ('': not known): `appended`; `none`: the log has not begun; `at`: another one is next; `forked`: the delta
# before it is another one here; `owed`: of this seq there are rows of other content; `recovering`; `lost`, with the seq
# that the log has reached once: it takes none up to that.
APPEND = (
    _COMMON
    + """
notice(KEYS[1], KEYS[4])
finish(KEYS[1], KEYS[2])
local fields = redis.call('HMGET', KEYS[1], 'seq', 'digest', 'recovering', 'owed')
local last = fields[1]
if not last then return {'none', '', ''} end
local digest = of(last, fields[2]) or ''
if fields[3] and ARGV[7] ~= '1' and less(last, ARGV[1]) then return {'recovering', last, digest} end
if last ~= ARGV[2] then return {'at', last, digest} end
if digest ~= '' and ARGV[6] ~= '' and digest ~= ARGV[6] then return {'forked', last, digest} end
local owed = of(ARGV[1], fields[4])
if owed and owed ~= ARGV[3] then return {'owed', last, digest} end
if ARGV[7] == '1' and not fields[3] then doubt(KEYS[1], KEYS[4]) end
local after = digest
if after == '' then after = ARGV[6] end
local added = redis.pcall(
  'XADD', KEYS[2], ARGV[1] .. '-0', 'digest', ARGV[3], 'ms', ARGV[4], 'data', ARGV[5], 'after', after)
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then return added end
  local about = redis.call('XINFO', 'STREAM', KEYS[2])
  for i = 1, #about, 2 do
    if about[i] == 'last-generated-id' then return {'lost', string.match(about[i + 1], '^%d+'), ''} end
  end
  return added
end
redis.call('HSET', KEYS[1], 'seq', ARGV[1], 'digest', ARGV[1] .. ' ' .. ARGV[3])
return {'appended', ARGV[1], ARGV[3]}
"""
)

# KEYS: current, nodes, alive, log. ARGV: `recovering` as it was read; the seq that all rows have, its digest ('': not
# known); the delta of which some rows are there, as `owed` has it ('': none). Returns 1 where new deltas are taken from
# now on, 0 where nodes are waited for.
RECOVERED = (
    _COMMON
    + f"""
notice(KEYS[1], KEYS[3])
finish(KEYS[1], KEYS[4])
local held = redis.call('HMGET', KEYS[1], 'recovering', 'server', 'seq')
if held[1] ~= ARGV[1] or now - held[1] < {RECOVERY_MS} then return 0 end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], string.format('%d', now - {NODE_GONE_MS}), '+inf')) do
  local report = redis.call('HGET', KEYS[2], name)
  local seen = report and cjson.decode(report).server
  if seen and seen ~= held[2] then return 0 end
end
local words = {{'owed', ARGV[4]}}
if ARGV[2] ~= '' and less(held[3], ARGV[2]) then
  words = {{'owed', ARGV[4], 'seq', ARGV[2], 'digest', ARGV[2] .. ' ' .. ARGV[3]}}
end
redis.call('HSET', KEYS[1], unpack(words))
redis.call('HDEL', KEYS[1], 'recovering')
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
local held = redis.call('HMGET', KEYS[1], 'generation', 'seq')
if (held[1] or '0') ~= ARGV[1] or (held[2] or '') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'generation', string.format('%d', ARGV[1] + 1), unpack(ARGV, 3))
return 1
"""

# KEYS: nodes, alive, current, log. ARGV: node, its report.
# Returns the reports of the nodes that are there, as node, report, node, report, …
BEAT = (
    _COMMON
    + f"""
notice(KEYS[3], KEYS[2])
finish(KEYS[3], KEYS[4])
if ARGV[2] ~= '' then
  redis.call('ZADD', KEYS[2], now, ARGV[1])
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
local since = string.format('%d', now - {NODE_GONE_MS})
for _, node in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. since)) do
  redis.call('HDEL', KEYS[1], node)
  redis.call('ZREM', KEYS[2], node)
end
local there = {{}}
for _, node in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf')) do
  local report = redis.call('HGET', KEYS[1], node)
  if report then
    there[#there + 1], there[#there + 2] = node, report
  end
end
return there
"""
)

# KEYS: versions, current. ARGV: version, the record that is expected ('' for none), the new one ('' to remove it).
# Returns 1 where it was changed, or was so already; the generation is one more then.
RECORD = """
local held = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if held ~= ARGV[2] and held ~= ARGV[3] then return 0 end
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[1]) else redis.call('HSET', KEYS[1], ARGV[1], ARGV[3]) end
redis.call('HINCRBY', KEYS[2], 'generation', 1)
return 1
"""

# KEYS: versions, current, what is removed with a version. ARGV: version, the record that is expected ('' for none).
# Returns 1, or 0 where the record is another one by now.
REMOVE_FILES = """
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return 0 end
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HDEL', KEYS[2], 'mark:' .. ARGV[1])
return 1
"""

# What follows it is done by the node whose lease (the first key) has an epoch (the first word); another's gets 0.
_LEADS = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, ' (%d+)$') ~= ARGV[1] then return 0 end
"""

# KEYS: lease, current, log. ARGV: epoch, field of `current`, the value that is expected ('' for none), its value, the
# seq below which the log is cut off ('' for none). Returns 1, or 0 where the lease is another's by now, or a server has
# lost the value.
PROGRESS = (
    _LEADS
    + """
local before = redis.call('HGET', KEYS[2], ARGV[2]) or ''
if before ~= ARGV[3] and before ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
if ARGV[5] ~= '' then redis.call('XTRIM', KEYS[3], 'MINID', ARGV[5] .. '-0') end
return 1
"""
)

# KEYS: lease, files of a version, what is kept of its dense parts. ARGV: epoch, the seq of a delta, its digest, then
# for each of its dense parts: the field under which what it replaces is kept, its file, its graph. Returns 1, or 0
# where the lease is another's by now.
PUT_HEADS = (
    _LEADS
    + """
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
for i = 4, #ARGV, 3 do
  redis.call('HSETNX', KEYS[3], ARGV[i], redis.call('HGET', KEYS[2], ARGV[i + 1]) or '')
  redis.call('HSET', KEYS[2], ARGV[i + 1], ARGV[i + 2])
end
return 1
"""
)

# KEYS: as for PUT_HEADS. ARGV: epoch, then fields with their files ('' for the delta itself), the newest first. Returns
# as PUT_HEADS.
PUT_HEADS_BACK = (
    _LEADS
    + """
for i = 2, #ARGV, 2 do
  local graph = ARGV[i + 1] ~= '' and redis.call('HGET', KEYS[3], ARGV[i])
  if graph then redis.call('HSET', KEYS[2], ARGV[i + 1], graph) end
  redis.call('HDEL', KEYS[3], ARGV[i])
end
return 1
"""
)

# What follows it is done while a load goes on; the first key has the versions' records. ARGV: version, its token.
_LOADS = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
held = held and cjson.decode(held)
if not held or held.state ~= 'loading' or held.token ~= ARGV[2] then return 0 end
"""

# KEYS: versions, files. ARGV: version, token, a file's name, its content.
PUT_FILE = _LOADS + "return redis.call('HSETNX', KEYS[2], ARGV[3], ARGV[4])"

# KEYS: versions, what is there of a load. ARGV: version, token, the number of words of fields and values that are set,
# these, then fields that are removed. Returns 1, or 0 where the load has ended.
NOTE = (
    _LOADS
    + """
local set = tonumber(ARGV[3])
redis.call('HSET', KEYS[2], unpack(ARGV, 4, 3 + set))
for i = 4 + set, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
return 1
"""
)

# KEYS: versions, what is removed with a load. ARGV: version, token. Nothing if another load has the version by now.
END = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and cjson.decode(held).token == ARGV[2] then
  for i = 2, #KEYS do redis.call('UNLINK', KEYS[i]) end
end
return 1
"""
