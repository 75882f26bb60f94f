"""Arguments written one key at a time between tags, joined into one JSON object while they stream."""

import json
from collections.abc import Mapping

from tercet.frontend.parsers.port import Schema
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.typed_value import ValueWriter, json_types


class ArgumentsWriter:
    """Writer of the open call's arguments. A key without a known schema has the types `otherwise`."""

    def __init__(self, sink: Sink, schema: Schema, otherwise: frozenset[str]) -> None:
        self._sink = sink
        self._schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, object] = properties if isinstance(properties, dict) else {}
        self._known: dict[str, frozenset[str]] = {}
        self._otherwise = otherwise
        self._empty = True

    def write_key(self, key: str) -> None:
        """Write `key`, before its value."""
        self._sink.arguments(("{" if self._empty else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._empty = False

    def types(self, key: str) -> frozenset[str]:
        """Return the JSON types that the schema allows for the value of `key`."""
        return json_types(self._properties.get(key), self._schema, self._known) or self._otherwise

    def read_value(self, reader: Reader, key: str, ends: Markers, types: frozenset[str] | None = None) -> Steps[str]:
        """Write `key` and the value at the current position, up to an end marker, and return the marker.

        `types` are those that the notation itself gives; otherwise the schema has them.
        """
        self.write_key(key)
        writer = ValueWriter(self._sink.arguments, self.types(key) if types is None else types)
        marker = yield from reader.until(ends, writer.add)
        if not marker:
            writer.flush_partial()
            raise MalformedError
        writer.close()
        return marker

    def close(self) -> None:
        """End the arguments and the call."""
        self._sink.arguments("{}" if self._empty else "}")
        self._sink.end()
