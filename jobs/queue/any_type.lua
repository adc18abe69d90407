-- Stands before each script that reads what others may have written.
--
-- A key may hold anything, put there by hand or by another program. An error would end the script
-- but undo nothing of what it had done, so one of another type than ours must raise none. All other
-- errors (not permitted, say) are raised.

local function is_of_another_type(reply)
  return type(reply) == 'table' and reply.err
    and string.find(reply.err, 'WRONGTYPE', 1, true) ~= nil
end

-- Does what goes with a key of the right type only; false where the key has another.
local function attempt(...)
  local reply = redis.pcall(...)
  if is_of_another_type(reply) then return false end
  if type(reply) == 'table' and reply.err then return redis.call(...) end
  return reply
end

-- Writes to a key of ours; what of another type is there is no good to anybody and makes room.
local function write(command, key, ...)
  local reply = attempt(command, key, ...)
  if reply ~= false then return reply end
  redis.call('DEL', key)
  return redis.call(command, key, ...)
end

