"""T5Gemma, alone and beside others, against transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from packages.scheduler.tests.models.encoder_decoder.checkpoint import BEGIN, write_t5gemma
from packages.scheduler.tests.models.encoder_decoder.runs import ANSWER, Reference, Run, text
from tercet.protocol.messages.values import LogprobParams, Resume, pack_ints
from tercet.scheduler.device import time_slices
from tercet.scheduler.model_files import ModelError
from tercet.scheduler.models.layers.encoder_decoder import text_encoder

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "equal": {},
    "wide": {
        "encoder": {"hidden_size": 60, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2},
        "decoder": {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2},
        "tied": False,
    },
    "biased": {
        "encoder": {"attention_bias": True, "attn_logit_softcapping": None},
        "decoder": {"attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
}
LENGTHS = 1, 2, 37, 150, 192


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5gemma(tmp_path_factory.mktemp("t5gemma"), **SHAPES[request.param])


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_answers_equal_those_of_transformers(directory: Path, reference: Reference, backend: str) -> None:
    run = Run(directory, overlap=1, attention_backend=backend)
    read = [text(length) for length in LENGTHS]
    expected = [reference.answer(each, run.start) for each in read]
    assert run.answers(read) == expected
    assert len({tuple(each) for each in expected}) == len(LENGTHS), "the answers depend on the texts"
    assert max(len({*each}) for each in expected) > 4, "and on what was answered before"
    assert [run.answers([each])[0] for each in read[:3]] == expected[:3], "and one by one"


def test_an_encoder_computes_in_parts(directory: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_slices, "_PART", 1.0)  # parts of 16 rows
    pauses: list[None] = []
    monkeypatch.setattr(text_encoder, "pause", lambda: pauses.append(None))
    run = Run(directory)
    assert run.answers([text(150)]) == [reference.answer(text(150), run.start)]
    assert len(pauses) > 2 * 3 * 10, "ten parts of each product and attention of a layer"


def test_logits_equal_those_of_transformers(directory: Path, reference: Reference) -> None:
    run = Run(directory)
    run.send("r", text(150), logprobs=LogprobParams(top=0))
    run.driver.run()
    said, expected = run.driver.output["r", 0], reference.logprobs(text(150), run.start)
    assert run.start == [BEGIN]
    assert len(said) == ANSWER
    for place, token in enumerate(said):
        assert run.driver.logprobs["r", 0][place] == pytest.approx(float(expected[place][token]), abs=1e-4)


def test_choices_prefixes_chunks_and_later_attempts(directory: Path, reference: Reference) -> None:
    run = Run(directory, config={"token_budget": 7})
    run.start = [*run.start, *text(40)]
    expected = reference.answer(text(150), run.start)
    run.send("r", text(150), n=3)
    run.driver.run()
    assert [run.driver.output["r", choice] for choice in range(3)] == [expected] * 3
    assert sum(len(plan.texts) for plan in run.driver.plans) == 1
    assert run.answers([text(150)]) == [expected]
    assert run.driver.core.counters.cached_tokens >= 40
    run.driver.output["s", 0] = expected[:50]
    run.send("s", text(150), attempt=1, resume=[Resume(0, pack_ints(expected[:50]))])
    run.driver.run()
    assert run.driver.output["s", 0] == expected


def test_retracted_choices_go_on(directory: Path, reference: Reference) -> None:
    run = Run(directory, kv_cache_bytes=110_000, config={"reserve": 0.0, "reserve_floor": 0.0})
    read = [text(37), text(150), text(2)]
    assert run.answers(read) == [reference.answer(each, run.start) for each in read]
    assert run.driver.core.counters.retractions


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"encoder": {"hidden_activation": "relu"}}, "hidden_activation"),
        ({"encoder": {"vocab_size": 300}}, "vocab_size"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, fields: Mapping[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        Run(write_t5gemma(tmp_path, **fields))
