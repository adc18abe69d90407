-- Takes deliveries that are due: nobody else takes them until their claim has run out.
--
-- KEYS: the list of deliveries, the counts of tries. ARGV: now, how many, the end of the claim,
-- seconds after which counts that nobody adds to are forgotten.
-- Returns for each: {job id, how often it has been tried, with this time}.

local taken = {}
for _, job_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
  redis.call('ZADD', KEYS[1], ARGV[3], job_id)
  taken[#taken + 1] = {job_id, redis.call('HINCRBY', KEYS[2], job_id, 1)}
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
return taken
