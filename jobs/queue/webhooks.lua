-- Takes deliveries that are due: nobody else takes them until their claim has run out.
--
-- KEYS: the list of deliveries, the counts of tries. ARGV: now, how many, the end of the claim,
-- seconds after which counts that nobody adds to are forgotten.
-- Returns for each: {job id, how often it has been tried, with this time}.

local taken = {}
local due = attempt('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, job_id in ipairs(due or {}) do
  if string.match(job_id, '^[%w_-]+$') then
    redis.call('ZADD', KEYS[1], ARGV[3], job_id)
    taken[#taken + 1] = {job_id, add('HINCRBY', KEYS[2], job_id, 1)}
    redis.call('EXPIRE', KEYS[2], ARGV[4])
  else
    redis.call('ZREM', KEYS[1], job_id) -- names no job
  end
end
return taken
