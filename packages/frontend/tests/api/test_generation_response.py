"""Long responses are written in turns of the loop, and equal those written at once."""

import json
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tercet.frontend.api.generation_response import STEP_TOKENS
from tercet.frontend.api.openai import logprobs
from tercet.frontend.http.loop_turns import LoopTurns, Steps
from tercet.frontend.manager.req_state import Update
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import FinishReason, FinishType, Logprobs, pack_floats

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODIES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "the quick brown fox", "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": "the quick brown fox", "prompt_logprobs": 2}),
    ("/generate", {"text": "the quick brown fox", "return_logprob": True, "logprob_start_len": 0, "n": 3}),
]


@pytest.mark.parametrize("count", [5, 64, 65, 200])
def test_an_update_is_cut_into_pieces_that_make_it_up(count: int) -> None:
    parts = [Logprobs(pack_floats([-float(each), -0.5])) for each in range(count // 2)]
    ids, finish = array("i", range(len(parts) * 2)), FinishReason(FinishType.STOP)
    pieces = Update(1, "text", ids, parts, finish).cut(64)
    assert [token for piece in pieces for token in piece.token_ids] == list(ids)
    assert [part for piece in pieces for part in piece.logprobs] == parts
    assert max(len(piece.token_ids) for piece in pieces) <= 65
    assert [(piece.text, piece.finish) for piece in pieces if piece.text or piece.finish] == [("text", finish)]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=["chat", "echo", "completions", "generate"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_log_probabilities_are_written_in_steps(
    path: str, body: dict[str, Any], stream: bool, engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step writes the log-probabilities of a few tokens."""
    monkeypatch.setattr(logprobs, "STEP_TOKENS", 1)
    steps = 0
    run = LoopTurns.run

    async def counted(self: LoopTurns, owner: str, work: Steps[bytes]) -> bytes:
        def watched() -> Iterator[None]:
            nonlocal steps
            while True:
                try:
                    next(work)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                steps += 1
                yield

        return await run(self, owner, watched())  # type: ignore[arg-type]

    monkeypatch.setattr(LoopTurns, "run", counted)
    sent = {"model": "tiny", "stream": stream and "prompt_logprobs" not in body, **body}
    if path == "/generate":
        sent["sampling_params"] = {"n": sent.pop("n")}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(path, json=sent)
    assert answer.status_code == 200, answer.text
    assert "logprob" in answer.text
    assert steps >= 4
    if not sent["stream"]:
        json.loads(answer.text)
    assert STEP_TOKENS <= 64
