-- Takes deliveries that are due: nobody else takes them until their claim has run out.
--
-- KEYS: the list of deliveries, the counts of tries. ARGV: how many, the seconds that a claim lasts,
-- those after which counts that nobody adds to are forgotten.
-- Returns for each: {its name, how often it has been tried, with this time}.

local taken, now = {}, seconds()
local due = attempt('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, name in ipairs(due or {}) do
  if string.match(name, '^[%w_-]+$') then
    redis.call('ZADD', KEYS[1], now + ARGV[2], name)
    taken[#taken + 1] = {name, add('HINCRBY', KEYS[2], name, 1)}
    redis.call('EXPIRE', KEYS[2], ARGV[3])
  else
    redis.call('ZREM', KEYS[1], name) -- names nothing of ours
  end
end
return taken
