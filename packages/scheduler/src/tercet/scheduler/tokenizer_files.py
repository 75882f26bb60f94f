"""The tokenizer of a model, from all files that describe it.

tokenizer.json often lacks tokens that tokenizer_config.json or special_tokens_map.json declare, or does not mark
special ones. Schedulers complete the file as transformers 5 does (`TokenizersBackend.__init__` and `_post_init`), so
that frontends, detokenizers and grammars read one file and agree with it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from tercet.protocol.json_files import error_line, read_object

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class _Added(msgspec.Struct, frozen=True):
    """An added token of a tokenizer.json."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    added_tokens: list[_Added] = []


def complete_tokenizer(files: Mapping[str, bytes]) -> bytes:
    """Return the tokenizer.json with the tokens that other files declare; as it is if none is missing.

    Raises ValueError for declarations that are not tokens.
    """
    text = files["tokenizer.json"]
    try:
        present = {token.content: token for token in _added_tokens(text)}
    except msgspec.MsgspecError:
        return text  # its readers report the error
    missing = missing_tokens(present, _settings(files))
    if not missing:
        return text
    try:
        tokenizer = Tokenizer.from_str(text.decode())
        tokenizer.add_tokens(missing)
    except (MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and a Rust panic is a BaseException
        raise ValueError(f"tokenizer.json does not load: {error_line(error)}") from error
    return tokenizer.to_str().encode()


def tokenizer_end_ids(files: Mapping[str, bytes]) -> list[int]:
    """Return the id of the tokenizer's own end token, after `complete_tokenizer`; empty if it names none.

    A model may end its answers with it although neither config.json nor generation_config.json has its id.
    """
    content = token_text(_settings(files).get("eos_token"))
    try:
        return [token.id for token in _added_tokens(files.get("tokenizer.json", b"{}")) if token.content == content]
    except msgspec.MsgspecError:
        return []


def added_token_texts(files: Mapping[str, bytes]) -> dict[int, str]:
    """Return the texts of a completed tokenizer.json's added tokens, by id. Raises ValueError."""
    return {token.id: token.content for token in _added_tokens(files["tokenizer.json"])}


def _added_tokens(text: bytes) -> list[_Added]:
    return msgspec.json.decode(text, type=_TokenizerFile).added_tokens


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return tokenizer_config.json, which special_tokens_map.json completes if the former has no table of tokens."""
    config = read_object(files, "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return {**config, **read_object(files, "special_tokens_map.json")}


def missing_tokens(present: Mapping[str, _Added | AddedToken], config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the tokens that `config` declares and a tokenizer lacks or has with other flags, ordered by id.

    A named token is special if the table has it; without a table, that of the tokenizer counts. Any other named or
    further token is added only if the tokenizer lacks it.
    """
    declared = _declared(config)
    table = declared or {content: _added_token(token) for content, token in present.items()}
    further: dict[str, AddedToken] = {}
    for token in _special(config):
        if token.content in table and token.content in _named(config):
            table[token.content] = _added_token(table[token.content], special=True)
        elif token.content not in present and token.content not in declared:
            further.setdefault(token.content, token)
    return [token for token in [*table.values(), *further.values()] if not _is(present.get(token.content), token)]


def _declared(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return the tokens of `added_tokens_decoder`, in the order of their ids."""
    table = config.get("added_tokens_decoder", {})
    if not isinstance(table, dict) or not all(key.isdecimal() for key in table):
        raise ValueError("tokenizer_config.json: added_tokens_decoder: must be an object of tokens by id")
    tokens = [_token(table[key], f"added_tokens_decoder.{key}") for key in sorted(table, key=int)]
    return {token.content: token for token in tokens}


def _named(config: Mapping[str, Any]) -> set[str | None]:
    return {token_text(config.get(name)) for name in _NAMED}


def _special(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the named special tokens, and those of the lists of further ones."""
    for name in _NAMED:
        if config.get(name) is not None:
            yield _token(config[name], name, special=True)
    for name in _LISTS:
        further = config.get(name) or []
        if not isinstance(further, list | dict):
            raise ValueError(f"tokenizer_config.json: {name}: must be a list or an object of tokens")
        for place, each in enumerate(further.values() if isinstance(further, dict) else further):
            yield _token(each, f"{name}[{place}]", special=True)


def _added_token(token: "_Added | AddedToken", *, special: bool = False) -> AddedToken:
    flags = {flag: getattr(token, flag) for flag in _FLAGS}
    return AddedToken(token.content, **{**flags, "special": special or token.special})


def _token(value: object, where: str, *, special: bool = False) -> AddedToken:
    """Return a declared token, a text or an object with `content`."""
    content = token_text(value)
    if content is None:
        raise ValueError(f"tokenizer_config.json: {where}: must be a token's text, or an object with its content")
    flags = {name: value[name] for name in _FLAGS if name in value} if isinstance(value, dict) else {}
    if special:
        flags["special"] = True
        flags.setdefault("normalized", False)
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"tokenizer_config.json: {where}: its flags must be true or false")
    return AddedToken(content, **flags)


def token_text(value: object) -> str | None:
    """Return the text of a declared token, which may be an object with flags; None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _is(found: _Added | AddedToken | None, token: AddedToken) -> bool:
    return found is not None and all(getattr(found, flag) == getattr(token, flag) for flag in _FLAGS)
