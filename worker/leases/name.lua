-- Takes or renews the lease on a worker's name; returns 0 where another worker has it, else 1.
--
-- KEYS: the lease. ARGV: what names this worker among all that ever had the name, seconds.

local holder = attempt('GET', KEYS[1])
-- A lease ends by itself; what does not is none.
if holder and holder ~= ARGV[1] and redis.call('TTL', KEYS[1]) ~= -1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
