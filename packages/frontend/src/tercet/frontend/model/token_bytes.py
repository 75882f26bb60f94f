"""Bytes of each token, for log-probabilities."""

from functools import cache

from tercet.frontend.model.tokenizer import PromptTokenizer


@cache
def _byte_level() -> dict[str, int]:
    """Return GPT-2's byte alphabet, the inverse of its `bytes_to_unicode`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        alphabet[chr(256 + shift)] = byte
    return alphabet


class TokenBytes:
    """Cache of tokens' bytes by id, with at most one entry per token of the vocabulary."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in tokenizer.decoder_types
        self._wordpiece = "WordPiece" in tokenizer.decoder_types
        self._seen: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._seen.get(token_id)
        if known is None:
            known = self._seen[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        piece = self._tokenizer.token(token_id)
        if token_id in self._tokenizer.added_ids:
            return piece.encode()
        if self._byte_level:
            alphabet = _byte_level()
            return b"".join(bytes([alphabet[char]]) if char in alphabet else char.encode() for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._wordpiece:
            return (piece[2:] if piece.startswith("##") else f" {piece}").encode()
        return piece.replace("▁", " ").encode()


def spelling(data: bytes, prefix: str = "") -> str:
    r"""Decode a token; invalid UTF-8 is written as `\xf0\x9f` after `prefix`, like OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)
