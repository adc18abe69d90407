-- What `claim.lua` is given, which jobs wait, and how one of them is claimed.

local given = cjson.decode(ARGV[1])
local names = given.prefixes
local known_data_set
-- What Redis holds: another, where it has lost its data since, or another server has taken over. Asked
-- once, and only where there is something to claim.
local function data_set()
  if not known_data_set then
    local told = redis.pcall('INFO', 'replication')
    local history = type(told) == 'string' and string.match(told, 'master_replid:(%x+)') or ''
    known_data_set = (attempt('GET', given.data_set) or '') .. '/' .. history
  end
  return known_data_set
end
local worker_executions = KEYS[#KEYS]
local claimed, claimed_bytes, owned = {}, 0, {}
local last_member -- of the backlog: that of the job which was claimed last
-- Whether a part was left, for want of time, of what may hide jobs that wait.
local more = false

local function has_enough()
  return #claimed >= given.limit or claimed_bytes >= given.nbytes
end

-- Whoever claims a job owns its prefix from then on, also while there is nobody to share with: a
-- worker that comes later finds out who has computed what.
local function own(prefix)
  if prefix == '' or owned[prefix] then return end
  redis.call('SET', names.owner .. prefix, given.worker, 'EX', 2 * given.lease)
  owned[prefix] = true
end

-- The retries that are left to a job which somebody else than `give_back.lua` put back: what held it
-- then is still in its record. RQ counts one retry for each; we count the deaths that can be seen.
local function retries_after(fields, job_id, most)
  local left = tonumber(fields[3] or '')
  local worker = fields[4] or ''
  if not left or worker == '' then return left, false end
  local died = redis.call('EXISTS', names.worker .. worker) == 0
    and lost_how(worker, job_id, names) == 'in flight'
  return math.min(died and left or left + 1, most), true
end

-- What is known of a job that waits; nil for one that was cancelled or ended meanwhile, that somebody
-- holds, or that stands in the list twice, for a name that RQ gives to no job, and where the job's
-- key holds no job. Also returns whether the list had it against the truth, and has it no more; not
-- what a claim has left there, which is counted as stale.
local function waiting(list, job_id)
  if not string.match(job_id, '^[%w_-]+$') then return nil end
  local key = names.job .. job_id
  local fields = attempt('HMGET', key, 'status', 'meta', 'retries_left', 'worker_name')
  if not fields or not fields[1] then return nil end
  if fields[1] == 'started' or is_settled(fields[1]) then return nil end
  if has_ended(job_id, names) then return nil, (attempt('LREM', list, 1, job_id) or 0) > 0 end
  local decoded, meta = pcall(cjson.decode, fields[2] or '{}')
  if not decoded or type(meta) ~= 'table' then meta = {} end
  local attempts = given.default_attempts
  local wanted = meta.max_attempts
  if type(wanted) == 'number' and wanted >= 1 and wanted <= 100 then
    attempts = math.floor(wanted)
  end
  -- RQ counts down from what submit gave it; a job put in by hand has no count.
  local retries = attempts - 1 + given.recovery_retries
  local holder = (fields[4] or '') ~= '' and holder_of(job_id, names)
  if holder then
    local left = math.min((tonumber(fields[3] or '') or retries) + 1, retries)
    redis.call('HSET', key, 'status', 'started', 'worker_name', holder, 'retries_left', left)
    return nil, (attempt('LREM', list, 1, job_id) or 0) > 0
  end
  local counted, put_back = retries_after(fields, job_id, retries)
  local left = counted or retries
  local lost = left >= 0 and left <= retries and math.floor(retries - left) or 0
  return {
    id = job_id,
    prefix = type(meta.prefix) == 'string' and meta.prefix or '',
    path = type(meta.path) == 'string' and meta.path or '',
    submitted_at = type(meta.submitted_at) == 'number' and meta.submitted_at,
    attempts = attempts,
    lost = lost,
    suspect = lost >= given.suspect_after and lost < attempts,
    -- Put in by hand: without a count, the attempts of a job that kills workers would never end.
    retries_left = (put_back or not counted) and left,
  }
end

local function claim(queue, registry, job)
  local backlog = backlog_of(KEYS[2 * queue - 1])
  local key = names.job .. job.id
  local execution = given.execution_ids[#claimed + 1]
  local composite = job.id .. ':' .. execution
  redis.call('HSET', key, 'status', 'started', 'worker_name', given.worker,
    'started_at', given.started_at, 'last_heartbeat', given.started_at)
  if job.retries_left then redis.call('HSET', key, 'retries_left', job.retries_left) end
  redis.call('PERSIST', key)
  local time = string.format('%.6f', seconds())
  write('ZADD', registry, now() + given.lease, composite)
  redis.call('HSET', names.execution .. composite, 'id', execution, 'job_id', job.id,
    'created_at', time, 'last_heartbeat', time, 'worker_name', given.worker)
  redis.call('EXPIRE', names.execution .. composite, kept(given.lease))
  write('ZADD', names.executions .. job.id, now() + kept(given.lease), execution)
  redis.call('EXPIRE', names.executions .. job.id, kept(given.lease))
  write('SADD', worker_executions, composite)
  attempt('ZREM', backlog.round, member_of(job.path, job.id))
  attempt('ZREM', backlog.next, member_of(job.path, job.id))
  local fields = redis.call('HMGET', key, 'data', 'meta', 'result_ttl', 'lost_in_reading')
  claimed_bytes = claimed_bytes + #(fields[1] or '')
  claimed[#claimed + 1] = {queue, job.id, execution, fields[1], fields[2], fields[3],
    job.attempts, job.lost, job.suspect and 1 or 0, data_set(), fields[4] and 1 or 0, 0}
  last_member = member_of(job.path, job.id)
  own(job.prefix)
end
