"""Responses and conversations on a whole server: before and after a restart, and when their frontend is killed."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from tests.e2e.clients.test_responses import (
    LONG,
    go_on_after_a_restart,
    kill_frontend,
    respond_despite_a_kill,
    until_ended,
)
from tests.server_process import Server

Start = Callable[..., Server]


def texts(client: OpenAI, conversation: str) -> list[str]:
    """Return the texts of a conversation, oldest first."""
    items = client.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in items]  # type: ignore[union-attr,index]


def test_what_is_stored_outlives_its_frontend_and_its_server(start: Start, tmp_path: Path) -> None:
    """A background response, a conversation, and a background response of that conversation."""
    options = ["--kv-cache-bytes", "64MiB", "--frontend-workers", "2"]
    env = {"XDG_STATE_HOME": str(tmp_path)}
    server = start("embedded", *options, env=env).wait()
    with server.client() as client:
        model = client.models.list().data[0].id
        begun = client.conversations.create(items=[{"role": "system", "content": "Be brief."}], metadata={"of": "sea"})
        first = client.responses.create(
            model=model, input="Tell me of the sea.", conversation=begun.id, max_output_tokens=8
        )
        assert first.conversation is not None
        assert first.conversation.id == begun.id
        assert texts(client, begun.id) == ["Be brief.", "Tell me of the sea.", first.output_text]
    alone = respond_despite_a_kill(server)
    assert server.stop() == 0

    server = start("embedded", *options, env=env).wait()
    with server.client() as client:
        go_on_after_a_restart(client, alone)
        assert client.conversations.retrieve(begun.id) == begun
        asked: dict[str, Any] = {"model": model, "input": "And then?", "conversation": begun.id, **LONG}
        counted = client.responses.input_tokens.count(
            model=model, input=[{"role": "user", "content": "And then?"}], conversation=begun.id
        )
        with client.responses.create(**asked, background=True, stream=True) as stream:
            created = next(stream)
            assert created.type == "response.created"
            queued = created.response.id
            assert len(list(itertools.islice(stream, 15))) == 15, "it speaks"
            owner = re.match(r"resp_(.+)-.{24}$", queued)
            assert owner is not None
            kill_frontend(server, owner[1])
    with server.client() as client:
        made = until_ended(client, queued)
        assert made.status == "incomplete"
        assert made.usage is not None
        assert made.usage.input_tokens == counted.input_tokens
        said = ["Be brief.", "Tell me of the sea.", first.output_text, "And then?", made.output_text]
        assert texts(client, begun.id) == said, "once, whoever made it"
        client.conversations.delete(begun.id)
        with pytest.raises(NotFoundError):
            client.responses.create(model=model, input="More?", conversation=begun.id)
    assert server.stop() == 0
