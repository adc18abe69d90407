-- Notes when answers were fetched for the first time, in their jobs' records that are still there.
--
-- KEYS: the records.

for _, record in ipairs(KEYS) do
  if attempt('HEXISTS', record, 'status') == 1 then
    redis.call('HSETNX', record, 'fetched_at', string.format('%.3f', seconds()))
  end
end
