"""Changes of the radix tree, for an observer that follows it block by block.

A block is one page of tokens of the tree. Blocks have numbers that are never used again; those of an insertion are
consecutive. A split of an edge changes no block.
"""

from collections.abc import Callable

import msgspec


class BlocksStored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks that continue a cached prefix."""

    salt: str
    parent: int
    """Number of the block that these follow; -1 at the root."""
    first: int
    """Number of the first one."""
    key: bytes
    """Tokens of all of them, as int32 bytes."""


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Consecutive blocks that were evicted. Blocks that follow them were evicted earlier."""

    first: int
    count: int


TreeChange = BlocksStored | BlocksRemoved
TreeObserver = Callable[[TreeChange], None]
