-- Gives a claimed job back to the front of its queue, as if it had never been claimed.
-- Returns 1, or 0 where the lease was already lost.

local job, queue, registry, executions, worker_executions, execution_record = unpack(KEYS)
local job_id, execution = ARGV[1], ARGV[2]
local composite = job_id .. ':' .. execution

redis.call('ZREM', executions, execution)
redis.call('SREM', worker_executions, composite)
redis.call('DEL', execution_record)
if redis.call('ZREM', registry, composite) == 0 then return 0 end
if redis.call('HGET', job, 'status') ~= 'started' then return 0 end
redis.call('HSET', job, 'status', 'queued', 'started_at', '', 'worker_name', '')
redis.call('LPUSH', queue, job_id)
return 1
