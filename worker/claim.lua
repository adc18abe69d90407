-- Claims up to a number of jobs, in the order of the queues, each with a lease.
--
-- A job is popped, marked as started and put into RQ's StartedJobRegistry in one step: there is no
-- moment in which it is in no list. When the lease runs out, RQ's clean-up puts the job back,
-- which it does only for a job whose status is `started`; so the status is set here.
--
-- KEYS: for each queue its list and its StartedJobRegistry, then the worker's set of executions.
-- Returns for each job: {queue number, job id, execution id, data, meta, retries_left, result_ttl}.

local limit, worker, now_text, now = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local lease = tonumber(ARGV[5])
local job_prefix, execution_prefix, executions_prefix = ARGV[6], ARGV[7], ARGV[8]
local FIRST_EXECUTION_ID = 9
-- RQ keeps the records of an execution a minute longer than its lease.
local MARGIN = 60

local worker_executions = KEYS[#KEYS]
local claimed = {}

for queue = 1, (#KEYS - 1) / 2 do
  local list, registry = KEYS[2 * queue - 1], KEYS[2 * queue]
  while #claimed < limit do
    local job_id = redis.call('LPOP', list)
    if not job_id then break end
    local job = job_prefix .. job_id
    -- A job that was cancelled or ended meanwhile, or that stands in the list twice, is passed by.
    if redis.call('HGET', job, 'status') == 'queued' then
      local execution = ARGV[FIRST_EXECUTION_ID + #claimed]
      local composite = job_id .. ':' .. execution
      redis.call('HSET', job, 'status', 'started', 'worker_name', worker,
        'started_at', now_text, 'last_heartbeat', now_text)
      redis.call('PERSIST', job)
      redis.call('ZADD', registry, now + lease, composite)
      redis.call('HSET', execution_prefix .. composite, 'id', execution, 'job_id', job_id,
        'created_at', now, 'last_heartbeat', now, 'worker_name', worker)
      redis.call('EXPIRE', execution_prefix .. composite, lease + MARGIN)
      redis.call('ZADD', executions_prefix .. job_id, now + lease + MARGIN, execution)
      redis.call('EXPIRE', executions_prefix .. job_id, lease + MARGIN)
      redis.call('SADD', worker_executions, composite)
      local fields = redis.call('HMGET', job, 'data', 'meta', 'retries_left', 'result_ttl')
      claimed[#claimed + 1] = {queue, job_id, execution, fields[1], fields[2], fields[3], fields[4]}
    end
  end
end
if #claimed > 0 then redis.call('EXPIRE', worker_executions, lease + MARGIN) end
return claimed
