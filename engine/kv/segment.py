"""Keys and values of a part of a prefix: frozen, whole or in a few bits."""

from typing import Any, ClassVar, Self

import mlx.core as mx

_GROUPS = (64, 32)
"""So many numbers have one scale and one bias: the first of these that divides a head's width."""

_ZERO = mx.array(0.0)


class KVSegment:
    """The keys and values of a run of tokens in one layer, frozen. Compared by identity.

    Both have the shape (1, KV heads, tokens, head width).
    """

    __slots__ = ("_keys", "_values", "tokens")

    latent: ClassVar[bool] = False
    """Whether it is of a layer that keeps latents (`latents.py`)."""
    whole: ClassVar[bool] = False
    """Whether rows that stand on it are always fetched whole."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self.tokens = keys.shape[2]
        # A slice would keep all of what it was cut from.
        self._keys, self._values = mx.contiguous(keys), mx.contiguous(values)

    def __deepcopy__(self, memo: object) -> Self:
        """Gives itself: mlx-lm copies whole batches where it splits one."""
        return self

    def __len__(self) -> int:
        return self.tokens

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What it holds."""
        return self._keys, self._values

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def keys(self) -> mx.array:
        return self._keys

    @property
    def values(self) -> mx.array:
        return self._values

    @property
    def scored(self) -> mx.array:
        """What queries are multiplied by."""
        return self._keys

    @property
    def summed(self) -> mx.array:
        """What weights are multiplied by."""
        return self._values

    def scores(self, queries: mx.array, heads: slice, scale: float) -> mx.array:
        """Multiplies queries (KV heads, any, head width) of some heads by the keys, in float32."""
        keys = self._keys[0, heads].astype(mx.float32)
        return mx.addmm(_ZERO, queries, keys.swapaxes(-1, -2), alpha=scale)

    def weighted(self, weights: mx.array, heads: slice) -> mx.array:
        """Sums the values of some heads by weights (KV heads, any, tokens)."""
        return weights @ self.summed[0, heads]


class WholeSegment(KVSegment):
    """What one of several caches of a layer holds of a run of tokens, frozen.

    The layer looks into its rows in a way of its own.
    """

    __slots__ = ()
    whole = True


class LatentSegment(KVSegment):
    """The latents and the rotated keys of a run of tokens (`latents.py`), frozen.

    A cache has them as keys and values. They lie side by side: the two together are the keys that
    are attended to, the latents alone the values.
    """

    __slots__ = ("_width",)
    latent = True

    def __init__(self, latents: mx.array, rotated: mx.array) -> None:
        self.tokens, self._width = latents.shape[2], latents.shape[3]
        self._keys = mx.concatenate([latents, rotated], axis=-1)

    @staticmethod
    def fits(keys: mx.array, values: mx.array) -> bool:
        """Tells whether what a cache holds looks so: one head, and wider keys than values."""
        return keys.shape[1] == 1 and keys.shape[3] > values.shape[3]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (self._keys,)

    @property
    def keys(self) -> mx.array:
        return self._keys[..., : self._width]

    @property
    def values(self) -> mx.array:
        return self._keys[..., self._width :]

    @property
    def summed(self) -> mx.array:
        return self.keys


class QuantizedSegment(KVSegment):
    """Keys and values in a few bits, by scales in float32, since so are scores."""

    __slots__ = ("_bits", "_dtype")

    def __init__(self, keys: mx.array, values: mx.array, bits: int) -> None:
        self.tokens, self._bits, self._dtype = keys.shape[2], bits, keys.dtype
        self._keys: Any = self._quantized(keys)
        self._values: Any = self._quantized(values)

    def _quantized(self, array: mx.array) -> Any:
        return mx.quantize(
            array.astype(mx.float32), group_size=group(array.shape[-1]), bits=self._bits
        )

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self._keys, *self._values)

    @property
    def keys(self) -> mx.array:
        return self._whole(self._keys)

    @property
    def values(self) -> mx.array:
        return self._whole(self._values)

    def _whole(self, arrays: Any) -> mx.array:
        packed, scales, biases = arrays
        size = self._group(arrays)
        whole = mx.dequantize(packed, scales, biases, group_size=size, bits=self._bits)
        return whole.astype(self._dtype)

    def _group(self, arrays: Any) -> int:
        packed, scales, _ = arrays
        return int(packed.shape[-1] * 32 // self._bits // scales.shape[-1])

    def scores(self, queries: mx.array, heads: slice, scale: float) -> mx.array:
        return self._product(queries * scale, self._keys, heads, transpose=True)

    def weighted(self, weights: mx.array, heads: slice) -> mx.array:
        product = self._product(weights.astype(mx.float32), self._values, heads, transpose=False)
        return product.astype(self._dtype)

    def _product(self, factor: mx.array, arrays: Any, heads: slice, *, transpose: bool) -> mx.array:
        packed, scales, biases = (array[0, heads] for array in arrays)
        return mx.quantized_matmul(
            factor,
            packed,
            scales,
            biases,
            transpose=transpose,
            group_size=self._group(arrays),
            bits=self._bits,
        )


class QuantizedLatentSegment(QuantizedSegment):
    """Latents in a few bits; rotated keys whole, which are few."""

    __slots__ = ()
    latent = True

    def __init__(self, latents: mx.array, rotated: mx.array, bits: int) -> None:
        self.tokens, self._bits, self._dtype = latents.shape[2], bits, latents.dtype
        self._keys = self._quantized(latents)
        self._values = mx.contiguous(rotated)

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return (*self._keys, self._values)

    @property
    def values(self) -> mx.array:
        rotated: mx.array = self._values
        return rotated

    def scores(self, queries: mx.array, heads: slice, scale: float) -> mx.array:
        width = queries.shape[-1] - self._values.shape[-1]
        by_latents = super().scores(queries[..., :width], heads, scale)
        rotated = self._values[0, heads].astype(mx.float32).swapaxes(-1, -2)
        return mx.addmm(by_latents, queries[..., width:], rotated, alpha=scale)

    def weighted(self, weights: mx.array, heads: slice) -> mx.array:
        product = self._product(weights.astype(mx.float32), self._keys, heads, transpose=False)
        return product.astype(self._dtype)


def group(width: int) -> int | None:
    """Says by how many numbers heads of this width are quantised; None: they cannot be."""
    return next((size for size in _GROUPS if width % size == 0), None)
