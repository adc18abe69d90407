-- Claims up to a number of jobs, in the order of the queues, each with a lease.
--
-- A job is popped, marked as started and put into RQ's StartedJobRegistry in one step: there is no
-- moment in which it is in no list. When the lease runs out it is put back (`recovery.py`), which
-- is done only for a job whose status is `started`; so the status is set here.
--
-- Where several workers share the queues, jobs that begin alike go to one of them: it has computed
-- that beginning already. A worker takes jobs of the prefixes that it owns, then whole groups of
-- prefixes that nobody owns until it has enough; a few jobs that came alone go before all. Others'
-- jobs are left to them, unless one has waited too long, or a batch full of them waits and this worker
-- has nothing else to do.
--
-- That is for lists of up to `SHORT` entries. A longer backlog is claimed in the order of the prefix
-- tree (`claim_walk.lua`); RQ's list then holds, until the round ends, what was taken out of its
-- middle as well.
--
-- A suspect, a job that was in flight in several workers which died, is claimed by itself and only
-- by a worker that is idle. Nothing behind it is claimed until then, so that its turn comes.
--
-- KEYS: for each queue its list and its StartedJobRegistry, then the worker's set of executions.
-- ARGV: JSON with the fields of `ClaimArguments` (`claim.py`).
-- Returns {claimed jobs, how many others were found to be lost, the ids of those that were gone,
-- whether there is more to look through before nothing is known to wait (1 or 0)}.
-- Of a claimed job: {queue number, job id, execution id, data, meta, result_ttl, how many attempts it
-- may have, how many were lost, whether it is a suspect (1 or 0), the id of the data set, whether a
-- worker died that was reading it (1 or 0), whether others that begin like it still wait (1 or 0;
-- known of the last one of a queue)}.

-- Entries that one claim takes out of lists, at most, because their jobs do not wait any more.
local SWEPT = 1024
local swept = 0
local lost, gone = 0, {}

-- Notes that entries were taken out of a list whose jobs do not wait.
local function drop(list, job_ids)
  local missing = 0
  for _, job_id in ipairs(job_ids) do
    if redis.call('EXISTS', names.job .. job_id) == 0 then
      missing = missing + 1
      gone[#gone + 1] = job_id
    end
  end
  count_dropped(list, #job_ids, missing)
end

-- Looks at the first job of a list that waits; those before it are taken out, so many at a time.
local function first_of(list)
  local first, dropped = nil, {}
  while swept < SWEPT do
    local job_id = attempt('LINDEX', list, 0)
    if not job_id then break end
    local job, out = waiting(list, job_id)
    first = job
    if first then break end
    if not out then
      redis.call('LPOP', list)
      dropped[#dropped + 1] = job_id
    end
    swept = swept + 1
  end
  drop(list, dropped)
  return first
end

-- Takes jobs as they come. Returns true where a suspect was met: then nothing more is claimed.
local function take_in_order(queue, list, registry)
  while not has_enough() do
    local job = first_of(list)
    if not job then return false end
    if job.suspect and (#claimed > 0 or not given.idle) then return true end
    redis.call('LPOP', list)
    claim(queue, registry, job)
    if job.suspect then return true end
  end
  return false
end

-- Groups the jobs of a short list by a name, groups in the order of their first job. What does not
-- wait any more is taken out, so that the list holds just what waits.
local function groups_in(list, name_of)
  local groups, by_name, seen = {}, {}, {}
  for _, job_id in ipairs(redis.call('LRANGE', list, 0, SHORT - 1)) do
    local job, out
    if not seen[job_id] then job, out = waiting(list, job_id) end
    seen[job_id] = true
    if job and not job.suspect then
      local name = name_of(job)
      local group = by_name[name]
      if not group then
        group = {prefix = job.prefix, jobs = {}, owner = false}
        if job.prefix ~= '' then group.owner = attempt('GET', names.owner .. job.prefix) end
        by_name[name] = group
        groups[#groups + 1] = group
      end
      group.jobs[#group.jobs + 1] = job
    elseif not job and not out then
      redis.call('LREM', list, 1, job_id) -- taken while the backlog was long, or there twice
      drop(list, {job_id})
    end
  end
  lost = lost + settle(list)
  return groups
end

local function take_group(queue, list, registry, group, most)
  for _, job in ipairs(group.jobs) do
    if has_enough() or #claimed >= most then break end
    redis.call('LREM', list, 1, job.id)
    claim(queue, registry, job)
  end
  group.jobs = {}
end

-- Takes some newcomers, of which nobody has computed the beginning, each with the few that begin like
-- it; those without a prefix one by one, out of their group.
local function take_some_newcomers(queue, list, registry, groups)
  local places = math.ceil((given.limit - #claimed) / NEWCOMERS)
  local most, is_newcomer = #claimed + math.min(places, given.enough), {}
  for _, job_id in ipairs(attempt('LRANGE', backlog_of(list).newcomers, 0, -1) or {}) do
    is_newcomer[job_id] = true
  end
  for _, group in ipairs(groups) do
    if #claimed >= most then return end
    if group.prefix == '' then
      local newcomers, others = {}, {}
      for _, job in ipairs(group.jobs) do
        local comes_first = is_newcomer[job.id] and #claimed + #newcomers < most
        table.insert(comes_first and newcomers or others, job)
      end
      take_group(queue, list, registry, {jobs = newcomers}, given.limit)
      group.jobs = others
    elseif not group.owner and #group.jobs <= FEW and is_newcomer[group.jobs[1].id] then
      take_group(queue, list, registry, group, given.limit)
    end
  end
end

-- Takes whole groups of jobs that begin alike, in the order of their first jobs.
local function take_in_groups(queue, list, registry)
  local function name_of(job)
    local group = group_of(member_of(job.path, job.id))
    return group ~= '' and group or job.id
  end
  for _, group in ipairs(groups_in(list, name_of)) do
    take_group(queue, list, registry, group, given.limit)
  end
end

local function take_shared(queue, list, registry)
  local groups = groups_in(list, function(job) return job.prefix end)
  take_some_newcomers(queue, list, registry, groups)
  for _, group in ipairs(groups) do
    local since = group.jobs[1] and group.jobs[1].submitted_at
    if group.owner == given.worker or (since and seconds() - since > given.max_wait) then
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

-- Takes jobs of one queue. Returns true where a suspect was met: then nothing more is claimed.
local function take(queue, list, registry)
  local missed, their_ids, more_to_mend = mend(list)
  lost, more = lost + missed, more or more_to_mend
  for _, job_id in ipairs(their_ids) do gone[#gone + 1] = job_id end
  local first = first_of(list)
  local entries = attempt('LLEN', list) or 0
  if entries == 0 then lost = lost + settle(list) end -- emptied, perhaps by RQ
  if entries > SHORT then
    -- What the walk leaves of a list is stale, or of RQ's own making.
    return walk(queue, list, registry) or take_in_order(queue, list, registry)
  end
  local backlog = backlog_of(list)
  if not first then -- nothing waits there, or what is there is no list
    redis.call('DEL', backlog.returned, backlog.newcomers)
    return false
  end
  redis.call('DEL', backlog.returned) -- what it holds is first in the list, too
  attempt('LTRIM', backlog.newcomers, -SHORT, -1)
  if members_in(backlog.rounds) < waiting_in(list) then adopt(list, names.job, 0, SHORT) end
  if first.suspect or given.alone and entries <= given.limit - #claimed then
    return take_in_order(queue, list, registry)
  end
  local take_alike = given.alone and take_in_groups or take_shared
  take_alike(queue, list, registry)
  return false
end

-- Where a claim ends amid jobs that begin alike, the last one is not as lone as it looks.
local function note_if_others_follow(list)
  if group_of(last_member) ~= '' and #alike(backlog_of(list), last_member, 1) > 0 then
    claimed[#claimed][12] = 1
  end
end

for queue = 1, (#KEYS - 1) / 2 do
  if has_enough() then break end
  local list, before = KEYS[2 * queue - 1], #claimed
  local stop = take(queue, list, KEYS[2 * queue])
  if #claimed > before then note_if_others_follow(list) end
  if stop then break end
end
if #claimed > 0 then redis.call('EXPIRE', worker_executions, kept(given.lease)) end
return {claimed, lost, gone, (more or swept >= SWEPT) and 1 or 0}
