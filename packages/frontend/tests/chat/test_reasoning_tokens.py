"""Exact counts of reasoning tokens, independent of how they arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.frontend.chat.reasoning_tokens import ReasoningTokens
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.parsers.registry import reasoning_format


class FakeTokenBytes(TokenBytes):
    """Tokens whose id is their index."""

    def __init__(self, words: list[bytes]) -> None:
        self._words = words

    def __getitem__(self, token_id: int) -> bytes:
        return self._words[token_id]


def count(parser: str, words: list[str], *, opened: bool = False, step: int = 1) -> int:
    names = FakeTokenBytes([word.encode() for word in words])
    counter = ReasoningTokens(names, reasoning_format(parser).framing, opened=opened)
    ids = range(len(words))
    for at in range(0, len(words), step):
        counter.read(ids[at : at + step])
    return counter.count


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        (["<think>", "a", " b", "</think>", "\n\n", "so"], 4),
        (["\n", "<think>", "a", "</think>", "so"], 3),
        (["<th", "ink", ">", "a", "</", "think", ">", "so"], 7),
        (["<think>", "a", "b"], 3),
        (["so", "<think>", "a", "</think>"], 0),
        (["s", "o"], 0),
        (["<think>", "</think>", "<think>", "x"], 2),
        (["<think>", "a</think>so"], 2),
        ([], 0),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_tags_at_the_beginning(words: list[str], tokens: int, step: int) -> None:
    assert count("qwen3", words, step=step) == tokens


def test_a_prompt_that_opened_it() -> None:
    assert count("qwen3", ["a", "b", "</think>", "so"], opened=True) == 3
    assert count("qwen3", ["a", "b"], opened=True) == 2


def test_a_call_ends_reasoning_that_was_not_closed() -> None:
    words = ["<think>", "a", "<|tool_calls_section_begin|>", "x", "y"]
    assert count("kimi_k2", words) == 3


def test_harmony_reasons_more_than_once() -> None:
    analysis = ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>"]
    final = ["<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "so"]
    assert count("gpt_oss", analysis + final) == 6
    assert count("gpt_oss", [*analysis, "<|start|>", "assistant", *analysis, *final]) == 12


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "</", "a", "\n", " "]), max_size=30), st.data()
)
def test_any_cut_gives_the_same_count(words: list[str], data: st.DataObject) -> None:
    step = data.draw(st.integers(1, 10))
    opened = data.draw(st.booleans())
    assert count("qwen3", words, opened=opened, step=step) == count("qwen3", words, opened=opened)


def test_memory_does_not_grow_with_the_answer() -> None:
    names = FakeTokenBytes([b"word "])
    counter = ReasoningTokens(names, reasoning_format("gpt_oss").framing, opened=False)
    counter.read([0] * 10_000)
    assert len(counter._tail) < 100
