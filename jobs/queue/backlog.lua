-- The backlog of a queue in the order of the prefix tree, beside RQ's list, which is in the order of
-- arrival. Stands before each script that adds to it or takes from it.
--
-- Jobs are taken in rounds. A round is a sorted set whose members, <path>:<job id>, all have the
-- score 0, so that Redis keeps them in lexicographic order: a depth-first walk of the tree
-- (`prefix_path.py`). A job that comes within `max_wait` of the beginning of a round joins it; what
-- comes later joins the next one. So whatever comes, a job is reached within the round that it is in.
--
--   mlx-rq:backlog:<queue>           sorted set   this round
--   mlx-rq:backlog-next:<queue>      sorted set   the next round
--   mlx-rq:backlog-state:<queue>     hash         `closes`: when (by Redis's clock) this round takes
--                                                 no more jobs; `scanned`: how far the list was looked
--                                                 through; `at <worker>`: what it claimed last;
--                                                 `stale`: entries of the list that wait no more,
--                                                 below 0 where more were dropped than were known;
--                                                 `missing`: of those that were dropped, how many
--                                                 had no job; `lost`, `lost_at`: how many jobs were
--                                                 gone when their turn came, and when it was seen;
--                                                 `credit`, `met`: which newcomers may go, and
--                                                 how many (`claim_walk.lua`)
--   mlx-rq:backlog-returned:<queue>  list         jobs that were given back, which go first
--   mlx-rq:backlog-newcomers:<queue> list         jobs that began like nothing that waited when they
--                                                 came, which do not wait for their turn
--
--   mlx-rq:backlog-unlisted:<queue>, backlog-unlisted-next: what `claim_mend.lua` has set aside
--
-- A member whose job does not wait any more (cancelled, taken by RQ's own means) is left, and dropped
-- when it is met.

local function backlog_of(list)
  local name = string.match(list, 'mlx%-rq:.*$') or list
  local round, next_round = 'mlx-rq:backlog:' .. name, 'mlx-rq:backlog-next:' .. name
  return {
    round = round,
    next = next_round,
    rounds = {round, next_round},
    state = 'mlx-rq:backlog-state:' .. name,
    returned = 'mlx-rq:backlog-returned:' .. name,
    newcomers = 'mlx-rq:backlog-newcomers:' .. name,
    unlisted = {'mlx-rq:backlog-unlisted:' .. name, 'mlx-rq:backlog-unlisted-next:' .. name},
  }
end

-- No list of Redis is longer.
local MOST = 2 ^ 32
-- Characters of a path for each level, and of one that has no point within the text.
local LEVEL, WITHOUT_POINT = 4, 8
-- Entries and members that one script looks at, at most, to mend what was lost.
local PIECE = 500
-- Newcomers that are known at once, at most; older ones have their turn like all others.
local NEWCOMERS_KEPT = 4096

local function member_of(path, job_id)
  return (string.match(path, '^%x+$') or '') .. ':' .. job_id
end

-- What a member shares with those that are to be computed together with it: its path without the
-- level that is of the whole text, or all of it where the text is short.
local function group_of(member)
  local path = string.match(member, '^%x*')
  return #path > WITHOUT_POINT and string.sub(path, 1, #path - LEVEL) or path
end

-- The members that begin like one, of both rounds, up to so many of each.
local function alike(backlog, member, most)
  local group, found = group_of(member), {}
  for _, round in ipairs(backlog.rounds) do
    local members = attempt(
      'ZRANGE', round, '[' .. group, '(' .. group .. '\255', 'BYLEX', 'LIMIT', 0, most)
    for _, one in ipairs(members or {}) do found[#found + 1] = one end
  end
  return found
end

-- Notes that a job, which has not joined yet, is a newcomer, if nothing that waits begins like it.
local function welcome(list, path, job_id)
  local backlog = backlog_of(list)
  if #alike(backlog, member_of(path, job_id), 1) > 0 then return end
  write('RPUSH', backlog.newcomers, job_id)
  redis.call('LTRIM', backlog.newcomers, -NEWCOMERS_KEPT, -1)
end

-- Notes that jobs were lost: evicted, or deleted by hand.
local function count_lost(list, jobs)
  local state = backlog_of(list).state
  if jobs == 0 then return end
  add('HINCRBY', state, 'lost', jobs)
  redis.call('HSET', state, 'lost_at', math.floor(seconds()))
end

-- Lets jobs that only RQ's list knows join the next round: those of a piece of it.
local function adopt(list, job_prefix, from, entries)
  local backlog = backlog_of(list)
  for _, job_id in ipairs(attempt('LRANGE', list, from, from + entries - 1) or {}) do
    local is_id = string.match(job_id, '^[%w_-]+$')
    local record = is_id and attempt('HMGET', job_prefix .. job_id, 'status', 'meta')
    if record and waits(record[1]) then
      local decoded, meta = pcall(cjson.decode, record[2] or '')
      local path = decoded and type(meta) == 'table' and type(meta.path) == 'string' and meta.path
      local member = member_of(path or '', job_id)
      local known = attempt('ZSCORE', backlog.round, member)
        or attempt('ZSCORE', backlog.next, member)
      if not known then write('ZADD', backlog.next, 0, member) end
    end
  end
end

-- Counts the members of some sorted sets; what of another type is in their place makes room.
local function members_in(sets)
  local members = 0
  for _, set in ipairs(sets) do
    local count = attempt('ZCARD', set)
    if not count then redis.call('DEL', set) end
    members = members + (count or 0)
  end
  return members
end

-- Looks at the first members of some sorted sets. Returns the jobs of them that wait, the oldest
-- first, each with its path, the ids of those that are gone, and how many there were of each set.
local function piece_of(sets, job_prefix)
  local jobs, gone, looked_at, left = {}, {}, {}, PIECE
  for number, set in ipairs(sets) do
    local members = left > 0 and attempt('ZRANGE', set, 0, left - 1) or {}
    for _, member in ipairs(members) do
      local path, job_id = string.match(member, '^(%x*):([%w_-]+)$')
      local record = job_id and attempt('HMGET', job_prefix .. job_id, 'status', 'enqueued_at')
      if record and waits(record[1]) then
        jobs[#jobs + 1] = {id = job_id, path = path, time = record[2] or ''}
      elseif job_id and redis.call('EXISTS', job_prefix .. job_id) == 0 then
        gone[#gone + 1] = job_id
      end
    end
    looked_at[number] = #members
    left = left - #members
  end
  table.sort(jobs, function(one, other) return one.time < other.time end)
  return jobs, gone, looked_at
end

-- Puts a job into RQ's list. Where that holds another type, it is made anew of what waits in the
-- backlog; if that is much, the next claim does it (`claim_mend.lua`).
local function push(command, list, job_id, job_prefix)
  if attempt(command, list, job_id) then return end
  redis.call('DEL', list)
  local backlog = backlog_of(list)
  attempt('HDEL', backlog.state, 'stale', 'missing') -- went with the list
  if members_in(backlog.rounds) <= PIECE then
    for _, job in ipairs(piece_of(backlog.rounds, job_prefix)) do
      redis.call('RPUSH', list, job.id)
    end
  end
  redis.call(command, list, job_id)
end

-- How many jobs wait: the entries of RQ's list, less those that were taken out of its middle.
local function waiting_in(list)
  local stale = whole(attempt('HGET', backlog_of(list).state, 'stale'), 0, MOST) or 0
  return math.max(0, (attempt('LLEN', list) or 0) - stale)
end

-- Notes that so many entries of the list have become stale, or that so many stale ones went.
local function count_stale(list, change)
  local state = backlog_of(list).state
  local stale = (whole(attempt('HGET', state, 'stale'), -MOST, MOST) or 0) + change
  if stale ~= 0 then write('HSET', state, 'stale', stale) else attempt('HDEL', state, 'stale') end
end

-- Notes that entries were taken out of the list whose jobs do not wait; of so many there is no job.
local function count_dropped(list, dropped, missing)
  if dropped == 0 then return end
  count_stale(list, -dropped)
  if missing > 0 then add('HINCRBY', backlog_of(list).state, 'missing', missing) end
end

-- Begins to count anew where nothing stale is left in the list. If more was dropped than claims had
-- left there, jobs were lost. Returns how many.
local function settle(list)
  local state = backlog_of(list).state
  local counts = attempt('HMGET', state, 'stale', 'missing') or {}
  local stale, missing = whole(counts[1], -MOST, MOST) or 0, whole(counts[2], 0, MOST) or 0
  local lost = math.max(0, math.min(missing, -stale))
  count_lost(list, lost)
  if counts[1] or counts[2] then attempt('HDEL', state, 'stale', 'missing') end
  return lost
end

-- Adds a job to this round where that takes more, else to the next one.
local function join(list, path, job_id, job_prefix)
  local backlog = backlog_of(list)
  local closes = tonumber(attempt('HGET', backlog.state, 'closes') or '')
  local round = closes and seconds() < closes and backlog.round or backlog.next
  if attempt('ZADD', round, 0, member_of(path, job_id)) == false then
    redis.call('DEL', round)
    adopt(list, job_prefix, 0, PIECE)
    redis.call('ZADD', round, 0, member_of(path, job_id))
  end
end
