"""A prefix as the bytes of its token ids: keys sort, compare and are cut at the speed of memcmp.

A token that is computed with an adapter is another one, so its number has the adapter's above it:
nothing that was computed with one is ever found for another.
"""

from array import array
from collections.abc import Sequence

Key = bytes

TOKEN_BYTES = array("I").itemsize

_TOKEN_BITS = 22
_TOKEN = 2**_TOKEN_BITS - 1

MOST_ADAPTERS = 2 ** (32 - _TOKEN_BITS) - 1


def key_of(tokens: Sequence[int], adapter: int = 0) -> Key:
    """Writes token ids as a key; raises OverflowError for one that does not fit 32 bits."""
    if adapter:
        above = adapter << _TOKEN_BITS
        return array("I", [above | token for token in tokens]).tobytes()
    return array("I", tokens).tobytes()


def tokens_of(key: Key) -> list[int]:
    """Reads the token ids of a key."""
    return [token & _TOKEN for token in array("I", key)]


def adapter_of(key: Key) -> int:
    """Reads the number of the adapter that a key's tokens are computed with; 0 for none."""
    return array("I", key[:TOKEN_BYTES])[0] >> _TOKEN_BITS if key else 0
