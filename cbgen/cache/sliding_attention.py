"""Blocks of sliding-attention layers: a ring of pages over the window, recycled in place.

    window 6, page_size 4: a ring of ceil(6 / 4) = 2 blocks

    tokens 0-7       [ 0  1  2  3 | 4  5  6  7 ]
    token 8          [ 8  1  2  3 | 4  5  6  7 ]      token t lives in block (t // page_size) % 2, over token t - 8
    token 9          [ 8  9  2  3 | 4  5  6  7 ]      sees tokens 4 to 9: the window, itself included

A ring holds at least the window, so that one token can be stored before it attends. A piece of several tokens would
overwrite what its first ones still see: it attends to the ring as it was and to its own tokens, then stores its last.
There is no sharing, and no block table that a kernel could follow by itself.
"""

from cbgen.cache.allocator import CacheAllocator


class SlidingAttentionCacheAllocator(CacheAllocator):
    """A request's blocks grow with its tokens up to the ring, and stay the same from then on."""
