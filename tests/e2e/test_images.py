"""Images through official clients: the texts of transformers on the same files, and nothing of other API keys."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import torch
import transformers
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError, OpenAI
from pydantic import SecretStr

pytest.importorskip("PIL")

from PIL import Image
from tokenizers import Tokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from packages.frontend.tests.media.image_files import data_url, noise
from packages.scheduler.tests.models.vision import qwen_checkpoint as qwen
from packages.scheduler.tests.models.vision.checkpoint import IMAGE, MARKS, TOKENS, write_gemma3
from tests.server_process import Server

ANSWER = 24
GREEDY: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0.0}
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
Ids = list[int]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("images") / "seeing")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return PNG files of images of odd sizes."""
    folder = tmp_path_factory.mktemp("files")
    paths = [folder / f"{number}.png" for number in range(3)]
    for number, (path, size) in enumerate(zip(paths, [(61, 47), (3, 2000), (1, 1)], strict=True)):
        noise(*size, seed=number).save(path)
    return paths


@pytest.fixture(scope="module")
def seeing(start: Callable[..., Server], directory: Path) -> Iterator[Server]:
    """Yield a server with two API keys."""
    options = ["--dtype", "float32", "--kv-cache-bytes", "64MiB"]
    server = start(str(directory), *options, env={"TERCET_API_KEYS": "one\nother"}, key="one").wait()
    yield server
    assert server.stop() == 0, "\n".join(server.lines)


class Reference:
    """transformers' `generate`, with its processor and the chat template."""

    def __init__(self, directory: Path) -> None:
        names = dict(zip(("boi_token", "eoi_token", "image_token"), MARKS, strict=True))
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(directory / "tokenizer.json"), extra_special_tokens=names
        )
        self.processor: Any = transformers.Gemma3Processor(
            Gemma3ImageProcessorPil.from_pretrained(directory),
            self.tokenizer,
            chat_template=(directory / "chat_template.jinja").read_text(),
            image_seq_length=TOKENS,
        )
        self._model: Any = transformers.Gemma3ForConditionalGeneration.from_pretrained(
            directory, attn_implementation="eager"
        )

    def chat(self, parts: Sequence[str | Path]) -> tuple[Ids, str]:
        """Return the ids of the prompt of a user's message, and the answer."""
        content = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "path": str(p)} for p in parts
        ]
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        return inputs["input_ids"][0].tolist(), self._answer(inputs)

    def answer(self, ids: Ids, images: Sequence[Path]) -> str:
        """Return the answer to a prompt that has placeholder tokens for these images."""
        arrays = self.processor.image_processor([Image.open(path) for path in images], return_tensors="pt")
        tokens = torch.tensor([ids])
        shown = {"pixel_values": arrays["pixel_values"], "token_type_ids": (tokens == IMAGE).long()}
        return self._answer({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **shown})

    @torch.inference_mode()
    def _answer(self, inputs: Any) -> str:
        out = self._model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER, eos_token_id=0, pad_token_id=0)
        ids = out[0, inputs["input_ids"].shape[1] :].tolist()
        assert len(set(ids)) > 3, "an answer of one token would prove little"
        said: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return said


@pytest.fixture(scope="module")
def reference(directory: Path) -> Reference:
    return Reference(directory)


def image(path: Path) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(path.read_bytes())}}


def block(path: Path) -> dict[str, Any]:
    [_, _, data] = data_url(path.read_bytes()).partition(",")
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def prompt_of(server: Server, messages: list[dict[str, Any]]) -> Ids:
    """Return the token ids of a chat."""
    answer = httpx.post(
        f"{server.url}/tokenize",
        json={"model": "seeing", "messages": messages},
        headers={"authorization": f"Bearer {server.key}"},
    )
    ids: Ids = answer.json()["tokens"]
    return ids


def test_openais_client_gets_the_texts_of_transformers(seeing: Server, reference: Reference, files: list[Path]) -> None:
    ids, expected = reference.chat(["See ", files[0], " and ", files[1], "?"])
    asked: list[Any] = [
        {"role": "user", "content": [text("See "), image(files[0]), text(" and "), image(files[1]), text("?")]}
    ]
    create: Any = seeing.client().chat.completions.create
    whole = create(model="seeing", messages=asked, n=2, extra_body={"return_token_ids": True}, **GREEDY)
    assert whole.prompt_token_ids == ids
    assert [choice.message.content for choice in whole.choices] == [expected] * 2
    assert whole.usage.prompt_tokens == len(ids)
    texts = {0: "", 1: ""}
    for chunk in create(model="seeing", messages=asked, n=2, stream=True, **GREEDY):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys((0, 1), expected)
    looked = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": [text("This: "), image(files[2])]},
    ]
    told = create(model="seeing", messages=looked, extra_body={"return_token_ids": True}, **GREEDY)
    assert told.choices[0].message.content == reference.answer(told.prompt_token_ids, [files[2]])


def test_anthropics_client_gets_the_texts_of_transformers(
    seeing: Server, reference: Reference, files: list[Path]
) -> None:
    ids, expected = reference.chat([files[2], "What is this?"])
    asked: Any = [{"role": "user", "content": [block(files[2]), text("What is this?")]}]
    given: dict[str, Any] = {"model": "seeing", "max_tokens": ANSWER, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(
        base_url=seeing.url, api_key="one", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        whole: Any = client.messages.create(messages=asked, **given)
        assert [each.text for each in whole.content] == [expected]
        assert client.messages.count_tokens(model="seeing", messages=asked).input_tokens == len(ids)
        with client.messages.stream(messages=asked, **given) as stream:
            assert "".join(stream.text_stream) == expected
        looked: Any = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(files[0])]}],
            },
        ]
        told: Any = client.messages.create(messages=looked, **given)
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": [image(files[0])]}
    same = prompt_of(seeing, [looked[0], {"role": "assistant", "tool_calls": [CALL]}, result])
    assert [each.text for each in told.content] == [reference.answer(same, [files[0]])]


def test_langchain_gets_the_texts_of_transformers(seeing: Server, reference: Reference, files: list[Path]) -> None:
    _, expected = reference.chat(["What is ", files[0], "?"])
    chat = ChatOpenAI(
        model="seeing",
        base_url=f"{seeing.url}/v1",
        api_key=SecretStr("one"),
        temperature=0,
        max_completion_tokens=ANSWER,
        max_retries=0,
        timeout=60,
    )
    data = block(files[0])["source"]["data"]
    for shown in (image(files[0]), {"type": "image", "base64": data, "mime_type": "image/png"}):
        asked = [HumanMessage([text("What is "), shown, text("?")])]
        assert chat.invoke(asked).content == expected
        assert "".join(str(chunk.content) for chunk in chat.stream(asked)) == expected


def test_the_body_of_open_webui_gets_the_text_of_transformers(
    seeing: Server, reference: Reference, files: list[Path]
) -> None:
    _, expected = reference.chat(["What is this?", files[0]])
    body = {
        "stream": True,
        "model": "seeing",
        "messages": [{"role": "user", "content": [text("What is this?"), image(files[0])]}],
        "stream_options": {"include_usage": True},
        **GREEDY,
    }
    headers = {"authorization": "Bearer one"}
    answer = httpx.post(f"{seeing.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected
    assert last["usage"]["prompt_tokens_details"]["image_tokens"] == TOKENS


def test_a_model_that_reads_text_only_refuses_the_part(client: OpenAI, model: str, files: list[Path]) -> None:
    asked: list[Any] = [{"role": "user", "content": [text("See"), image(files[0])]}]
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(model=model, messages=asked)
    assert error.value.param == "messages[0].content[1]"
    assert "takes text only" in error.value.message


def test_another_key_s_image_is_not_in_the_cache(seeing: Server, files: list[Path]) -> None:
    def cached(key: str) -> tuple[int, int]:
        """Return the prompt tokens and the cached ones of a request."""
        with OpenAI(base_url=f"{seeing.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            content: Any = [text("Whose?"), *map(image, files)]
            asked: Any = [{"role": "user", "content": content}]
            usage = client.chat.completions.create(model="seeing", messages=asked, **GREEDY).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    (count, first), (_, again) = cached("one"), cached("one")
    assert (first, cached("other")) == (0, (count, 0))
    assert again > count // 2
    assert cached("other") == (count, again)


@torch.inference_mode()
def answer_of_qwen(directory: Path, files: Sequence[Path]) -> tuple[Ids, str]:
    """Return the ids of the prompt "See <image> and <image>?", and transformers' answer."""
    inputs = Qwen2VLImageProcessorPil.from_pretrained(directory)([*map(Image.open, files)], return_tensors="pt")
    begin, end, pad, _ = qwen.MARKS
    shown = [begin + pad * (int(grid.prod()) // qwen.MERGE**2) + end for grid in inputs["image_grid_thw"]]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = f"<|user|>See {shown[0]} and {shown[1]}?<|end|><|assistant|>"
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")
    given = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == qwen.IMAGE).int(), **inputs}
    out = model.generate(ids, do_sample=False, max_new_tokens=ANSWER, eos_token_id=0, pad_token_id=0, **given)
    answer = out[0, ids.shape[1] :].tolist()
    assert len(set(answer)) > 3, "an answer of one token would prove little"
    return ids[0].tolist(), tokenizer.decode(answer)


def test_images_of_two_sizes_in_one_chat(start: Callable[..., Server], tmp_path: Path, files: list[Path]) -> None:
    directory, files = qwen.write_qwen(tmp_path / "seeing"), [files[0], files[2]]
    ids, expected = answer_of_qwen(directory, files)
    server = start(str(directory), "--dtype", "float32", "--kv-cache-bytes", "64MiB").wait()
    content = [text("See "), image(files[0]), text(" and "), image(files[1]), text("?")]
    create: Any = server.client().chat.completions.create
    asked = {"messages": [{"role": "user", "content": content}], "extra_body": {"return_token_ids": True}, **GREEDY}
    answer = create(model="seeing", **asked)
    assert server.stop() == 0, "\n".join(server.lines)
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].message.content == expected
