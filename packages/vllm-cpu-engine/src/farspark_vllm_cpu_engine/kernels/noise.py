"""The random numbers of vLLM's sampling kernels, computed with the kernels' own float32 operations.

Every sum, product and logarithm below is rounded as the kernel rounds it, in the same order: a last bit of difference
could turn a sampled token.
"""

import math
from typing import Any, Final

import numpy as np

from .memory import Array

_U32: Final = 0xFFFFFFFF
# Added to the position when a draft is sampled, so that draft and target never share noise.
DRAFT_SALT: Final = 1 << 30
# The smallest value that the uniform numbers of the acceptance test take.
_SMALLEST_UNIFORM: Final = np.float32(4.6566127342e-10)


def gumbel(seed: int, position: int, first_token: int, num_tokens: int) -> Array:
    """Gumbel noise, float32 [num_tokens], of the tokens from ``first_token`` on at one place of a request's stream."""
    tokens = np.arange(first_token, first_token + num_tokens, dtype=np.uint32)
    noise: Array = -np.log(-_log1p_of_minus(_murmur3_uniform(seed, position, tokens)))
    return noise


def philox_uniform(seed: int, position: int) -> np.float32:
    """A uniform number above 0: the first word of Philox4x32-10 under ``seed`` with ``position`` as the counter."""
    key_0, key_1 = seed & _U32, (seed >> 32) & _U32
    counter_0, counter_1, counter_2, counter_3 = position & _U32, (position >> 32) & _U32, 0, 0
    for _ in range(10):
        product_0, product_2 = 0xD2511F53 * counter_0, 0xCD9E8D57 * counter_2
        counter_0, counter_1, counter_2, counter_3 = (
            (product_2 >> 32) ^ counter_1 ^ key_0,
            product_2 & _U32,
            (product_0 >> 32) ^ counter_3 ^ key_1,
            product_0 & _U32,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) & _U32, (key_1 + 0xBB67AE85) & _U32
    signed = counter_0 - (1 << 32) if counter_0 >> 31 else counter_0
    magnitude = -signed - 1 if signed < 0 else signed
    uniform = np.float32(magnitude) * np.float32(4.6566127342e-10)
    return max(uniform, _SMALLEST_UNIFORM)


def _murmur3_uniform(seed: int, position: int, tokens: Array) -> Array:
    """Uniform float32 in (0, 1), from the 32-bit MurmurHash3 of the words seed, position, token."""
    prefix = 0
    for word in (seed & _U32, (seed >> 32) & _U32, position & _U32):
        prefix = _murmur3_mix(prefix, word)
    hashed = _murmur3_mix_array(prefix, tokens)
    hashed ^= np.uint32(16)  # the length in bytes of the four words
    hashed ^= hashed >> np.uint32(16)
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> np.uint32(13)
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> np.uint32(16)
    high = (hashed >> np.uint32(16)).astype(np.float32)
    low = (hashed & np.uint32(0xFFFF)).astype(np.float32)
    uniform: Array = high * np.float32(2**-16) + (low + np.float32(0.5)) * np.float32(2**-32)
    return uniform


def _murmur3_mix(state: int, word: int) -> int:
    word = _rotated(word * 0xCC9E2D51 & _U32, 15) * 0x1B873593 & _U32
    return (_rotated(state ^ word, 13) * 5 + 0xE6546B64) & _U32


def _rotated(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & _U32


def _murmur3_mix_array(state: int, words: Array) -> Array:
    """One mixing round for many words at once, uint32 [n], which wraps round by itself."""
    words = words * np.uint32(0xCC9E2D51)
    words = (words << np.uint32(15)) | (words >> np.uint32(17))
    words *= np.uint32(0x1B873593)
    words ^= np.uint32(state)
    words = (words << np.uint32(13)) | (words >> np.uint32(19))
    mixed: Array = words * np.uint32(5) + np.uint32(0xE6546B64)
    return mixed


def _log1p_of_minus(value: Array) -> Array:
    """log(1 - value), float32: eight terms of the series below 1/4, the logarithm itself above."""
    polynomial: Any = np.float32(1.0 / 8.0)
    for term in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        polynomial = np.float32(1.0 / term) + value * polynomial
    direct = np.log(np.maximum(np.float32(1.0) - value, np.float32(math.ldexp(1.0, -24))))
    result: Array = np.where(value < np.float32(0.25), -value * polynomial, direct)
    return result
