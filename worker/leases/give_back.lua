-- Gives a claimed job back to the front of its queue. Returns 1; 0 where the lease was lost, the job has
-- ended, or somebody else holds it; -1 where its record is gone, and so the job.
--
-- `count` says whether this was an attempt of the job. 'no': a worker that stops gives back what it
-- has not finished. 'in_flight': a worker died; it was one for the jobs that it was generating, not
-- for those that only waited in it, or for all where its record of them is gone. Nor was it one for
-- those that it was reading together: these are read one at a time the next time, so that it is known
-- of which a worker dies.
-- With `to_others`, the worker that had it owns its beginning no longer.
-- With `ends`, only a lease that still ends then is taken.
--
-- ARGV: JSON with the fields of `GiveBackArguments` (`recovery.py`).

local job, queue, registry, executions, wake_up = unpack(KEYS)
local given = cjson.decode(ARGV[1])
local names = given.prefixes
local composite = given.job_id .. ':' .. given.execution_id
local record = names.execution .. composite

local lease_end = attempt('ZSCORE', registry, composite)
if given.ends and lease_end and tonumber(lease_end) ~= given.ends then
  return 0 -- renewed after all
end
-- The execution's record ends with the lease; the job's own says the same.
local recorded, holder = attempt('HGET', record, 'worker_name'), attempt('HGET', job, 'worker_name')
local worker = recorded or holder or given.worker
attempt('ZREM', executions, given.execution_id)
local listed = attempt('SREM', given.worker_prefix .. worker .. given.worker_suffix, composite)
redis.call('DEL', record)
attempt('ZREM', registry, composite)
local status = attempt('HGET', job, 'status')
if status == 'queued' or is_settled(status) then return 0 end
if has_ended(given.job_id, names) or holder_of(given.job_id, names) then return 0 end
if not status then
  -- Whoever deletes a job ends its lease, too, in all the places that tell of it.
  if not (lease_end or recorded or listed == 1) then return 0 end
  count_lost(queue, 1)
  return -1
end
-- The registry may have been something else meanwhile, and is made anew without what it held.
if not lease_end and not (recorded and recorded == holder) then return 0 end

if given.count == 'in_flight' then
  local retries_left = whole(redis.call('HGET', job, 'retries_left'), 0, MOST)
  local how = lost_how(worker, given.job_id, names)
  if how == 'reading' then redis.call('HSET', job, 'lost_in_reading', 1) end
  if how == 'in flight' and retries_left and retries_left > 0 then
    redis.call('HSET', job, 'retries_left', retries_left - 1)
  end
end
redis.call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '')
push('LPUSH', queue, given.job_id, names.job)
write('LPUSH', backlog_of(queue).returned, given.job_id)
local decoded, meta = pcall(cjson.decode, attempt('HGET', job, 'meta') or '')
if not decoded or type(meta) ~= 'table' then meta = {} end
join(queue, type(meta.path) == 'string' and meta.path or '', given.job_id, names.job)
if given.to_others and type(meta.prefix) == 'string' then
  local owner = names.owner .. meta.prefix
  if attempt('GET', owner) == worker then redis.call('DEL', owner) end
end
write('RPUSH', wake_up, 1)
redis.call('LTRIM', wake_up, -given.wake_ups_kept, -1)
redis.call('EXPIRE', wake_up, given.wake_up_seconds)
return 1
