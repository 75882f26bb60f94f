"""Chat completion assembled from the chunks of its stream."""

from collections.abc import Mapping
from typing import Any

import orjson

_Pieces = dict[str, Any]
"""Object whose texts are lists of pieces, because appending to a long text again and again would copy it."""


class ChunkMerger:
    """Collector of the events of one streamed completion."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, events: bytes) -> None:
        """Add events that each hold a chunk."""
        for event in events.split(b"\n\n"):
            if event:
                self._add_chunk(orjson.loads(event.removeprefix(b"data: ")))

    def completion(self, usage: Mapping[str, Any]) -> bytes:
        """Return the `chat.completion` object that equals the stream."""
        choices = [self._choices[index].to_dict(index) for index in sorted(self._choices)]
        return orjson.dumps({**self._head, "object": "chat.completion", "choices": choices, "usage": usage})

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.pop("choices"):
            self._choices.setdefault(choice["index"], _Choice()).add(choice)
        chunk.pop("usage", None)
        self._head |= chunk


class _Choice:
    """A choice. Its log-probabilities are kept as JSON, which takes less memory than objects."""

    def __init__(self) -> None:
        self._message: _Pieces = {}
        self._logprobs: list[bytes] | None = None
        self._more: dict[str, Any] = {}

    def add(self, choice: dict[str, Any]) -> None:
        """Add the part of a choice in a chunk."""
        _merge(self._message, choice.pop("delta"))
        if (scored := choice.pop("logprobs")) is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [orjson.dumps(scored["content"])[1:-1]] if scored["content"] else []
        for name, value in choice.items():
            if isinstance(value, list):
                self._more.setdefault(name, []).extend(value)
            elif value is not None or name not in self._more:
                self._more[name] = value

    def to_dict(self, index: int) -> dict[str, Any]:
        """Return the choice of the whole completion."""
        scored = None
        if self._logprobs is not None:
            scored = orjson.Fragment(b'{"content":[' + b",".join(self._logprobs) + b'],"refusal":null}')
        message = _joined(self._message)
        message["tool_calls"] = [_without_index(call) for call in message.pop("tool_calls", {}).values()]
        if not message["tool_calls"]:
            del message["tool_calls"]
        return {**self._more, "index": index, "message": message, "logprobs": scored}


def _merge(pieces: _Pieces, delta: Mapping[str, Any]) -> None:
    """Add a delta: texts are continued, tool calls found by their index."""
    for name, value in delta.items():
        match value:
            case str() if isinstance(pieces.get(name), list):
                pieces[name].append(value)
            case str():
                pieces[name] = [value]
            case dict():
                _merge(pieces.setdefault(name, {}), value)
            case list():
                calls = pieces.setdefault(name, {})
                for call in value:
                    _merge(calls.setdefault(call["index"], {}), call)
            case _:
                pieces.setdefault(name, value)


def _joined(pieces: _Pieces) -> dict[str, Any]:
    """Return the object with its texts in one piece."""
    return {name: _value(value) for name, value in pieces.items()}


def _value(value: Any) -> Any:
    match value:
        case list():
            return "".join(value)
        case dict():
            return _joined(value)
    return value


def _without_index(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
