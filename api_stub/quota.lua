-- Puts a place into a key's set. KEYS: the set. ARGV: the place, the seconds that the set lives.
-- Returns {how many there are with it, the time}.

local now = string.format('%.6f', seconds())
write('ZADD', KEYS[1], now, ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return {redis.call('ZCARD', KEYS[1]), now}
