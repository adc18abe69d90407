-- Claims out of a long backlog: in the order of the prefix tree, from where the worker is.

-- One place in so many goes, at most, to newcomers.
local NEWCOMERS = 8
-- Jobs that wait and begin alike, up to which they are newcomers, all of them or none.
local FEW = 8
-- Entries that one claim looks at, at most, for newcomers that still wait.
local MET = 256
-- Entries of the list that each claim looks at, for jobs that RQ's own means have put there.
local LOOKED_AT = 64
-- Members that one claim meets, at most, whose jobs do not wait any more.
local DROPPED = 2048

local function members_after(round, from, count)
  local least = from == '' and '-' or '(' .. from
  return attempt('ZRANGEBYLEX', round, least, '+', 'LIMIT', 0, count) or {}
end

-- Where the other live workers are.
local function others_at(backlog)
  local places, fields = {}, attempt('HGETALL', backlog.state) or {}
  for field = 1, #fields, 2 do
    local name = string.match(fields[field], '^at (.+)$')
    if name and name ~= given.worker then
      if redis.call('EXISTS', names.worker .. name) == 1 then
        places[#places + 1] = fields[field + 1]
      else
        redis.call('HDEL', backlog.state, fields[field])
      end
    end
  end
  return places
end

-- Makes the next round this one; false where nothing waits in it.
local function next_round(backlog)
  if redis.call('EXISTS', backlog.next) == 0 then return false end
  redis.call('RENAME', backlog.next, backlog.round)
  others_at(backlog) -- forgets those that are gone
  write('HSET', backlog.state, 'closes', string.format('%.6f', seconds() + given.max_wait))
  return true
end

-- A round that closes later than it may was begun by a clock of Redis that was set back since.
local function close_in_time(backlog)
  local closes = tonumber(attempt('HGET', backlog.state, 'closes') or '')
  local latest = seconds() + given.max_wait
  if closes and closes > latest then
    redis.call('HSET', backlog.state, 'closes', string.format('%.6f', latest))
  end
end

-- The middle of the longest way between one worker and the next, at the beginning of a group.
local function middle_of(backlog, others)
  local count = redis.call('ZCARD', backlog.round)
  local ranks = {}
  for _, place in ipairs(others) do
    ranks[#ranks + 1] = redis.call('ZLEXCOUNT', backlog.round, '-', '[' .. place)
  end
  table.sort(ranks)
  local longest, start = -1, 0
  for number, rank in ipairs(ranks) do
    local following = ranks[number + 1] or ranks[1] + count
    if following - rank > longest then
      longest, start = following - rank, rank + math.floor((following - rank) / 2)
    end
  end
  local rank = count > 0 and start % count or 0
  local member = redis.call('ZRANGE', backlog.round, rank, rank)[1]
  return member and group_of(member) or ''
end

-- Where this worker goes on: where it was, unless another is there or it has been nowhere yet.
local function place(backlog)
  local mine = attempt('HGET', backlog.state, 'at ' .. given.worker)
  local others = given.alone and {} or others_at(backlog)
  if #others == 0 then return mine or '' end
  if mine then
    local ahead = members_after(backlog.round, mine, 1)[1]
    local free = ahead ~= nil
    for _, other in ipairs(others) do
      if members_after(backlog.round, other, 1)[1] == ahead then free = false end
    end
    if free then return mine end
  end
  return middle_of(backlog, others)
end

local function take_returned(queue, list, registry, backlog)
  while not has_enough() do
    local job_id = attempt('LPOP', backlog.returned)
    if not job_id then return end
    local job = waiting(list, job_id)
    if job and not job.suspect then claim(queue, registry, job) end
  end
end

-- Takes that newcomer off their list which has waited for the longest time, or the newest one.
local function next_newcomer(backlog, newest)
  local job_id = attempt('LINDEX', backlog.newcomers, newest and -1 or 0)
  if job_id then
    redis.call('LTRIM', backlog.newcomers, newest and 0 or 1, newest and -2 or -1)
  end
  return job_id
end

-- Takes the few that wait and begin like a newcomer, and the newcomer itself; where there is not
-- room for all, one of the others is the newcomer of the next claim. Returns how many it took.
local function take_few(queue, list, registry, backlog, newcomer, newest)
  local before = #claimed
  local members = alike(backlog, member_of(newcomer.path, newcomer.id), FEW + 1)
  if #members > FEW then return 0 end
  for _, member in ipairs(members) do
    local job = waiting(list, string.match(member, ':([%w_-]+)$') or '')
    if job and has_enough() then
      write(newest and 'RPUSH' or 'LPUSH', backlog.newcomers, job.id)
      break
    elseif job and not job.suspect then
      claim(queue, registry, job)
    end
  end
  return #claimed - before
end

-- Takes newcomers, each with what begins like it: nothing is computed twice for them, and they need
-- not wait for their turn in a long round. The oldest and the newest go in turn, so that neither has
-- to wait for all the others. Each job that is claimed gives one credit, a newcomer costs `NEWCOMERS`.
local function take_newcomers(queue, list, registry, backlog)
  local most = math.max(NEWCOMERS, given.limit)
  local known = attempt('HMGET', backlog.state, 'credit', 'met') or {}
  local credit = math.min(whole(known[1], -MOST, MOST) or most, most)
  local met = whole(known[2], 0, 1) or 0
  local last = met + MET
  while credit >= NEWCOMERS and met < last and not has_enough() do
    local newest = met % 2 == 1
    local job_id = next_newcomer(backlog, newest)
    if not job_id then break end
    met = met + 1
    local job = waiting(list, job_id)
    if job and not job.suspect then
      credit = credit - NEWCOMERS * take_few(queue, list, registry, backlog, job, newest)
    end
  end
  write('HSET', backlog.state, 'credit', credit, 'met', met % 2)
end

-- Lets jobs join that only RQ's list knows, a piece of the list at each claim; a larger one while
-- there are fewer members than jobs.
local function look_through(list, backlog)
  local from = whole(attempt('HGET', backlog.state, 'scanned'), 0, MOST) or 0
  if from >= redis.call('LLEN', list) then from = 0 end
  local entries = members_in(backlog.rounds) < waiting_in(list) and PIECE or LOOKED_AT
  adopt(list, names.job, from, entries)
  write('HSET', backlog.state, 'scanned', from + entries)
end

-- Returns true where a suspect was met: then nothing more is claimed.
local function walk(queue, list, registry)
  local backlog, before = backlog_of(list), #claimed
  close_in_time(backlog)
  look_through(list, backlog)
  take_newcomers(queue, list, registry, backlog)
  take_returned(queue, list, registry, backlog)
  if redis.call('EXISTS', backlog.round) == 0 then next_round(backlog) end
  local from, dropped, stopped = place(backlog), 0, false
  while not has_enough() and dropped < DROPPED and not stopped do
    local members = members_after(backlog.round, from, given.limit - #claimed)
    if #members == 0 and from == '' and not next_round(backlog) then break end
    if #members == 0 then from = '' end
    for _, member in ipairs(members) do
      local job_id = string.match(member, ':([%w_-]+)$')
      local job = job_id and waiting(list, job_id)
      if not job then
        redis.call('ZREM', backlog.round, member)
        dropped = dropped + 1
      elseif job.suspect and (#claimed > 0 or not given.idle) then
        stopped = true
        break
      elseif has_enough() then
        break
      else
        claim(queue, registry, job)
        redis.call('ZREM', backlog.round, member) -- also where the job's record tells another path
        stopped = job.suspect
      end
      from = member
      if stopped then break end
    end
  end
  write('HSET', backlog.state, 'at ' .. given.worker, from)
  more = more or dropped >= DROPPED
  add('HINCRBY', backlog.state, 'credit', #claimed - before)
  count_stale(list, #claimed - before)
  return stopped
end
