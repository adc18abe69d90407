-- Enqueues jobs, all of them or none: their records, their places in the queues, the wake-ups of workers.
--
-- None where the operator's limits leave no room for all, or where an idempotency key was used for
-- another body. A job whose idempotency key has a job already is not made again, as long as that
-- one is kept.
--
-- Jobs come in groups, whose records have most fields in common.
--
-- KEYS: RQ's set of queues, then for each group its queue's list and its model's wake-up list. The
-- limits are none of the KEYS, which one has to be allowed to write.
-- ARGV: what the constants below read, then for each group the number of the fields and values that
-- its records have in common, which follow; then for each job its group's number, its id, its
-- idempotency record (empty without a key), the hash of its body, of its own record `data`, `meta`
-- (open: when it was submitted is told by the clock of Redis) and `enqueued_at`, and its path.
--
-- Returns {'enqueued', job id, ...} in the order of the jobs, {'conflict', number of the job},
-- {'jobs', waiting, limit, coming} or {'bytes', used, limit, coming}.

local queues = KEYS[1]
local limits, queue_prefix, wake_ups_kept, wake_up_seconds = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- Of a larger submission, sent in parts, this many jobs come later, and with them so many bytes, or
-- less; `admitted` are parts after the first one: their places are reserved (`reserve.lua`).
local coming_jobs, coming_bytes, admitted = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
-- `kept`: how many seconds an idempotency record lives. `submission` names what comes in parts.
local job_prefix, kept, submission = ARGV[8], ARGV[9], ARGV[10]
local FIRST_GROUP = 11
local PER_JOB = 8
-- Jobs that are submitted together and may be newcomers all the same; more of them are bulk work.
local FEW = 64

local function read_groups()
  local groups, at = {}, FIRST_GROUP
  for number = 1, (#KEYS - 1) / 2 do
    local fields = tonumber(ARGV[at])
    groups[number] = {
      list = KEYS[2 * number], wake_up = KEYS[2 * number + 1], first = at + 1, last = at + fields,
    }
    at = at + fields + 1
  end
  return groups, at
end

local function read_jobs(groups, first)
  local jobs = {}
  for at = first, #ARGV, PER_JOB do
    jobs[#jobs + 1] = {
      group = groups[tonumber(ARGV[at])], id = ARGV[at + 1], record = ARGV[at + 2],
      body = ARGV[at + 3], data = ARGV[at + 4], meta = ARGV[at + 5], time = ARGV[at + 6],
      path = ARGV[at + 7],
    }
  end
  return jobs
end

local function limit_of(name)
  local text = attempt('HGET', limits, name)
  if not text then return nil end
  return tonumber(text) or error("the limit '" .. name .. "' is no number: " .. text)
end

local function count_waiting()
  local waiting = 0
  for _, list in ipairs(attempt('SMEMBERS', queues) or {}) do
    if string.sub(list, 1, #queue_prefix) == queue_prefix then
      waiting = waiting + waiting_in(list)
    end
  end
  return waiting
end

local function is_id(text) return text and string.match(text, '^[%w_-]+$') end
local function is_hash(text) return text and string.match(text, '^%x+$') and #text == 64 end

-- What was made under the idempotency key of a job: its id and the hash of its body; nothing where
-- it is gone.
local function made_before(job)
  if job.record == '' then return {} end
  local known = attempt('HMGET', job.record, 'job', 'body')
  if not known or not is_id(known[1]) or not is_hash(known[2]) then return {} end
  if redis.call('EXISTS', job_prefix .. known[1]) == 0 then return {} end
  return known
end

local jobs = read_jobs(read_groups())
local reply, new = {'enqueued'}, {}
for number, job in ipairs(jobs) do
  local known = made_before(job)
  if known[2] and known[2] ~= job.body then
    reserve(submission, 0, 0)
    return {'conflict', number}
  end
  if known[1] then
    reply[number + 1] = known[1]
  else
    reply[number + 1] = job.id
    new[#new + 1] = job
  end
end

local limited = redis.call('EXISTS', limits) == 1
if not admitted and #new > 0 and limited then
  local most, coming = limit_of('jobs'), coming_jobs + #new
  local reserved_jobs, reserved_bytes = reserved_by_others(submission)
  local waiting = most and count_waiting() + reserved_jobs
  if most and waiting + coming > most then return {'jobs', waiting, most, coming} end
  most = limit_of('bytes')
  local used = most and reserved_bytes
    + tonumber(string.match(redis.call('INFO', 'memory'), 'used_memory:(%d+)'))
  if most and used + coming_bytes > most then return {'bytes', used, most, coming_bytes} end
end
if submission ~= '' and limited then reserve(submission, coming_jobs, coming_bytes) end

local are_few = #jobs <= FEW and coming_jobs == 0 and not admitted
local rung = {}
for _, job in ipairs(new) do
  local group = job.group
  local list, wake_up = group.list, group.wake_up
  local meta = job.meta .. string.format(',"submitted_at":%.6f}', seconds())
  redis.call('HSET', job_prefix .. job.id, 'data', job.data, 'meta', meta,
    'enqueued_at', job.time, unpack(ARGV, group.first, group.last))
  push('RPUSH', list, job.id, job_prefix)
  if are_few then welcome(list, job.path, job.id) end
  join(list, job.path, job.id, job_prefix)
  if job.record ~= '' then
    write('HSET', job.record, 'job', job.id, 'body', job.body)
    redis.call('EXPIRE', job.record, kept)
  end
  if not rung[list] then
    write('SADD', queues, list)
    write('RPUSH', wake_up, 1)
    redis.call('LTRIM', wake_up, -wake_ups_kept, -1)
    redis.call('EXPIRE', wake_up, wake_up_seconds)
    rung[list] = true
  end
end
return reply
