-- Who holds a job, and until when. Stands before each script that takes, prolongs or ends a lease.
--
-- A lease is an entry of RQ's StartedJobRegistry whose score is when it ends, by the clock of Redis
-- and counted from `EPOCH`. RQ's own clean-up goes by the clock of whoever runs it, puts jobs back in
-- several steps, and so may undo what happens between them. It takes what ended before now: leases
-- that end in centuries it leaves to us.

-- Seconds of Unix time, in the year 2286.
local EPOCH = 10000000000
-- Seconds that what tells of a lease lies there after it was taken or renewed. The worker's own record
-- lasts two leases; when others miss that, this still tells them what it held.
local function kept(lease)
  return 3 * lease + 60
end

local function now()
  return EPOCH + seconds()
end

-- Whether somebody holds a job: the name of that worker, or nil.
local function holder_of(job_id, names)
  local registry = names.started .. (attempt('HGET', names.job .. job_id, 'origin') or '')
  for _, execution in ipairs(attempt('ZRANGE', names.executions .. job_id, 0, -1) or {}) do
    local composite = job_id .. ':' .. execution
    local ends = tonumber(attempt('ZSCORE', registry, composite) or '')
    if ends and ends > now() then
      return attempt('HGET', names.execution .. composite, 'worker_name') or ''
    end
  end
end

-- A moment as RQ writes it. Source: Howard Hinnant, chrono-compatible low-level date algorithms.
local function utc(time)
  local day = math.floor(time / 86400) + 719468
  local era = math.floor(day / 146097)
  local of_era = day - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local march = math.floor((5 * of_year + 2) / 153)
  local month = march < 10 and march + 3 or march - 9
  local second = math.floor(time % 86400)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.000000Z',
    year + era * 400 + (month <= 2 and 1 or 0), month,
    of_year - math.floor((153 * march + 2) / 5) + 1,
    math.floor(second / 3600), math.floor(second / 60) % 60, second % 60)
end

-- Gives a job that has a result the record of one that ended, if somebody took that from it. Returns
-- whether it has one.
local function has_ended(job_id, names)
  local result, job = names.result .. job_id, names.job .. job_id
  local status = ending_of(result)
  if not status then return false end
  local known = attempt('HMGET', job, 'status', 'origin', 'ended_at', 'result_ttl')
  if not known or not known[1] or known[1] == status then return true end
  local lives = redis.call('TTL', result)
  local ended = seconds() - math.max(0, (tonumber(known[4] or '') or 0) - lives)
  redis.call('HSET', job, 'status', status)
  if (known[3] or '') == '' then redis.call('HSET', job, 'ended_at', utc(ended)) end
  if lives > 0 then
    redis.call('EXPIRE', job, lives)
    write('ZADD', names[status] .. (known[2] or ''), 'NX', math.floor(seconds()) + lives, job_id)
  end
  return true
end

-- How a worker that is dead lost a job, as far as can be seen: 'in flight', or nobody knows what was;
-- 'reading', that is, with others that it had just claimed; nil where the job only waited.
local function lost_how(worker, job_id, names)
  local said = attempt('GET', names.in_flight .. worker)
  if not said then return 'in flight' end
  local in_flight, reading = string.match(said, '^([^|]*)|?(.*)$')
  local function is_in(list)
    return string.find(' ' .. list .. ' ', ' ' .. job_id .. ' ', 1, true) ~= nil
  end
  return is_in(in_flight) and 'in flight' or is_in(reading) and 'reading' or nil
end

