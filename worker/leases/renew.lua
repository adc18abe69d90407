-- Prolongs the leases of a worker. One that was lost in the meantime is not taken back, unless it was
-- lost with all others, because the registry was: then nobody else would ever see that the worker died.
--
-- ARGV: JSON with the fields of `RenewArguments` (`keeper.py`).
-- Returns the id of the data set: another one, where Redis has lost its data since.

local given = cjson.decode(ARGV[1])
local names = given.prefixes

-- Whether the job's own record says that this worker has it, and nobody else does.
local function is_still_ours(job_id)
  local record = attempt('HMGET', names.job .. job_id, 'status', 'worker_name') or {}
  return record[1] == 'started' and record[2] == given.worker and not holder_of(job_id, names)
end

for _, lease in ipairs(given.leases) do
  local job_id, execution, queue = unpack(lease)
  local composite = job_id .. ':' .. execution
  local record = names.execution .. composite
  if attempt('ZSCORE', names.started .. queue, composite) or is_still_ours(job_id) then
    write('ZADD', names.started .. queue, now() + given.lease, composite)
    write('HSET', record, 'id', execution, 'job_id', job_id, 'worker_name', given.worker,
      'last_heartbeat', string.format('%.6f', seconds()))
    redis.call('HSETNX', record, 'created_at', string.format('%.6f', seconds()))
    redis.call('EXPIRE', record, kept(given.lease))
    write('ZADD', names.executions .. job_id, now() + kept(given.lease), execution)
    redis.call('EXPIRE', names.executions .. job_id, kept(given.lease))
    write('SADD', given.executions, composite)
  end
end
redis.call('EXPIRE', given.executions, kept(given.lease))
if not attempt('GET', given.data_set) then write('SET', given.data_set, given.new_data_set) end
return redis.call('GET', given.data_set)
