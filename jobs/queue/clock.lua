-- The one clock by which machines judge each other: that of Redis. Their own may differ, and be set.

local function seconds()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

