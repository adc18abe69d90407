-- A job that has a result has ended, whatever its record says: RQ's own tools, or a person, may put
-- one back whose end they did not see. So each script looks at the result first.

-- How a job ended, in RQ's words, as its result tells; nil for one that has none.
local function ending_of(result)
  local text = attempt('GET', result)
  if not text then return nil end -- what is of another type there is none, and makes room for one
  local decoded, outcome = pcall(cjson.decode, text)
  if not decoded or type(outcome) ~= 'table' then return 'failed' end
  local fault = outcome.error
  if outcome.object ~= nil or fault == nil then return 'finished' end
  return type(fault) == 'table' and fault.type == 'cancelled' and 'canceled' or 'failed'
end

