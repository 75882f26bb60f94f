"""HTTP client for the benchmark: one streamed completion over plain sockets, with the time of each piece."""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

_READ = 1 << 16
_REQUEST_TIMEOUT = 600.0
"""Seconds within which an answer must be complete."""


class BenchError(Exception):
    """Failure of a request, in one line."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of one request: sent, each piece of text, end; in seconds of one clock."""

    sent: float
    pieces: list[float]
    ended: float
    output_tokens: int
    input_tokens: int | None
    """The server's count, if it reports one."""

    @property
    def first_token(self) -> float:
        """Seconds to the first piece of text."""
        return (self.pieces[0] if self.pieces else self.ended) - self.sent

    @property
    def per_token(self) -> float | None:
        """Seconds per output token after the first; None if there was only one."""
        if self.output_tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Server and model to send requests to."""

    url: str
    model: str
    api_key: str | None = None
    ignore_eos: bool = True
    """Ask for exactly the given number of tokens, with an extension that most servers have."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.url} is not an http or https address")

    def request(self, prompt: str, output_tokens: int) -> bytes:
        """Return the bytes of a POST to /v1/completions."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        content, parts = json.dumps(body).encode(), urlsplit(self.url)
        path = parts.path.rstrip("/") or "/v1"
        lines = [f"POST {path}/completions HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


async def complete(target: Target, prompt: str, output_tokens: int) -> Timeline:
    """Send one completion request and wait for its end. Raises BenchError."""
    parts = urlsplit(target.url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if secure else 80), ssl=secure
            )
            try:
                writer.write(target.request(prompt, output_tokens))
                answer = _Answer()
                while not answer.complete:
                    data = await reader.read(_READ)
                    if not data:
                        raise BenchError("the server hung up before the end")
                    answer.take(data, time.perf_counter())
            finally:
                writer.close()
    except TimeoutError:
        raise BenchError(f"no end within {_REQUEST_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise BenchError(f"no server at {target.url}: {error.strerror or error}") from None
    return answer.timeline(sent, time.perf_counter())


@dataclass
class _Answer:
    """Incremental parser of an HTTP response. The `on_` methods are httptools' callbacks."""

    complete: bool = False
    _body: bytearray = field(default_factory=bytearray)
    _pieces: list[float] = field(default_factory=list)
    _usage: dict[str, Any] = field(default_factory=dict)
    _now: float = 0.0

    def __post_init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)

    def take(self, data: bytes, now: float) -> None:
        self._now = now
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BenchError(f"that is not HTTP: {error}") from error
        if self._parser.get_status_code() != 200:
            if self.complete:
                raise BenchError(f"HTTP {self._parser.get_status_code()}: {self._body[:300].decode(errors='replace')}")
            return
        while (end := self._body.find(b"\n")) >= 0:
            line = bytes(self._body[:end]).strip()
            del self._body[: end + 1]
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._event(event)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.complete = True

    def _event(self, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            raise BenchError(f"an event that is not JSON: {data[:100]!r}") from None
        if event.get("error"):
            raise BenchError(f"the server ended it: {event['error']}")
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            if choice.get("text") or not choice.get("finish_reason"):
                self._pieces.append(self._now)

    def timeline(self, sent: float, ended: float) -> Timeline:
        tokens = self._usage.get("completion_tokens")
        return Timeline(
            sent=sent,
            pieces=self._pieces,
            ended=ended,
            output_tokens=len(self._pieces) if tokens is None else tokens,
            input_tokens=self._usage.get("prompt_tokens"),
        )
