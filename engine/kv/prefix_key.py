"""A prefix as the bytes of its token ids: keys sort, compare and are cut at the speed of memcmp."""

from array import array
from collections.abc import Sequence

Key = bytes

TOKEN_BYTES = array("I").itemsize


def key_of(tokens: Sequence[int]) -> Key:
    """Writes token ids as a key; raises OverflowError for one that does not fit 32 bits."""
    return array("I", tokens).tobytes()
