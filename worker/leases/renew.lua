-- Prolongs the leases of a worker; one that was lost in the meantime is not taken back.
--
-- ARGV: JSON with the fields of `RenewArguments` (`keeper.py`).
-- Returns the id of the data set: another one, where Redis has lost its data since.

local given = cjson.decode(ARGV[1])
local names = given.prefixes

for _, lease in ipairs(given.leases) do
  local job_id, execution, queue = unpack(lease)
  local composite = job_id .. ':' .. execution
  local record = names.execution .. composite
  if attempt('ZSCORE', names.started .. queue, composite) then
    redis.call('ZADD', names.started .. queue, now() + given.lease, composite)
    redis.call('HSET', record, 'last_heartbeat', string.format('%.6f', seconds()))
    redis.call('EXPIRE', record, given.lease + MARGIN)
    attempt('ZADD', names.executions .. job_id, 'XX', now() + given.lease + MARGIN, execution)
    redis.call('EXPIRE', names.executions .. job_id, given.lease + MARGIN)
  end
end
if not attempt('GET', given.data_set) then write('SET', given.data_set, given.new_data_set) end
return redis.call('GET', given.data_set)
