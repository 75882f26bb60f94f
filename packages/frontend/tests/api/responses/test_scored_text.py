"""Log-probabilities of text, for any arrival of its tokens and any surroundings."""

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from tercet.frontend.api.responses.scored_text import ScoredText
from tercet.frontend.chat.output_parser import OutputParser
from tercet.frontend.manager.req_state import Update
from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.model.tokenizer import PromptTokenizer
from tercet.frontend.parsers.events import ToolCallEnd
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.parsers.registry import ParserNames, make_parser
from tercet.protocol.messages.values import FinishReason, FinishType, Logprobs, pack_floats, pack_ints

ENDED = FinishReason(FinishType.STOP)


@pytest.fixture(scope="module")
def names(files: dict[str, bytes]) -> TokenBytes:
    return TokenBytes(PromptTokenizer(files["tokenizer.json"].decode()))


def update(ids: Sequence[int], text: str, finish: FinishReason | None = None) -> Update:
    logprobs = Logprobs(pack_floats(-1.0 for _ in ids), 0, pack_ints([]), pack_floats([]))
    return Update(0, text, ids, [logprobs], finish)


def logprobs_for(scored: ScoredText, updates: Sequence[Update]) -> str:
    """Return the text of the tokens whose log-probabilities are shown."""
    reader = OutputParser(make_parser(ParserNames("qwen3", "hermes"), (ToolSpec("weather", {}),), ""))
    spelled = b""
    for each in updates:
        for piece in scored.split(each):
            spelled += b"".join(bytes(score["bytes"]) for score in scored.logprobs_for(reader.read(piece), 0))
    return spelled.decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Hello, été 🌍!", "Hello, été 🌍!"),
        ("<think>hm</think>Hello", "Hello"),
        ('Look: <tool_call>{"name": "weather", "arguments": {}}</tool_call>', "Look: "),
        ('<tool_call>{"name": "weather", "arguments": {}}\n</tool_call> Well', " Well"),
        ("<tool_<tool_call>none</tool_call>", "<tool_<tool_call>none</tool_call>"),
    ],
)
def test_those_of_the_text_are_told_whether_tokens_come_alone_or_together(
    text: str, shown: str, tokenizer: Tokenizer, names: TokenBytes
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert logprobs_for(ScoredText(names), [update(ids, text, ENDED)]) == shown
    heads = (ids[:number] for number in range(len(ids) + 1))
    said = [tokenizer.decode(head, skip_special_tokens=False).rstrip("\ufffd") for head in heads]
    alone = [update([each], said[place + 1][len(said[place]) :]) for place, each in enumerate(ids)]
    assert logprobs_for(ScoredText(names), [*alone, update([], "", ENDED)]) == shown


def test_text_that_is_held_back_comes_with_its_own(tokenizer: Tokenizer, names: TokenBytes) -> None:
    first, *rest = tokenizer.encode("hello world, you", add_special_tokens=False).ids
    scored = ScoredText(names)
    assert logprobs_for(scored, [update([first], ""), update(rest, "hello world, you", ENDED)]) == "hello world, you"
    assert scored.rest(FinishReason(FinishType.LENGTH)) == []


def test_a_hidden_token_goes_with_the_text_around_it(tokenizer: Tokenizer, names: TokenBytes) -> None:
    [hidden] = tokenizer.encode("<s>").ids
    first, *rest = tokenizer.encode("hello world", add_special_tokens=False).ids
    assert (
        logprobs_for(ScoredText(names, {hidden}), [update([first, hidden, *rest], "hello world", ENDED)])
        == "hello<s> world"
    )


def test_what_stands_in_a_call_is_never_waited_for(names: TokenBytes) -> None:
    scored = ScoredText(names)
    for piece in scored.split(update([10], "x")):
        assert scored.logprobs_for([ToolCallEnd(0)], 0) == []
        assert piece.text == "x"
    assert scored.rest(FinishReason(FinishType.LENGTH)) == []
