"""Counter-based uniform numbers: the same (seed, position) gives the same number on any machine."""

_MASK = (1 << 64) - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox4x64(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x64 (Salmon et al. 2011); all words are 64-bit unsigned."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high = _MULTIPLIERS[0] * c0
        low = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (low >> 64) ^ c1 ^ k0, low & _MASK, (high >> 64) ^ c3 ^ k1, high & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def counter_uniform(seed: int, position: int) -> float:
    """Uniform float64 in [0, 1) for one draw; any Python int seed (taken modulo 2^128)."""
    key = (seed & _MASK, (seed >> 64) & _MASK)
    word = philox4x64((position & _MASK, 0, 0, 0), key)[0]
    return (word >> 11) * 2.0**-53
