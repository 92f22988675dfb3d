"""Random streams named by what they are for, never by who draws: (seed, step, lane) -> one 64-bit seed. Torch-free.

A stream's seed does not contain the rank or the world size, so a lane draws the same dropout masks wherever it runs.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, splitmix64's increment
MIX_1 = 0xBF58476D1CE4E5B9  # splitmix64's two multipliers (Steele, Lea, Flood, OOPSLA 2014)
MIX_2 = 0x94D049BB133111EB

# first word of every key: keeps streams of different purposes apart
PERMUTATION = 1
LANE = 2
NOISE = 3


def hash64(*words: int) -> int:
    """Hash integers to one 64-bit integer; a change in any word, or in their order, gives an unrelated value."""
    state = len(words)
    for word in words:
        state = _mixed((state + _GOLDEN) ^ _mixed(word & _MASK))
    return state


def stream_seed(seed: int, step: int, lane: int) -> int:
    """The seed with which one lane of one step draws (dropout, augmentation)."""
    return hash64(LANE, seed, step, lane)


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)
