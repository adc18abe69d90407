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

-- Adds to a count in a hash; one that is no number begins anew.
local function add(command, key, field, amount)
  local reply = redis.pcall(command, key, field, amount)
  if type(reply) ~= 'table' or not reply.err then return reply end
  write('HSET', key, field, amount)
  return amount
end

-- Reads a whole number within limits; nil where a text is none.
local function whole(text, least, most)
  local number = tonumber(text or '')
  if not number or not (number >= least and number <= most) then return nil end
  return math.floor(number)
end

-- RQ's words for the states of a job that does not wait and is not at work.
local SETTLED = {
  created = true, deferred = true, scheduled = true, rate_limited = true, finished = true,
  failed = true, stopped = true, canceled = true, ready_to_enqueue = true,
}

-- Tells the state of a job. A status that is none of RQ's says nothing: then the job is where it lies,
-- in the list of its queue or with its worker.
local function is_settled(status)
  return SETTLED[status] == true
end

-- Whether a job of that status waits.
local function waits(status)
  return status and status ~= 'started' and not is_settled(status)
end

