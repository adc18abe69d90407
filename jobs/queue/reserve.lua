-- The places under the limits that are kept for large submissions, which come in parts.
--
--   mlx-rq:reserved  hash  submission → how many jobs and bytes are to come, and until when their
--                          places are kept (by Redis's clock)

local RESERVED = 'mlx-rq:reserved'
-- From one part to the next, a submission takes no longer, unless its producer is gone.
local RESERVED_SECONDS = 60

-- How many jobs and bytes other submissions have places for.
local function reserved_by_others(submission)
  local jobs, bytes = 0, 0
  local fields = attempt('HGETALL', RESERVED) or {}
  for field = 1, #fields, 2 do
    local some, some_bytes, ends = string.match(fields[field + 1], '^(%d+) (%d+) (%d+)$')
    if not ends or tonumber(ends) < seconds() then
      redis.call('HDEL', RESERVED, fields[field])
    elseif fields[field] ~= submission then
      jobs, bytes = jobs + tonumber(some), bytes + tonumber(some_bytes)
    end
  end
  return jobs, bytes
end

-- Keeps places for what is to come of a submission; none where nothing is.
local function reserve(submission, jobs, bytes)
  if jobs == 0 then
    attempt('HDEL', RESERVED, submission)
    return
  end
  local ends = math.ceil(seconds() + RESERVED_SECONDS)
  write('HSET', RESERVED, submission, string.format('%d %d %d', jobs, bytes, ends))
  redis.call('EXPIRE', RESERVED, RESERVED_SECONDS)
end

