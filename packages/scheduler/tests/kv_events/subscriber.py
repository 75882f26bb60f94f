"""A subscriber of KV events, written after vLLM's classes of the events, that knows only what it receives."""

import struct
from hashlib import sha256
from typing import Any

import msgspec

Path = tuple[str, str, tuple[int, ...]]
"""(adapter, salt, tokens from the start)"""


class Stored(msgspec.Struct, tag="BlockStored", forbid_unknown_fields=True):
    """vLLM's BlockStored; fields that have defaults there have them here."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", forbid_unknown_fields=True):
    """vLLM's BlockRemoved."""

    block_hashes: list[int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", forbid_unknown_fields=True):
    """vLLM's AllBlocksCleared."""


class Batch(msgspec.Struct, array_like=True):
    """vLLM's KVEventBatch, whose encoding SGLang shares."""

    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Tree:
    """Cached prefixes by the hash of their last block."""

    def __init__(self) -> None:
        self.prefixes: dict[int, Path] = {}

    def apply(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            match event:
                case Stored():
                    self._store(event)
                case Removed(hashes):
                    for each in hashes:
                        del self.prefixes[each]
                case Cleared():
                    self.prefixes.clear()

    @property
    def paths(self) -> set[Path]:
        assert len(set(self.prefixes.values())) == len(self.prefixes)
        return set(self.prefixes.values())

    def _store(self, event: Stored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        tokens: tuple[int, ...] = ()
        if event.parent_block_hash is None:
            (salt,) = keys[0] or ("",)
            adapter = event.lora_name or ""
        else:
            adapter, salt, tokens = self.prefixes[event.parent_block_hash]
            assert adapter == (event.lora_name or "")
        for number, each in enumerate(event.block_hashes):
            assert each not in self.prefixes
            tokens += tuple(event.token_ids[number * size : (number + 1) * size])
            self.prefixes[each] = (adapter, salt, tokens)


def sglang_hashes(tokens: list[int], size: int) -> list[int]:
    """Return the hashes that SGLang publishes for the blocks of a prompt without salt or adapter."""
    hashes, digest = [], b""
    for start in range(0, len(tokens), size):
        digest = sha256(digest + b"".join(struct.pack("<I", token) for token in tokens[start : start + size])).digest()
        number = int(digest.hex()[:16], 16)
        hashes.append(number - 2**64 if number >= 2**63 else number)
    return hashes
