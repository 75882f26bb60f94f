"""Whatever a frontend sends, the part goes on: what is out of bounds is refused by name, and nothing is left behind."""

from math import inf, nan
from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.messages import AbortReq, TokenizedGenerateReqInput
from tercet.protocol.messages.values import Grammar, GrammarKind, LogprobParams, Resume, ThinkingBudget, pack_ints
from tercet.scheduler.testing import Driver, request, small_capacity

PROMPT = [7, 3, 9]


def with_fields(**fields: Any) -> TokenizedGenerateReqInput:
    return msgspec.structs.replace(request("a", PROMPT), **fields)


def refusal(wanted: TokenizedGenerateReqInput) -> tuple[str, str]:
    """(code, message) of a core's answer to one bad request; the core must serve a good one afterwards."""
    run = Driver(small_capacity())
    run.send(wanted)
    run.run()
    run.send(AbortReq(rid=wanted.rid))
    run.assert_empty()
    run.send(request("good", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.run()
    assert len(run.output["good", 0]) == 2
    return run.rejected[wanted.rid].code, run.rejected[wanted.rid].message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 2**63),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2**64),
        ("min_new_tokens", -1),
        ("min_new_tokens", 2**63),
        ("top_k", -1),
        ("top_k", 2**63),
        ("seed", -1),
        ("seed", 2**64),
        ("temperature", nan),
        ("temperature", -0.5),
        ("temperature", inf),
        ("top_p", nan),
        ("top_p", 1.5),
        ("min_p", -1.0),
        ("presence_penalty", inf),
        ("frequency_penalty", nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("stop_token_ids", [50]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1025),
        ("grammar", Grammar(GrammarKind.REGEX, "a" * (2**20 + 1))),
        ("grammar", Grammar(GrammarKind.REGEX, "a", ThinkingBudget(-1, "</think>"))),
        ("grammar", Grammar(GrammarKind.REGEX, "a", ThinkingBudget(1, ""))),
        ("grammar", Grammar(GrammarKind.REGEX, "a", ThinkingBudget(1, "x" * 257))),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {2**63: 1.0}),
        ("logit_bias", {1: nan}),
        ("logit_bias", {1: inf}),
        ("logit_bias", {1: 1e39}),
    ],
)
def test_sampling_out_of_bounds_is_refused(name: str, value: Any) -> None:
    code, message = refusal(request("a", PROMPT, **{name: value}))
    assert code == "invalid_request"
    assert name in message or "outside the vocabulary" in message or "stop ids" in message or "bias" in message


def test_more_biases_than_there_may_be_are_refused() -> None:
    code, message = refusal(request("a", PROMPT, logit_bias=dict.fromkeys(range(1025), 1.0)))
    assert (code, message) == ("invalid_request", "more than 1024 stop ids or 1024 biases")


@pytest.mark.parametrize(
    "fields",
    [
        {"attempt": -1},
        {"attempt": 2**31},
        {"priority": 2**31},
        {"priority": -(2**31) - 1},
        {"rid": "x" * 1_000_000},
        {"cache_salt": "x" * 1_000_000},
        {"tenant": "x" * 1_000_000},
        {"detokenizer": "x" * 1_000_000},
        {"input_ids": b"\1\0\0"},
        {"prediction": b"\1\0\0"},
        {"prediction": pack_ints([50])},
        {"prediction": pack_ints([1, -1])},
        {"prediction": bytes(4 * 131_073)},
        {"resume": [Resume(0, b"\1")]},
        {"resume": [Resume(1)]},
        {"resume": [Resume(-1)]},
        {"resume": [Resume(2**31)]},
        {"resume": [Resume(0), Resume(0)]},
        {"logprobs": LogprobParams(top=-1)},
        {"logprobs": LogprobParams(top=51)},
    ],
)
def test_other_fields_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    assert refusal(with_fields(**fields))[0] == "invalid_request"


def test_a_resume_longer_than_the_output_allowed_is_refused() -> None:
    wanted = request("a", PROMPT, max_new_tokens=2, resume=[Resume(0, pack_ints([1, 2, 3]))])
    assert refusal(wanted)[0] == "context_length_exceeded"


def test_what_is_just_within_bounds_runs() -> None:
    run = Driver(small_capacity(slots=4, pages=60))
    run.send(
        request(
            "a",
            PROMPT,
            n=128,
            max_new_tokens=1,
            seed=2**64 - 1,
            top_k=2**31 - 1,
            stop_token_ids=[49],
            logit_bias={49: -100.0},
            priority=-(2**31),
            logprobs=LogprobParams(top=50),
        )
    )
    run.run()
    assert len(run.finishes) == 128
    run.assert_empty()


def test_end_ids_outside_the_vocabulary_are_never_suppressed() -> None:
    """A model's config may name end ids its vocabulary does not have; indexing logits by them would be fatal."""
    capacity = msgspec.structs.replace(small_capacity(), eos_token_ids=[0, 50])
    run = Driver(capacity)
    run.send(request("a", PROMPT, min_new_tokens=2, max_new_tokens=2))
    run.run()
    assert run.plans[0].introduce[0].suppressed_ids == [0]
