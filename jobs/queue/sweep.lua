-- Takes out of a piece of RQ's list what waits no more.
--
-- KEYS: the list. ARGV: the index at which the piece begins, its length, the prefix of jobs' keys.
-- Returns the index at which the next piece begins; -1 behind the last one.

local list = KEYS[1]
local from, length, job_prefix = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
-- Stands for an entry that is to go: no job has such an id.
local NOBODY = ''

local entries = attempt('LRANGE', list, from, from + length - 1) or {}
local gone, missing = 0, 0
for number, job_id in ipairs(entries) do
  if not waits(attempt('HGET', job_prefix .. job_id, 'status')) then
    redis.call('LSET', list, from + number - 1, NOBODY)
    gone = gone + 1
    missing = missing + 1 - redis.call('EXISTS', job_prefix .. job_id)
  end
end
if gone > 0 then
  redis.call('LREM', list, gone, NOBODY)
  count_dropped(list, gone, missing)
end
return #entries < length and -1 or from + length - gone
