-- Makes RQ's list of a queue anew, of what waits in the backlog, where it was lost.
--
-- That shows where a short list has fewer entries than the backlog has members. What the list lacks is
-- set aside then, and each claim lists a piece of it again, the oldest first. Where nothing of it
-- waits, the list was only emptied. Meanwhile, the state of the backlog counts what was `listed` again
-- and what has `vanished`: jobs that are gone.

-- Entries up to which a list is short.
local SHORT = 256

-- Sets aside what a short list does not hold. Returns how many jobs were lost before, out of the list.
local function set_aside(list, backlog, was_list)
  for number, round in ipairs(backlog.rounds) do
    if redis.call('EXISTS', round) == 1 then
      redis.call('RENAME', round, backlog.unlisted[number])
    end
  end
  if not was_list then redis.call('DEL', list) end
  local seen, stale = {}, 0
  for _, job_id in ipairs(redis.call('LRANGE', list, 0, -1)) do
    local job, out
    if not seen[job_id] then job, out = waiting(list, job_id) end
    seen[job_id] = true
    if job then
      for _, unlisted in ipairs(backlog.unlisted) do
        redis.call('ZREM', unlisted, member_of(job.path, job_id))
      end
      join(list, job.path, job_id, names.job)
    elseif not out then
      stale = stale + 1
    end
  end
  local lost = settle(list)
  count_stale(list, stale)
  write('HSET', backlog.state, 'listed', was_list and 0 or 1, 'vanished', 0)
  return lost
end

-- Mends a list that was lost, a piece of it. Returns how many jobs were lost with it, once that is
-- known, their ids, where they are few, and whether there is more to mend.
local function mend(list)
  local backlog, entries, lost = backlog_of(list), attempt('LLEN', list), 0
  local nothing = entries == 0
    and redis.call('EXISTS', backlog.round, backlog.next, unpack(backlog.unlisted)) == 0
  if nothing then return 0, {}, false end -- as nearly always where a worker has nothing to do
  if members_in(backlog.unlisted) == 0 then
    local is_whole = entries and (entries > SHORT or members_in(backlog.rounds) <= entries)
    if is_whole then return 0, {}, false end
    lost = set_aside(list, backlog, entries)
  end
  local jobs, gone, looked_at = piece_of(backlog.unlisted, names.job)
  for number, unlisted in ipairs(backlog.unlisted) do
    if looked_at[number] > 0 then
      redis.call('ZREMRANGEBYRANK', unlisted, 0, looked_at[number] - 1)
    end
  end
  for _, job in ipairs(jobs) do
    redis.call('RPUSH', list, job.id)
    join(list, job.path, job.id, names.job)
  end
  local listed = add('HINCRBY', backlog.state, 'listed', #jobs)
  local vanished = add('HINCRBY', backlog.state, 'vanished', #gone)
  if members_in(backlog.unlisted) > 0 then return lost, {}, true end
  attempt('HDEL', backlog.state, 'listed', 'vanished')
  if listed == 0 then return lost, {}, false end
  count_lost(list, vanished)
  return lost + vanished, vanished == #gone and gone or {}, false
end

