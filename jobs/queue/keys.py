"""Every Redis name that mlx-rq itself adds, in one place (RQ's names come from RQ's objects).

    mlx-rq:result:<job id>          string   the OpenAI-shaped result, or {"error": {...}}; TTL
    mlx-rq:completions              stream   one entry for each job that ended; trimmed
    mlx-rq:backlog:<queue>          zset     what waits, in the order of the prefix tree, and
    mlx-rq:backlog-…:<queue>                 what belongs to it (`backlog.lua`)
    mlx-rq:bell:<model>             list     wake-ups by submit, so that an idle worker comes soon
    mlx-rq:idle:<model>             string   a worker that has nothing to do; TTL of seconds
    mlx-rq:worker:<worker name>     string   what a live worker serves and has done; JSON; TTL
    mlx-rq:name:<worker name>       string   the lease on the name: who has it; TTL
    mlx-rq:models                   zset     names that workers served, by when that was last
    mlx-rq:aboard:<worker name>     string   ids of the jobs that a worker has in flight, a bar, and
                                             those that it is reading together; TTL
    mlx-rq:live:<worker name>       string   how fast it is, and what decodes in it; JSON; TTL
    mlx-rq:idempotency:<sha256>     hash     job id and body hash of an idempotency key; TTL
    mlx-rq:idempotency:<owner>:…             those of a client of an HTTP server with keys
    mlx-rq:owner:<prefix>           string   the worker that jobs of this beginning go to; TTL
    mlx-rq:limits                   hash     what the operator allows (`mlx_rq.jobs.queue.limits`)
    mlx-rq:reserved                 hash     places kept for large submissions (`reserve.lua`); TTL
    mlx-rq:data-set                 string   a random id, kept as long as what else is in Redis
    mlx-rq:recovery                 string   paces the recovery of expired leases; TTL
    mlx-rq:stored                   zset     jobs whose completions are listed, by time; trimmed
    mlx-rq:metadata:<job id>        string   new metadata of a stored completion; JSON; TTL
    mlx-rq:stream:<job id>          stream   text as it is generated (`jobs/queue/stream.py`); TTL
    mlx-rq:owned:<key's owner>      zset     jobs that came in with an API key; trimmed, TTL
    mlx-rq:history                  stream   samples of rates, queues and memory (`history.py`); TTL
    mlx-rq:webhooks                 zset     ended jobs, and events, of which webhooks tell, by when
    mlx-rq:webhook-tries            hash     how often each of those was tried
    mlx-rq:webhook-event:<name>     string   what is told of what is no job; JSON; TTL
    mlx-rq:webhook-server           string   that an HTTP server delivers; TTL of seconds

RQ's queues are called `mlx-rq:<model>:<priority>`, the model percent-encoded, because model ids
hold slashes and RQ joins queue names with commas.
"""

import hashlib
from urllib.parse import quote, unquote

from mlx_rq.jobs.openai.priority import PRIORITIES, Priority

COMPLETIONS = "mlx-rq:completions"
COMPLETIONS_KEPT = 100_000
"""Entries that the completions stream keeps (about 100 bytes each)."""

WAKE_UPS_KEPT = 16
"""Wake-ups that are kept where nobody takes them."""

WAKE_UP_SECONDS = 24 * 3600
"""They go so long after the last one: who comes later looks into the queue first."""

LIMITS = "mlx-rq:limits"

RECOVERY = "mlx-rq:recovery"

DATA_SET = "mlx-rq:data-set"

MODELS = "mlx-rq:models"
MODELS_KEPT = 1000

STORED = "mlx-rq:stored"

HISTORY = "mlx-rq:history"

WEBHOOKS = "mlx-rq:webhooks"
WEBHOOKS_KEPT = 100_000
"""Webhooks that wait where no HTTP server sends any; the oldest are dropped."""

WEBHOOK_TRIES = "mlx-rq:webhook-tries"

WEBHOOK_SERVER = "mlx-rq:webhook-server"

OWNER = "mlx-rq:owner:"
"""Before the name of a beginning (`mlx_rq.jobs.queue.affinity`): the worker that owns it."""

IN_FLIGHT = "mlx-rq:aboard:"
"""Before a worker's name."""

QUEUE = "mlx-rq"
"""How the names of our queues begin."""


def result(job_id: str) -> str:
    """Names the key that holds a job's result."""
    return f"mlx-rq:result:{job_id}"


def backlog_state(queue: str) -> str:
    """Names the record of how far a queue's backlog was gone through (`backlog.lua`)."""
    return f"mlx-rq:backlog-state:{queue}"


def wake_up(model: str) -> str:
    """Names the list that wakes idle workers of a model."""
    return f"mlx-rq:bell:{model}"


def idle(model: str) -> str:
    """Names the record that says, for some seconds, that a worker of a model has nothing to do."""
    return f"mlx-rq:idle:{model}"


def worker(name: str) -> str:
    """Names the record in which a live worker says what it serves."""
    return f"mlx-rq:worker:{name}"


def worker_name(name: str) -> str:
    """Names the lease on a worker's name."""
    return f"mlx-rq:name:{name}"


def in_flight(name: str) -> str:
    """Names the record of the jobs that a worker is generating: what died, if it dies."""
    return f"{IN_FLIGHT}{name}"


def live(name: str) -> str:
    """Names the record in which a worker says every second how fast it is, and what decodes."""
    return f"mlx-rq:live:{name}"


def idempotency(key: str, owner: str | None = None) -> str:
    """Names the record of an idempotency key (hashed: the key is the user's and may be long).

    Every owner of jobs has keys of its own.
    """
    whose = "" if owner is None else f"{owner}:"
    return f"mlx-rq:idempotency:{whose}{hashlib.sha256(key.encode()).hexdigest()}"


def metadata(job_id: str) -> str:
    """Names the key that holds the metadata that a stored completion got later."""
    return f"mlx-rq:metadata:{job_id}"


def owned(owner: str) -> str:
    """Names the set of the jobs that came in with one API key."""
    return f"mlx-rq:owned:{owner}"


def webhook_event(name: str) -> str:
    """Names the record of an event that a webhook tells, of what is no job."""
    return f"mlx-rq:webhook-event:{name}"


def stream(job_id: str) -> str:
    """Names the stream of a job's text while it is generated."""
    return f"mlx-rq:stream:{job_id}"


def queue_name(model: str, priority: Priority) -> str:
    """Names the RQ queue of one model and priority."""
    return f"{QUEUE}:{quote(model, safe='')}:{priority}"


def is_ours(queue: str) -> bool:
    """Tells our queues from those of other programs in the same Redis."""
    try:
        model_and_priority(queue)
    except ValueError:
        return False
    return True


def model_and_priority(queue: str) -> tuple[str, str]:
    """Reads a queue name back; raises ValueError where it is not one of ours."""
    prefix, model, priority = queue.split(":")
    if prefix != QUEUE or priority not in PRIORITIES:
        raise ValueError(f"not a queue of mlx-rq: {queue!r}")
    return unquote(model), priority
