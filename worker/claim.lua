-- Claims up to a number of jobs, in the order of the queues, each with a lease.
--
-- A job is popped, marked as started and put into RQ's StartedJobRegistry in one step: there is no
-- moment in which it is in no list. When the lease runs out, RQ's clean-up puts the job back,
-- which it does only for a job whose status is `started`; so the status is set here.
--
-- Where several workers share the queues, jobs that begin alike go to one of them: it has computed
-- that beginning already. A worker takes jobs of the prefixes that it owns, then whole groups of
-- prefixes that nobody owns until it has enough. Others' jobs are left to them, unless one has
-- waited too long, or a batch full of them waits and this worker has nothing else to do.
--
-- KEYS: for each queue its list and its StartedJobRegistry, then the worker's set of executions.
-- Returns for each job: {queue number, job id, execution id, data, meta, retries_left, result_ttl}.

local limit, enough, alone = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3] == '1'
local worker, now_text, now = ARGV[4], ARGV[5], tonumber(ARGV[6])
local overdue, lease = ARGV[7], tonumber(ARGV[8])
local job_prefix, execution_prefix, executions_prefix = ARGV[9], ARGV[10], ARGV[11]
local owner_prefix = ARGV[12]
local FIRST_EXECUTION_ID = 13
-- RQ keeps the records of an execution a minute longer than its lease.
local MARGIN = 60
-- How far into a queue is looked for jobs that begin alike.
local SCANNED = 1024

local worker_executions = KEYS[#KEYS]
local claimed, owned = {}, {}

local function prefix_in(meta)
  local read, value = pcall(cjson.decode, meta or '{}')
  if read and type(value) == 'table' and type(value.prefix) == 'string' then return value.prefix end
  return ''
end

-- Whoever claims a job owns its prefix from then on, also while there is nobody to share with: a
-- worker that comes later finds out who has computed what.
local function own(prefix)
  if prefix == '' or owned[prefix] then return end
  redis.call('SET', owner_prefix .. prefix, worker, 'EX', 2 * lease)
  owned[prefix] = true
end

local function claim(queue, registry, job_id)
  local job = job_prefix .. job_id
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
  own(prefix_in(fields[2]))
end

-- A job that was cancelled or ended meanwhile, or that stands in the list twice, is passed by; so is
-- a name that RQ gives to no job.
local function waits(job_id)
  return string.match(job_id, '^[%w_-]+$')
    and redis.call('HGET', job_prefix .. job_id, 'status') == 'queued'
end

-- Groups the jobs at the head of a list by their prefix, groups in the order of their first job.
local function groups_in(list)
  local groups, by_prefix = {}, {}
  for _, job_id in ipairs(redis.call('LRANGE', list, 0, SCANNED - 1)) do
    if waits(job_id) then
      local prefix = prefix_in(redis.call('HGET', job_prefix .. job_id, 'meta'))
      local group = by_prefix[prefix]
      if not group then
        group = {prefix = prefix, jobs = {}, owner = false}
        if prefix ~= '' then group.owner = redis.call('GET', owner_prefix .. prefix) end
        by_prefix[prefix] = group
        groups[#groups + 1] = group
      end
      group.jobs[#group.jobs + 1] = job_id
    end
  end
  return groups
end

local function take_group(queue, list, registry, group, most)
  for _, job_id in ipairs(group.jobs) do
    if #claimed >= most then break end
    redis.call('LREM', list, 1, job_id)
    if waits(job_id) then claim(queue, registry, job_id) end
  end
  group.jobs = {}
end

local function take_shared(queue, list, registry)
  local groups = groups_in(list)
  for _, group in ipairs(groups) do
    local first = group.jobs[1]
    local since = redis.call('HGET', job_prefix .. first, 'enqueued_at')
    if group.owner == worker or (since and since < overdue) then
      take_group(queue, list, registry, group, limit)
    end
  end
  for _, group in ipairs(groups) do
    -- Jobs without a prefix belong to nobody; they are divided.
    local most = group.prefix == '' and math.min(enough, limit) or limit
    if not group.owner and #claimed < enough then take_group(queue, list, registry, group, most) end
  end
  for number = #groups, 1, -1 do
    local group = groups[number]
    if #claimed == 0 and #group.jobs >= enough then
      take_group(queue, list, registry, group, limit)
    end
  end
end

for queue = 1, (#KEYS - 1) / 2 do
  local list, registry = KEYS[2 * queue - 1], KEYS[2 * queue]
  if alone then
    while #claimed < limit do
      local job_id = redis.call('LPOP', list)
      if not job_id then break end
      if waits(job_id) then claim(queue, registry, job_id) end
    end
  elseif #claimed < limit then
    take_shared(queue, list, registry)
  end
end
if #claimed > 0 then redis.call('EXPIRE', worker_executions, lease + MARGIN) end
return claimed
