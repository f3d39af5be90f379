"""The order in which samples are used, computed one place at a time, so that no process holds an
index of all samples.
"""

import numpy as np

ROUNDS = 6
UINT64 = (1 << 64) - 1


class SampleOrder:
    """A new permutation of the samples each epoch, a pure function of (seed, epoch, place in the
    epoch).

    Where a run stands is one integer, the samples consumed so far; nothing else is needed to go on,
    also with another number of devices or another batch size. Memory does not grow with the data.

    A place is permuted by a Feistel network: its two halves of bits are mixed in turn, each by a
    keyed hash of the other, which is a bijection of the 2^(2k) numbers that two halves of k bits
    hold, whatever the hash. Of these, those beyond the samples (less than 3 in 4) are permuted
    again until they fall among the samples ("cycle walking"), which keeps it a bijection. All of it
    is arithmetic on 64-bit integers: the order is the same with every version of numpy.
    """

    def __init__(self, samples: int, seed: int):
        self.samples, self.seed = samples, seed
        self.half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)

    def indices(self, position: int, count: int) -> np.ndarray:
        """The samples at consumed-sample positions [position, position + count), int64 (count,);
        may cross epochs.
        """
        parts, end = [np.empty(0, np.int64)], position + count
        while position < end:
            epoch, start = divmod(position, self.samples)
            stop = min(start + end - position, self.samples)
            parts.append(self._permuted(np.arange(start, stop, dtype=np.uint64), epoch))
            position += stop - start
        return np.concatenate(parts)

    def _permuted(self, places: np.ndarray, epoch: int) -> np.ndarray:
        keys = [np.uint64(hash_number(f"{self.seed}/{epoch}/{number}")) for number in range(ROUNDS)]
        places = self._feistel(places, keys)
        while (outside := places >= self.samples).any():
            places[outside] = self._feistel(places[outside], keys)
        return places.astype(np.int64)

    def _feistel(self, places: np.ndarray, keys: list[np.uint64]) -> np.ndarray:
        bits, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = places >> bits, places & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        return (left << bits) | right


def mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, which spreads each bit over all; products wrap around at 64
    bits.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_number(text: str) -> int:
    """64 bits of FNV-1a and splitmix64 of a text, in Python's own integers."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & UINT64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & UINT64
    return value ^ (value >> 31)
