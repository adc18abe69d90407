-- What `claim.lua` is given, which jobs wait, and how one of them is claimed.

local given = cjson.decode(ARGV[1])
-- RQ keeps the records of an execution a minute longer than its lease.
local MARGIN = 60

local worker_executions = KEYS[#KEYS]
local claimed, claimed_bytes, owned = {}, 0, {}

local function has_enough()
  return #claimed >= given.limit or claimed_bytes >= given.nbytes
end

-- Whoever claims a job owns its prefix from then on, also while there is nobody to share with: a
-- worker that comes later finds out who has computed what.
local function own(prefix)
  if prefix == '' or owned[prefix] then return end
  redis.call('SET', given.owner_prefix .. prefix, given.worker, 'EX', 2 * given.lease)
  owned[prefix] = true
end

-- What is known of a job that waits; nil for one that was cancelled or ended meanwhile, or stands
-- in the list twice, for a name that RQ gives to no job, and where the job's key holds no job.
local function waiting(job_id)
  if not string.match(job_id, '^[%w_-]+$') then return nil end
  local fields = attempt('HMGET', given.job_prefix .. job_id, 'status', 'meta', 'retries_left')
  if not fields or not fields[1] then return nil end
  if fields[1] == 'started' or is_settled(fields[1]) then return nil end
  local decoded, meta = pcall(cjson.decode, fields[2] or '{}')
  if not decoded or type(meta) ~= 'table' then meta = {} end
  local attempts = given.default_attempts
  local wanted = meta.max_attempts
  if type(wanted) == 'number' and wanted >= 1 and wanted <= 100 then
    attempts = math.floor(wanted)
  end
  -- RQ counts down from what submit gave it; a job put in by hand has no count.
  local retries = attempts - 1 + given.recovery_retries
  local left = tonumber(fields[3] or '') or retries
  local lost = left >= 0 and left <= retries and math.floor(retries - left) or 0
  return {
    id = job_id,
    prefix = type(meta.prefix) == 'string' and meta.prefix or '',
    path = type(meta.path) == 'string' and meta.path or '',
    attempts = attempts,
    lost = lost,
    suspect = lost >= given.suspect_after and lost < attempts,
    uncounted = not fields[3] and retries,
  }
end

local function claim(queue, registry, job)
  local backlog = backlog_of(KEYS[2 * queue - 1])
  local key = given.job_prefix .. job.id
  local execution = given.execution_ids[#claimed + 1]
  local composite = job.id .. ':' .. execution
  redis.call('HSET', key, 'status', 'started', 'worker_name', given.worker,
    'started_at', given.started_at, 'last_heartbeat', given.started_at)
  -- Put in by hand: without a count, the attempts of a job that kills workers would never end.
  if job.uncounted then redis.call('HSET', key, 'retries_left', job.uncounted) end
  redis.call('PERSIST', key)
  write('ZADD', registry, given.now + given.lease, composite)
  redis.call('HSET', given.execution_prefix .. composite, 'id', execution, 'job_id', job.id,
    'created_at', given.now, 'last_heartbeat', given.now, 'worker_name', given.worker)
  redis.call('EXPIRE', given.execution_prefix .. composite, given.lease + MARGIN)
  write('ZADD', given.executions_prefix .. job.id, given.now + given.lease + MARGIN, execution)
  redis.call('EXPIRE', given.executions_prefix .. job.id, given.lease + MARGIN)
  write('SADD', worker_executions, composite)
  attempt('ZREM', backlog.round, member_of(job.path, job.id))
  attempt('ZREM', backlog.next, member_of(job.path, job.id))
  local fields = redis.call('HMGET', key, 'data', 'meta', 'result_ttl')
  claimed_bytes = claimed_bytes + #(fields[1] or '')
  claimed[#claimed + 1] = {queue, job.id, execution, fields[1], fields[2], fields[3],
    job.attempts, job.lost, job.suspect and 1 or 0}
  own(job.prefix)
end
