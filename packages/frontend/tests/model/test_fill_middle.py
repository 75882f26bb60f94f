"""Fill-in-the-middle prompts use the tokens of the model's training."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from tercet.frontend.model.fill_middle import fill_format
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits, unpack_ints

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "prompt": "the quick", "suffix": " jumps"}
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]


@pytest.fixture
def coder(tokenizer: Tokenizer, files: dict[str, bytes]) -> tuple[Tokenizer, dict[str, bytes]]:
    """Create a tokenizer with Qwen2.5-Coder's tokens, and its files."""
    taught: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
    taught.add_special_tokens([AddedToken(text, normalized=False) for text in QWEN])
    return taught, {**files, "tokenizer.json": taught.to_str().encode()}


async def test_prompt_and_suffix_stand_around_the_gap(
    engine_of: EngineOf, http_of: HttpOf, coder: tuple[Tokenizer, dict[str, bytes]], limits: ModelLimits
) -> None:
    tokenizer, files = coder
    wider = msgspec.structs.replace(limits, vocab_size=tokenizer.get_vocab_size())
    async with serving(engine_of(files=files, limits=wider)) as served:
        answer = await http_of(served).post("/v1/completions", json={**BODY, "prompt": ["the quick", "fox"]})
        first, second = served.engine.requests()
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hello world!"] * 2
    before, after, fill, end = map(tokenizer.token_to_id, QWEN)
    quick, fox, jumps = (tokenizer.encode(text).ids for text in ("the quick", "fox", " jumps"))
    assert list(unpack_ints(first.input_ids)) == [before, *quick, after, *jumps, fill]
    assert list(unpack_ints(second.input_ids)) == [before, *fox, after, *jumps, fill]
    assert end in first.sampling.stop_token_ids


async def test_a_model_that_fills_no_gaps_says_so(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/completions", json=BODY)
        assert served.engine.requests() == []
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "suffix")


@pytest.mark.parametrize("asked", [{"prompt": [5, 6]}, {"prompt": [[5], [6]]}, {"echo": True}])
async def test_what_cannot_be_said_with_a_gap_is_refused(
    engine_of: EngineOf, http_of: HttpOf, coder: tuple[Tokenizer, dict[str, bytes]], asked: dict[str, Any]
) -> None:
    async with serving(engine_of(files=coder[1])) as served:
        answer = await http_of(served).post("/v1/completions", json={**BODY, **asked})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize(
    ("added", "prompt"),
    [
        (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>"),
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>A<fim_suffix>B<fim_middle>"),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>"),
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>A▁<SUF>B▁<MID>"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]B[PREFIX]A"),
    ],
)
def test_each_family_has_its_own_order(added: list[str], prompt: str) -> None:
    found = fill_format(added)
    assert found is not None
    assert found.text("A", "B") == prompt


def test_a_family_needs_all_its_tokens() -> None:
    assert fill_format(["<|fim_prefix|>", "<|fim_suffix|>"]) is None
