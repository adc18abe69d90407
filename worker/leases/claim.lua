-- Claims up to a number of jobs, in the order of the queues, each with a lease.
--
-- A job is popped, marked as started and put into RQ's StartedJobRegistry in one step: there is no
-- moment in which it is in no list. When the lease runs out it is put back (`recovery.py`), which
-- is done only for a job whose status is `started`; so the status is set here.
--
-- Where several workers share the queues, jobs that begin alike go to one of them: it has computed
-- that beginning already. A worker takes jobs of the prefixes that it owns, then whole groups of
-- prefixes that nobody owns until it has enough. Others' jobs are left to them, unless one has
-- waited too long, or a batch full of them waits and this worker has nothing else to do.
--
-- A suspect, a job that was in flight in several workers which died, is claimed by itself and only
-- by a worker that is idle. Nothing behind it is claimed until then, so that its turn comes.
--
-- KEYS: for each queue its list and its StartedJobRegistry, then the worker's set of executions.
-- ARGV: JSON with the fields of `ClaimArguments` (`claim.py`).
-- Returns for each job: {queue number, job id, execution id, data, meta, result_ttl, how many
-- attempts it may have, how many were lost, whether it is a suspect (1 or 0)}.

local given = cjson.decode(ARGV[1])
-- RQ keeps the records of an execution a minute longer than its lease.
local MARGIN = 60
-- How far into a queue is looked for jobs that begin alike.
local SCANNED = 1024

local worker_executions = KEYS[#KEYS]
local claimed, owned = {}, {}

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
  if not fields or fields[1] ~= 'queued' then return nil end
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
    attempts = attempts,
    lost = lost,
    suspect = lost >= given.suspect_after and lost < attempts,
    uncounted = not fields[3] and retries,
  }
end

local function claim(queue, registry, job)
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
  local fields = redis.call('HMGET', key, 'data', 'meta', 'result_ttl')
  claimed[#claimed + 1] = {queue, job.id, execution, fields[1], fields[2], fields[3],
    job.attempts, job.lost, job.suspect and 1 or 0}
  own(job.prefix)
end

-- Looks at the first job of a list that waits; those before it are taken out.
local function first_of(list)
  while true do
    local job_id = attempt('LINDEX', list, 0)
    if not job_id then return nil end
    local job = waiting(job_id)
    if job then return job end
    redis.call('LPOP', list)
  end
end

-- Takes jobs as they come. Returns true where a suspect was met: then nothing more is claimed.
local function take_in_order(queue, list, registry)
  while #claimed < given.limit do
    local job = first_of(list)
    if not job then return false end
    if job.suspect and (#claimed > 0 or not given.idle) then return true end
    redis.call('LPOP', list)
    claim(queue, registry, job)
    if job.suspect then return true end
  end
  return false
end

-- Groups the jobs at the head of a list by their prefix, groups in the order of their first job.
local function groups_in(list)
  local groups, by_prefix, seen = {}, {}, {}
  for _, job_id in ipairs(redis.call('LRANGE', list, 0, SCANNED - 1)) do
    local job = not seen[job_id] and waiting(job_id)
    seen[job_id] = true
    if job and not job.suspect then
      local group = by_prefix[job.prefix]
      if not group then
        group = {prefix = job.prefix, jobs = {}, owner = false}
        if job.prefix ~= '' then group.owner = attempt('GET', given.owner_prefix .. job.prefix) end
        by_prefix[job.prefix] = group
        groups[#groups + 1] = group
      end
      group.jobs[#group.jobs + 1] = job
    end
  end
  return groups
end

local function take_group(queue, list, registry, group, most)
  for _, job in ipairs(group.jobs) do
    if #claimed >= most then break end
    redis.call('LREM', list, 1, job.id)
    claim(queue, registry, job)
  end
  group.jobs = {}
end

local function take_shared(queue, list, registry)
  local groups = groups_in(list)
  for _, group in ipairs(groups) do
    local since = redis.call('HGET', given.job_prefix .. group.jobs[1].id, 'enqueued_at')
    if group.owner == given.worker or (since and since < given.overdue) then
      take_group(queue, list, registry, group, given.limit)
    end
  end
  for _, group in ipairs(groups) do
    -- Jobs without a prefix belong to nobody; they are divided.
    local most = group.prefix == '' and math.min(given.enough, given.limit) or given.limit
    if not group.owner and #claimed < given.enough then
      take_group(queue, list, registry, group, most)
    end
  end
  for number = #groups, 1, -1 do
    local group = groups[number]
    if #claimed == 0 and #group.jobs >= given.enough then
      take_group(queue, list, registry, group, given.limit)
    end
  end
end

for queue = 1, (#KEYS - 1) / 2 do
  local list, registry = KEYS[2 * queue - 1], KEYS[2 * queue]
  if #claimed >= given.limit then break end
  local first = first_of(list)
  if not first then
    -- Nothing waits there, or what is there is no list.
  elseif given.alone or first.suspect then
    if take_in_order(queue, list, registry) then break end
  else
    take_shared(queue, list, registry)
  end
end
if #claimed > 0 then redis.call('EXPIRE', worker_executions, given.lease + MARGIN) end
return claimed
