"""KV events as vLLM, SGLang, Dynamo and llm-d exchange them, made from changes of the radix tree.

The hash of a block is SHA-256 over the hash of the block before it and its own tokens, as in SGLang. Equal hashes mean
equal prefixes of one namespace: a cache salt, an adapter, or neither.
"""

import hashlib
from collections.abc import Callable

import msgspec

from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.cache.tree_changes import BlocksRemoved, BlocksStored, TreeChange

_MEDIUM = "GPU"
"""Name of the first tier of memory, on a CPU too."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Event: consecutive blocks were cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    """SHA-256 of the adapter's files."""
    extra_keys: list[tuple[str] | None] | None = None
    """Cache salt, at the first block of a prompt."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Event: blocks were evicted."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Event: the cache is empty, because the scheduler has started."""


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one turn of the scheduler's loop."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


_CHANGES = msgspec.msgpack.Decoder(list[TreeChange])


class BatchEncoder:
    """Encoder of batches, which keeps the digests of all cached blocks. `clock` returns seconds since 1970."""

    def __init__(self, page_size: int, rank: int, clock: Callable[[], float]) -> None:
        self._page_size = page_size
        self._rank = rank
        self._clock = clock
        self._digests: dict[int, bytes] = {}
        """SHA-256 by number of the block."""

    def encode(self, message: bytes) -> bytes:
        """Return a batch for the encoded changes of a tree; one without events begins with a clear tree."""
        events = [self._event(change) for change in _CHANGES.decode(message)] or [AllBlocksCleared()]
        return msgspec.msgpack.encode(KVEventBatch(self._clock(), events, self._rank))

    def _event(self, change: TreeChange) -> BlockStored | BlockRemoved | AllBlocksCleared:
        match change:
            case BlocksStored():
                return self._stored(change)
            case BlocksRemoved(first, count):
                digests = [self._digests.pop(number) for number in range(first, first + count)]
                return BlockRemoved(block_hashes=[_hash(digest) for digest in digests], medium=_MEDIUM)

    def _stored(self, change: BlocksStored) -> BlockStored:
        adapter, _, salt = change.salt.partition("/")
        is_start = change.parent < 0
        parent = _seed(change.salt) if is_start else self._digests[change.parent]
        digest, hashes, stride = parent, [], 4 * self._page_size
        for number, start in enumerate(range(0, len(change.key), stride), start=change.first):
            digest = self._digests[number] = _sha256(digest + change.key[start : start + stride])
            hashes.append(_hash(digest))
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if is_start else _hash(parent),
            token_ids=list(unpack_ints(change.key)),
            block_size=self._page_size,
            lora_id=None,
            medium=_MEDIUM,
            lora_name=adapter or None,
            extra_keys=[(salt,), *[None] * (len(hashes) - 1)] if salt and is_start else None,
        )


def _seed(namespace: str) -> bytes:
    """Return the bytes before the first block: none for the namespace without salt and adapter."""
    return b"" if namespace == "/" else _sha256(f"tercet KV event namespace {namespace}".encode())


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data, usedforsecurity=False).digest()  # OpenSSL needs half the time so


def _hash(digest: bytes) -> int:
    """Return the first 64 bits of a digest, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)
