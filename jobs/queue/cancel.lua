-- Cancels jobs of one queue, each as `finish.lua` does, which stands before this as `finish`.
--
-- Their entries in RQ's list are taken out here where that is little work, else left for
-- `sweep.lua`, and counted as stale until then.
--
-- KEYS: the list of the queue. ARGV: JSON with the fields of `CancelArguments` (`cancel.py`), the
-- ids of the jobs, and then the arguments of `finish.lua`, in which `given.place` stands for the id.
-- Returns {whether a sweep is needed (1 or 0), reply for each job}: those of `finish.lua`, or
-- {'passed'} for a job that does not wait, where only those were wanted.

local list = KEYS[1]
local given = cjson.decode(ARGV[1])
local FIRST_ID = 2
-- Entries of a list that are looked at, at most, to take single jobs out of it.
local SEARCHED = 2000000

local template = {}
for at = FIRST_ID + given.jobs, #ARGV do template[#template + 1] = ARGV[at] end

local function for_job(texts, job_id)
  local written = {}
  for number, text in ipairs(texts) do
    written[number] = string.gsub(text, given.place, job_id)
  end
  return written
end

local backlog, members = backlog_of(list), {}
local one_by_one = given.together * (attempt('LLEN', list) or 0) <= SEARCHED
local stale, replies = 0, {}
for at = FIRST_ID, FIRST_ID + given.jobs - 1 do
  local job_id = ARGV[at]
  local job = given.job_prefix .. job_id
  local fields = attempt('HMGET', job, 'status', 'meta') or {}
  local waited = waits(fields[1])
  local reply = {'passed'}
  if waited or not given.only_waiting then
    reply = finish(for_job(given.finish_keys, job_id), for_job(template, job_id))
  end
  if waited and reply[1] == 'ended' then
    local decoded, meta = pcall(cjson.decode, fields[2] or '')
    local path = decoded and type(meta) == 'table' and type(meta.path) == 'string' and meta.path
    members[#members + 1] = member_of(path or '', job_id)
    if one_by_one then
      -- One that was claimed out of the middle and given back stands there twice.
      stale = stale - math.max(0, (attempt('LREM', list, 0, job_id) or 0) - 1)
    else
      stale = stale + 1
    end
  end
  replies[#replies + 1] = reply
end
if #members > 0 then
  attempt('ZREM', backlog.round, unpack(members))
  attempt('ZREM', backlog.next, unpack(members))
end
if stale ~= 0 then count_stale(list, stale) end
return {stale > 0 and 1 or 0, unpack(replies)}
