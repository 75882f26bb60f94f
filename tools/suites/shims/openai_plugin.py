"""pytest plugin for the tests of OpenAI's clients: ids that the tests make up become ids of objects that exist."""

import os
from collections.abc import Callable
from typing import Any

import httpx2
from openai._base_client import BaseClient

_API = httpx2.Client(base_url=f"{os.environ['TERCET_URL']}/v1", headers={"authorization": "Bearer My API Key"})
_MODEL = os.environ["TERCET_MODEL"]


def _made(path: str, **body: Any) -> str:
    answer = _API.post(path, json=body)
    answer.raise_for_status()
    name: str = answer.json()["id"]
    return name


def chat() -> str:
    """Create a stored chat completion, and return its id."""
    messages = [{"role": "user", "content": "What is a scheduler?"}]
    return _made("/chat/completions", model=_MODEL, messages=messages, store=True, max_completion_tokens=4)


def response() -> str:
    """Create a response that can be cancelled, and return its id."""
    return _made("/responses", model=_MODEL, input="What is a scheduler?", background=True, max_output_tokens=16)


def conversation() -> str:
    """Create a conversation with the item that the tests ask for, and return its id."""
    item = {"type": "message", "id": "msg_abc", "role": "user", "content": "What is a scheduler?"}
    return _made("/conversations", items=[item])


_OBJECTS: dict[str, Callable[[], str]] = {
    "completion_id": chat,
    "response_id": response,
    "resp_123": response,
    "resp_677efb5139a88190b512bc3fef8e535d": response,
    "conv_123": conversation,
}
_prepare_url = BaseClient._prepare_url


def prepare_url(client: BaseClient[Any, Any], url: str) -> Any:
    """Return the URL with ids of new objects."""
    steps = [_OBJECTS[step]() if step in _OBJECTS else step for step in url.split("/")]
    return _prepare_url(client, "/".join(steps))


BaseClient._prepare_url = prepare_url  # type: ignore[method-assign,assignment]
