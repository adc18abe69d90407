-- Ends a job once: result, status, registries, counters and the wake-up of those who wait, or none
-- of them. Whoever ends it first wins; a worker whose lease was taken over by another cannot end it.
--
-- ARGV: JSON with the fields of `FinishArguments` (`finish.py`), the result, and then the fields and
-- values of an entry in RQ's stream of results.
--
-- With an execution id this is a worker's commit; without one it is a cancellation.
-- Returns {'ended', worker, execution, ...} with everyone who held a lease on the job,
-- {'lost'} where the worker's lease was taken away, {the status} of a job that had ended, {'missing'}
-- where there is no such job, or {'evicted'} where only something of its lease is left.

local job, result, rq_results, wip, registry = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local queue, executions, completions, worker = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local webhooks = KEYS[10]
local given, answer = cjson.decode(ARGV[1]), ARGV[2]
local FIRST_RESULT_FIELD = 3

local record = attempt('HMGET', job, 'status', 'worker_name', 'meta')
local status = record and record[1]
-- Whoever deletes a job ends its lease, too, in all the places that tell of it.
local function is_evicted()
  if not given.execution_id then return false end
  local composite = given.job_id .. ':' .. given.execution_id
  local holder = string.sub(worker, #given.rq_worker_prefix + 1)
  local left = (attempt('ZREM', wip, composite) or 0)
    + (attempt('SREM', given.worker_prefix .. holder .. given.worker_suffix, composite) or 0)
    + redis.call('DEL', executions, given.execution_prefix .. composite)
  return left > 0
end

if not status then return {is_evicted() and 'evicted' or 'missing'} end
local ending = ending_of(result)
if is_settled(status) or ending then return {is_settled(status) and status or ending} end
-- The registry may have been something else meanwhile, and is made anew without what it held; then
-- the job's own record tells who has it, unless that is by a later claim.
local function is_held()
  if attempt('ZSCORE', wip, given.job_id .. ':' .. given.execution_id) then return true end
  for _, id in ipairs(attempt('ZRANGE', executions, 0, -1) or {}) do
    if attempt('ZSCORE', wip, given.job_id .. ':' .. id) then return false end
  end
  return status ~= 'queued' and worker == given.rq_worker_prefix .. (record[2] or '')
end
-- A lease that ran out does not matter to an answer while nobody else has begun on the job: what is
-- finished is not thrown away to be generated again.
if given.execution_id and not (status == 'queued' and given.status == 'finished')
  and not is_held() then
  return {'lost'}
end

local reply, took = {'ended'}, 0
local time = seconds()
for _, id in ipairs(attempt('ZRANGE', executions, 0, -1) or {}) do
  local composite = given.job_id .. ':' .. id
  local execution = attempt(
    'HMGET', given.execution_prefix .. composite, 'worker_name', 'created_at') or {}
  local holder = execution[1]
  if id == given.execution_id then took = time - (tonumber(execution[2] or '') or time) end
  if holder then
    attempt('SREM', given.worker_prefix .. holder .. given.worker_suffix, composite)
    reply[#reply + 1] = holder
    reply[#reply + 1] = id
  end
  attempt('ZREM', wip, composite)
  redis.call('DEL', given.execution_prefix .. composite)
end
redis.call('DEL', executions)
-- Only one entry, the first: where there is another one, that was left there by a claim, and is counted.
if status ~= 'started' and not given.left_in_list then attempt('LREM', queue, 1, given.job_id) end

redis.call('SET', result, answer, 'EX', given.result_ttl)
redis.call('HSET', job, 'status', given.status, 'ended_at', given.ended_at)
if given.trace then redis.call('HSET', job, 'trace', given.trace) end
redis.call('EXPIRE', job, given.result_ttl)
write('ZADD', registry, math.floor(time) + given.result_ttl, given.job_id)
write('XADD', rq_results, 'MAXLEN', 10, '*', unpack(ARGV, FIRST_RESULT_FIELD))
redis.call('EXPIRE', rq_results, given.result_ttl)
write('XADD', completions, 'MAXLEN', '~', given.completions_kept, '*',
  'job', given.job_id, 'status', given.status)
-- Where a webhook was named, an HTTP server tells it; the rest stands in the job's record.
if string.find(record[3] or '', '"webhook":', 1, true) then
  write('ZADD', webhooks, time, given.job_id)
  redis.call('ZREMRANGEBYRANK', webhooks, 0, -given.webhooks_kept - 1)
end
if given.execution_id and attempt('HGET', worker, 'birth') then
  local counter = given.status == 'finished' and 'successful_job_count' or 'failed_job_count'
  add('HINCRBY', worker, counter, 1)
  add('HINCRBYFLOAT', worker, 'total_working_time', string.format('%.6f', took))
end
return reply
