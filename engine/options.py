"""How much an engine does at once."""

from dataclasses import dataclass

SHARE_FROM = 1024
"""Tokens of copies that a step reads in the time that a shared prefix costs it.

Between what measuring gives on a CPU (192, SmolLM2 in float32) and what it would give on a fast
Apple chip (some 4,500 for Qwen3-4B), where launches cost more than reading.
"""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much the engine does at once.

    `batch_size` sequences decode together; `chunk` prompt tokens are prefilled between two decode
    steps; KV of prefixes and sequences takes at most `kv_bytes` (None: what the machine has room
    for); a sequence that waited `max_wait` seconds goes before others of its priority. A prefix is
    cached from `min_prefix_tokens` on. A sequence is admitted where there is memory for its prompt
    and `reserve` tokens: most answers are shorter than they may be, and where many are not,
    sequences are preempted. With `close_json`, a structured text is steered to its end when its
    budget runs out. With `share_prefixes`, sequences refer to a prefix instead of copying it, where
    the model allows it and a step then reads `share_from` tokens fewer: as many as it could read in
    the time that it takes to attend to one prefix apart. Prefixes that are referred to are held in
    `kv_bits` (8 or 4), which changes answers a little; None: as they were computed. With
    `mix_adapters`, a step has rows of different adapters; None: where that is quicker.
    """

    batch_size: int = 16
    chunk: int = 512
    kv_bytes: int | None = None
    max_wait: float = 30.0
    min_prefix_tokens: int = 16
    reserve: int = 1024
    close_json: bool = False
    share_prefixes: bool = True
    share_from: int = SHARE_FROM
    kv_bits: int | None = None
    mix_adapters: bool | None = None
