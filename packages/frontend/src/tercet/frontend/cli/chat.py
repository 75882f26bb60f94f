"""`tercet chat`: a conversation with a running server, from the terminal."""

import contextlib
import http.client
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO
from urllib.parse import urlsplit

_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"
_READ_TIMEOUT = 300.0
"""Seconds without a byte after which a server counts as gone."""


class ChatError(Exception):
    """Failure, in one line for the user."""


class Piece(NamedTuple):
    """A piece of the model's answer or of its reasoning."""

    text: str
    is_reasoning: bool = False


class Server:
    """An OpenAI-compatible server at `url`, with or without a path (/v1 is added when missing)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ChatError(f"--url {url}: {error}") from None
        if parts.scheme not in {"http", "https"} or not self._host:
            raise ChatError(f"--url {url} is not an http or https address")
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/") or "/v1"
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        """Return the first model that the server lists. Raises ChatError."""
        with self._ask("GET", "/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{self._url} lists no model") from None

    def stream(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Yield a chat completion as it streams. Closing the iterator closes the connection. Raises ChatError."""
        with self._ask("POST", "/chat/completions", json.dumps({**body, "stream": True})) as response:
            for event in _events(response):
                if error := event.get("error"):
                    raise ChatError(_message(error))
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if reasoning := delta.get("reasoning_content"):
                        yield Piece(reasoning, is_reasoning=True)
                    if text := delta.get("content"):
                        yield Piece(text)

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_READ_TIMEOUT)
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(f"the server answers {response.status}: {_refusal(response)}")
            yield response
        except OSError as error:
            raise ChatError(f"no server at {self._url}: {error.strerror or error}") from None
        except (http.client.HTTPException, ValueError) as error:
            raise ChatError(f"{self._url} does not answer like a server: {error or type(error).__name__}") from None
        finally:
            connection.close()


class Conversation:
    """Messages so far, and the parameters of the next request."""

    def __init__(
        self,
        model: str,
        *,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.model = model
        options = {"temperature": temperature, "max_completion_tokens": max_tokens}
        self._options = {name: value for name, value in options.items() if value is not None}
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)

    def ask(self, server: Server, text: str) -> Iterator[Piece]:
        """Yield the reply as it streams, without keeping its reasoning.

        The part that was read is remembered, even if reading stops early; nothing is remembered after an error.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        reply: list[str] = []
        stream = server.stream({"model": self.model, "messages": turn, **self._options})
        try:
            for piece in stream:
                if not piece.is_reasoning:
                    reply.append(piece.text)
                yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self.messages = [*turn, {"role": "assistant", "content": "".join(reply)}]
            raise
        finally:
            stream.close()  # type: ignore[attr-defined]
        self.messages = [*turn, {"role": "assistant", "content": "".join(reply)}]


def converse(
    server: Server,
    conversation: Conversation,
    read: Callable[[str], str] = input,
    write: Callable[[str], object] = sys.stdout.write,
    *,
    terminal: bool = False,
    interactive: bool = True,
) -> int:
    """Read, ask and print until /exit or the end of the input. Return the exit code.

    Reasoning is shown only on a `terminal`, dimmed. An error or Ctrl-C ends a chat that is not `interactive`, since no
    user can retry there. Raises ChatError, KeyboardInterrupt.
    """
    if read is input:
        _replace_unencodable(sys.stdin, sys.stdout)
        with contextlib.suppress(ImportError):
            pass  # line editing and history
    write(f"{conversation.model}. /reset starts over, /exit leaves, Ctrl-C stops a reply.\n")
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            write("\n")
            return 0
        except KeyboardInterrupt:
            if not interactive:
                raise
            write("\n")
            continue
        if text == "/exit":
            return 0
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            write("there are /reset and /exit\n")
        elif text:
            try:
                _reply(conversation.ask(server, text), write, terminal=terminal)
            except (ChatError, KeyboardInterrupt) as error:
                if not interactive:
                    raise
                write("(stopped)\n" if isinstance(error, KeyboardInterrupt) else f"error: {error}\n")


def _reply(pieces: Iterator[Piece], write: Callable[[str], object], *, terminal: bool) -> None:
    """Print a reply as it streams, and end its line. Raises ChatError, KeyboardInterrupt."""
    in_reasoning, after = False, ""
    try:
        for piece in pieces:
            if piece.is_reasoning is not in_reasoning and terminal:
                in_reasoning, after = piece.is_reasoning, _PLAIN if piece.is_reasoning else ""
                write(_DIM if in_reasoning else f"{_PLAIN}\n\n")
            if terminal or not piece.is_reasoning:
                write(_printable(piece.text))
                sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        raise
    finally:
        write(f"{after}\n")


def _replace_unencodable(*streams: TextIO) -> None:
    """Replace characters that a stream cannot encode, and bytes that it cannot decode, instead of failing."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _printable(text: str) -> str:
    """Return text without control characters, so that a model cannot control the terminal."""
    return "".join(char for char in text if char in "\n\t" or (ord(char) >= 32 and not 127 <= ord(char) < 160))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event


def _refusal(response: http.client.HTTPResponse) -> str:
    try:
        return _message(json.loads(response.read(65536))["error"])
    except (ValueError, LookupError, TypeError):
        return response.reason


def _message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
