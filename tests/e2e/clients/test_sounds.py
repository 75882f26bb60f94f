"""Audio in chats through OpenAI's client: the texts of transformers, and nothing of other API keys."""

import base64
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from openai import BadRequestError, OpenAI

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from tests.integration.sound_families import FAMILIES, sound, wav
from tests.server_process import Server

ANSWER = 24
GREEDY: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0.0}
Ids = list[int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["Qwen2-Audio"].write(tmp_path_factory.mktemp("audio") / "hearing")


@pytest.fixture(scope="module")
def hearing(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    """Yield a server with two API keys."""
    options = ["--dtype", "float32", "--kv-cache-bytes", "64MiB"]
    server = start(str(directory), *options, env={"TERCET_API_KEYS": "one\nother"}, key="one").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


def content_of(parts: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Return parts of a message; a path stands for the sound with its name."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(wav(part.name)).decode(), "format": "wav"},
        }
        for part in parts
    ]


@torch.inference_mode()
def answer_of_transformers(directory: Path, parts: Sequence[str | Path]) -> tuple[Ids, str]:
    """Return the ids of the prompt of a user's message, and the answer."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    processor: Any = transformers.Qwen2AudioProcessor(
        transformers.WhisperFeatureExtractor.from_pretrained(directory),
        tokenizer,
        chat_template=(directory / "chat_template.jinja").read_text(),
    )
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "audio", "audio": ""} for p in parts]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    heard = [sound(part.name).astype(np.float32) / 32_768 for part in parts if isinstance(part, Path)]
    inputs = processor(text=prompt, audio=heard, sampling_rate=16_000, return_tensors="pt", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    model: Any = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")
    out = model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER, eos_token_id=0, pad_token_id=0)
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(ids)) > 3, "an answer of one token would prove little"
    return inputs["input_ids"][0].tolist(), tokenizer.decode(ids, skip_special_tokens=True)


def test_openais_client_gets_the_texts_of_transformers(hearing: Server, directory: Path) -> None:
    parts: list[str | Path] = ["Hear ", Path("odd"), " and ", Path("short"), "?"]
    ids, expected = answer_of_transformers(directory, parts)
    asked: list[Any] = [{"role": "user", "content": content_of(parts)}]
    create: Any = hearing.client().chat.completions.create
    whole = create(model="hearing", messages=asked, n=2, extra_body={"return_token_ids": True}, **GREEDY)
    assert whole.prompt_token_ids == ids
    assert [choice.message.content for choice in whole.choices] == [expected] * 2
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.prompt_tokens_details.audio_tokens == ids.count(max(ids) - 2)
    texts = {0: "", 1: ""}
    for chunk in create(model="hearing", messages=asked, n=2, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys((0, 1), expected)


@torch.inference_mode()
def test_sounds_of_several_windows_get_the_texts_of_transformers(start: Callable[..., Server], tmp_path: Path) -> None:
    family = FAMILIES["Voxtral"]
    directory = family.write(tmp_path / "voxtral")
    server = start(str(directory), "--dtype", "float32", "--kv-cache-bytes", "64MiB").wait()
    names = ["three windows", "odd"]
    parts: list[str | Path] = ["Hear ", *map(Path, names), "?"]
    asked: list[Any] = [{"role": "user", "content": content_of(parts)}]
    create: Any = server.client().chat.completions.create
    answer = create(model="voxtral", messages=asked, extra_body={"return_token_ids": True}, **GREEDY)
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    placeholders = [f"[BEGIN_AUDIO]{'[AUDIO]' * family.tokens(family.sounds[name])}" for name in names]
    ids = tokenizer.encode(f"<|user|>Hear {''.join(placeholders)}?<|end|><|assistant|>", add_special_tokens=False)
    assert answer.prompt_token_ids == ids
    model: Any = transformers.VoxtralForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")
    features = transformers.WhisperFeatureExtractor.from_pretrained(directory)
    prompt = torch.tensor([ids])
    made = {"do_sample": False, "max_new_tokens": ANSWER, "eos_token_id": 0, "pad_token_id": 0}
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **family.inputs(features, names), **made)
    said = out[0, len(ids) :].tolist()
    assert len(set(said)) > 3, "an answer of one token would prove little"
    assert answer.choices[0].message.content == tokenizer.decode(said, skip_special_tokens=True)
    transcript = server.client().audio.transcriptions.create(model="voxtral", file=("a.wav", wav("odd")), language="en")
    assert transcript.usage is not None
    assert transcript.usage.type == "tokens"
    assert transcript.usage.input_token_details is not None
    assert transcript.usage.input_token_details.audio_tokens == family.tokens(family.sounds["odd"])
    assert server.stop() == 0, "\n".join(server.lines)


def test_a_model_that_reads_text_only_refuses_the_part(client: OpenAI, model: str) -> None:
    asked: list[Any] = [{"role": "user", "content": content_of(["Hear", Path("odd")])}]
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(model=model, messages=asked)
    assert error.value.param == "messages[0].content[1]"
    assert "takes text only" in error.value.message


def test_another_key_s_sound_is_not_in_the_cache(hearing: Server) -> None:
    def cached(key: str) -> tuple[int, int]:
        """Return the prompt tokens and the cached ones of a request."""
        with OpenAI(base_url=f"{hearing.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            asked: Any = [{"role": "user", "content": content_of(["Whose?", Path("tone"), Path("longest")])}]
            usage = client.chat.completions.create(model="hearing", messages=asked, **GREEDY).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    (count, first), (_, again) = cached("one"), cached("one")
    assert (first, cached("other")) == (0, (count, 0))
    assert again > count // 2
    assert cached("other") == (count, again)
