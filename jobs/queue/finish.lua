-- Ends a job once: result, status, registries, counters and the wake-up of those who wait, or none
-- of them. Whoever ends it first wins; a worker whose lease was taken over by another cannot end it.
--
-- With an execution id this is a worker's commit; without one it is a cancellation.
-- Returns {'ended', worker, execution, ...} with everyone who held a lease on the job,
-- {'lost'} where the worker's lease was taken away, or {the status} of a job that had ended.

local job, result, rq_results, wip, registry = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local queue, executions, completions, worker = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local webhooks = KEYS[10]
local job_id, execution, new_status, answer, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local registry_score, ended_at, seconds, kept = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local webhooks_kept = tonumber(ARGV[10])
local execution_prefix, worker_prefix, worker_suffix = ARGV[11], ARGV[12], ARGV[13]
local FIRST_RESULT_FIELD = 14

local status = redis.call('HGET', job, 'status')
if not status then return {'missing'} end
if status ~= 'queued' and status ~= 'started' then return {status} end
-- A lease that ran out does not matter to an answer while nobody else has begun on the job: what is
-- finished is not thrown away to be generated again.
if execution ~= '' and not (status == 'queued' and new_status == 'finished')
  and not redis.call('ZSCORE', wip, job_id .. ':' .. execution) then
  return {'lost'}
end

local reply = {'ended'}
for _, id in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
  local composite = job_id .. ':' .. id
  local holder = redis.call('HGET', execution_prefix .. composite, 'worker_name')
  if holder then
    redis.call('SREM', worker_prefix .. holder .. worker_suffix, composite)
    reply[#reply + 1] = holder
    reply[#reply + 1] = id
  end
  redis.call('ZREM', wip, composite)
  redis.call('DEL', execution_prefix .. composite)
end
redis.call('DEL', executions)
if status == 'queued' then redis.call('LREM', queue, 0, job_id) end

redis.call('SET', result, answer, 'EX', ttl)
redis.call('HSET', job, 'status', new_status, 'ended_at', ended_at)
redis.call('EXPIRE', job, ttl)
redis.call('ZADD', registry, registry_score, job_id)
redis.call('XADD', rq_results, 'MAXLEN', 10, '*', unpack(ARGV, FIRST_RESULT_FIELD))
redis.call('EXPIRE', rq_results, ttl)
redis.call('XADD', completions, 'MAXLEN', '~', kept, '*', 'job', job_id, 'status', new_status)
-- Where a webhook was named, an HTTP server tells it; the rest stands in the job's record.
if string.find(redis.call('HGET', job, 'meta') or '', '"webhook":', 1, true) then
  redis.call('ZADD', webhooks, registry_score - ttl, job_id)
  redis.call('ZREMRANGEBYRANK', webhooks, 0, -webhooks_kept - 1)
end
if execution ~= '' and redis.call('EXISTS', worker) == 1 then
  local counter = new_status == 'finished' and 'successful_job_count' or 'failed_job_count'
  redis.call('HINCRBY', worker, counter, 1)
  redis.call('HINCRBYFLOAT', worker, 'total_working_time', seconds)
end
return reply
