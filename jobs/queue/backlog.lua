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
--                                                 gone when their turn came, and when it was seen
--   mlx-rq:backlog-returned:<queue>  list         jobs that were given back, which go first
--
-- A member whose job does not wait any more (cancelled, taken by RQ's own means) is left, and dropped
-- when it is met.

local function backlog_of(list)
  local name = string.match(list, 'mlx%-rq:.*$') or list
  return {
    round = 'mlx-rq:backlog:' .. name,
    next = 'mlx-rq:backlog-next:' .. name,
    state = 'mlx-rq:backlog-state:' .. name,
    returned = 'mlx-rq:backlog-returned:' .. name,
  }
end

-- No list of Redis is longer.
local MOST = 2 ^ 32

-- Makes a list anew that is lost, or holds another type: of what waits in the backlog, the oldest
-- first. What waits no more is taken out of the backlog, so that this is not done again in vain.
local function mend(list, job_prefix)
  local backlog, jobs = backlog_of(list), {}
  local entries = attempt('LLEN', list)
  if entries and (entries > 0 or redis.call('EXISTS', backlog.round, backlog.next) == 0) then
    return
  end
  redis.call('DEL', list)
  for _, round in ipairs({backlog.round, backlog.next}) do
    for _, member in ipairs(attempt('ZRANGE', round, 0, -1) or {}) do
      local job_id = string.match(member, ':([%w_-]+)$')
      local record = job_id and attempt('HMGET', job_prefix .. job_id, 'status', 'enqueued_at')
      if record and record[1] == 'queued' then
        jobs[#jobs + 1] = {record[2] or '', job_id}
      else
        redis.call('ZREM', round, member)
      end
    end
  end
  table.sort(jobs, function(one, other) return one[1] < other[1] end)
  for _, job in ipairs(jobs) do redis.call('RPUSH', list, job[2]) end
  if not entries or #jobs > 0 then attempt('HDEL', backlog.state, 'stale') end
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
-- left there, jobs were lost: evicted, or deleted by hand. Returns how many.
local function settle(list)
  local state = backlog_of(list).state
  local counts = attempt('HMGET', state, 'stale', 'missing') or {}
  local stale, missing = whole(counts[1], -MOST, MOST) or 0, whole(counts[2], 0, MOST) or 0
  local lost = math.min(missing, -stale)
  if lost > 0 then
    add('HINCRBY', state, 'lost', lost)
    redis.call('HSET', state, 'lost_at', math.floor(seconds()))
  end
  if counts[1] or counts[2] then attempt('HDEL', state, 'stale', 'missing') end
  return lost
end

local function member_of(path, job_id)
  return (string.match(path, '^%x+$') or '') .. ':' .. job_id
end

-- Adds a job to this round where that takes more, else to the next one.
local function join(list, path, job_id)
  local backlog = backlog_of(list)
  local closes = tonumber(attempt('HGET', backlog.state, 'closes') or '')
  local round = closes and seconds() < closes and backlog.round or backlog.next
  write('ZADD', round, 0, member_of(path, job_id))
end
