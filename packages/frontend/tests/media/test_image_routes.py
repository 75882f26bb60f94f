"""Images of all routes reach schedulers, from `data:` URLs and from allowed hosts."""

import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

pytest.importorskip("PIL")
pytest.importorskip("httpcore2")

from packages.frontend.tests.media.hosts import internet, response
from packages.frontend.tests.media.image_files import data_url, noise, saved
from packages.frontend.tests.media.seeing import image, seeing, text, user
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.config.validation import read_media_hosts
from tercet.frontend.engine.requests import to_chat, to_requests
from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.media.image_decoder import ImageDecoder
from tercet.frontend.media.image_fetcher import ImageFetcher
from tercet.frontend.media.prompt_media import content_of
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.media import AspectTiles, TileTexts
from tercet.protocol.messages.values import ModelLimits, unpack_ints

OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]
FILES = [saved(noise(20, 30, seed=seed)) for seed in (1, 2)]
CAT, DOG = map(data_url, FILES)
CAT_ARRAY, DOG_ARRAY = (noise(20, 30, seed=seed).resize((6, 2), 2).tobytes() for seed in (1, 2))
URL = "http://images.example.org/cat.png"
MARKER = "<|endoftext|>"


@pytest.fixture
def engine(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> FakeEngine:
    return seeing(engine_of, files, limits, tokenizer)


@pytest.fixture
async def served(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(engine, store=StoreConfig(response_store=str(tmp_path / "kept" / "store.sqlite"))) as running:
        yield running


def arrays(engine: FakeEngine) -> list[list[bytes]]:
    """Return the arrays of each request so far."""
    return [[bytes(frame) for frame in frames] for frames in engine.frames]


def input_image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def input_text(content: str) -> dict[str, Any]:
    return {"type": "input_text", "text": content}


async def test_one_request_reads_a_url_once(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    async with internet(response(FILES[0])) as net:
        fetcher = ImageFetcher(read_media_hosts(["images.example.org"]), net.resolve, net)
        served.manager.images = ImageDecoder(workers=1, fetcher=fetcher)
        http = http_of(served)
        body: dict[str, Any] = {"model": "tiny", "messages": [user(image(URL)), user(image(URL), image(DOG))], "n": 2}
        counted = await http.post("/tokenize", json={"messages": body["messages"]})
        assert (counted.status_code, len(net.connected)) == (200, 1), "its tokens depend on its size"
        for _ in range(2):
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        block = {"type": "image", "source": {"type": "url", "url": URL}}
        message = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
        assert (await http.post("/v1/messages", json=message)).status_code == 200
        prompts = {"text": [MARKER, MARKER], "image_data": [URL, [URL]]}
        assert (await http.post("/generate", json=prompts)).status_code == 200
    chat = [CAT_ARRAY, CAT_ARRAY, DOG_ARRAY]
    assert arrays(engine) == [chat, chat, [CAT_ARRAY], [CAT_ARRAY], [CAT_ARRAY]]
    assert len(net.connected) == 5


async def test_a_url_that_fails_is_named_with_its_place(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    async with internet(response(b"", "404 Not Found")) as net:
        fetcher = ImageFetcher(read_media_hosts(["images.example.org"]), net.resolve, net)
        served.manager.images = ImageDecoder(workers=1, fetcher=fetcher)
        items = [{"role": "user", "content": [input_text("see"), input_image(URL)]}]
        answer = await http_of(served).post("/v1/responses", json={"model": "tiny", "input": items})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[0].content[1]", "invalid_image_url")
    assert "status 404" in error["message"]
    assert engine.requests() == []


CALL = {"type": "function_call", "call_id": "call00001", "name": "look", "arguments": "{}"}


async def test_responses_have_images(
    served: Served, engine: FakeEngine, openai_of: OpenAIOf, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    file = {"type": "input_file", "filename": "dog.png", "file_data": DOG, "detail": "low"}
    items: Any = [
        {"role": "user", "content": [input_text("see"), input_image(CAT, detail="high"), input_text("this")]},
        CALL,
        {"type": "function_call_output", "call_id": "call00001", "output": [input_text("as"), file]},
    ]
    client = openai_of(served)
    first = await client.responses.create(model="tiny", input=items, max_output_tokens=9)
    second = await client.responses.create(model="tiny", input="and now?", previous_response_id=first.id)
    assert arrays(engine) == [[CAT_ARRAY, DOG_ARRAY]] * 2
    ids = unpack_ints(engine.requests()[0].input_ids)
    assert first.usage is not None
    assert first.usage.input_tokens == len(ids)
    order = [list(ids).index(tokenizer.encode(each).ids[0]) for each in ("see", "this", "as")]
    [cat, dog] = engine.requests()[0].images
    assert order[0] < cat.first < order[1] < order[2] < dog.first
    counted = await client.responses.input_tokens.count(model="tiny", input=items)
    assert counted.input_tokens == len(ids)
    listed = client.responses.input_items.list(first.id, include=["message.input_image.image_url"])
    kept = {item.type: item.to_dict() async for item in listed}
    assert kept["message"]["content"] == [input_text("see"), input_image(CAT, detail="high"), input_text("this")]
    assert kept["function_call_output"]["output"] == [input_text("as"), file]
    assert second.status == "completed"


async def test_a_prompt_names_the_tiles_of_an_image(
    engine_of: Callable[..., FakeEngine],
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
    http_of: HttpOf,
) -> None:
    tiles = TileTexts(tile="<s>{row}, {column}", row_break="\n", thumbnail="\n\n<s>")
    two = AspectTiles(tile=4, min_tiles=2, max_tiles=2)
    engine = seeing(engine_of, files, limits, tokenizer, size=two, tiles=tiles, max_tokens=99)
    async with serving(engine) as served:
        body = {"model": "tiny", "messages": [user(text("see"), image(CAT))]}
        assert (await http_of(served).post("/v1/chat/completions", json=body)).status_code == 200
    [sent] = engine.requests()
    tile = "</s>" * 4
    shown = f"<s>1, 1{tile}\n<s>2, 1{tile}\n\n<s>{tile}\n"
    ids = tokenizer.encode(f"<|im_start|>user\nsee{shown}<|im_end|>\n").ids
    assert list(unpack_ints(sent.input_ids)) == ids
    [place] = sent.images
    places = [index for index, token in enumerate(ids) if token == tokenizer.token_to_id("</s>")]
    assert (place.height, place.width, place.first, place.tokens) == (12, 4, places[0], places[-1] + 1 - places[0])


async def test_conversations_keep_images(served: Served, engine: FakeEngine, openai_of: OpenAIOf) -> None:
    client = openai_of(served)
    item: Any = {"type": "message", "role": "user", "content": [input_image(CAT)]}
    conversation = await client.conversations.create(items=[item])
    await client.responses.create(model="tiny", input="what is it?", conversation=conversation.id)
    assert arrays(engine) == [[CAT_ARRAY]]
    at_url: Any = {**item, "content": [input_image(URL)]}
    await client.conversations.items.create(conversation.id, items=[at_url])
    with pytest.raises(openai.BadRequestError) as error:
        await client.responses.create(model="tiny", input="and now?", conversation=conversation.id)
    assert (error.value.param, error.value.code) == ("conversation", "invalid_image_url")
    shown = [each.to_dict() async for each in client.conversations.items.list(conversation.id, order="asc")]
    assert shown[0]["content"] == [input_image(CAT, detail="auto")]


def message(part: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": [input_text("see"), part]}]}


RESPONSES_REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    (message({"type": "input_image", "file_id": "file-1"}), "input[0].content[1].file_id", "unsupported_parameter"),
    (message({"type": "input_file", "file_id": "file-1"}), "input[0].content[1].file_id", "unsupported_parameter"),
    (message({"type": "input_file", "file_url": URL}), "input[0].content[1].file_url", "unsupported_parameter"),
    (
        message({"type": "input_file", "file_data": "data:application/pdf;base64,AA=="}),
        "input[0].content[1].file_data",
        "unsupported_parameter",
    ),
    (message({"type": "input_image"}), "input[0].content[1]", None),
    (message({"type": "input_file", "filename": "a.png"}), "input[0].content[1]", None),
    (message({"type": "input_audio"}), "input[0].content[1]", "unsupported_parameter"),
    (message(input_image(CAT), "assistant"), "input[0].content[1]", "unsupported_parameter"),
    (message(input_image(CAT), "system"), "input[0].content[1]", "unsupported_parameter"),
    (message(input_image(URL)), "input[0].content[1]", "invalid_image_url"),
    (message(input_image("data:image/png;base64,AA==")), "input[0].content[1]", "invalid_image"),
    (message(input_image(CAT, detail="full")), "input[0].content[1].detail", None),
    (
        {"input": [CALL, {"type": "function_call_output", "call_id": "call00001", "output": [input_image(URL)]}]},
        "input[1].output[0]",
        "invalid_image_url",
    ),
    ({"input": [{"role": "user", "content": [input_image(CAT)] * 33}]}, "input", None),
]


async def test_other_images_of_responses_are_refused_by_name(
    served: Served, engine: FakeEngine, http_of: HttpOf
) -> None:
    for fields, param, code in RESPONSES_REFUSED:
        answer = await http_of(served).post("/v1/responses", json={"model": "tiny", **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert code in (error["code"], None), error
    assert engine.requests() == []


async def test_a_text_has_images_in_the_places_of_its_markers(
    served: Served, engine: FakeEngine, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    http = http_of(served)
    plain = base64.b64encode(FILES[1]).decode()
    several = {"text": f"see {MARKER} and {MARKER}", "image_data": [CAT, plain]}
    batch = {"text": [MARKER, "blind", MARKER * 2], "image_data": [plain, None, [CAT, DOG]]}
    for body in (several, {"text": MARKER, "image_data": plain}, batch):
        answer = await http.post("/generate", json={**body, "sampling_params": {"max_new_tokens": 4}})
        assert answer.status_code == 200, answer.text
    assert arrays(engine) == [[CAT_ARRAY, DOG_ARRAY], [DOG_ARRAY], [DOG_ARRAY], [CAT_ARRAY, DOG_ARRAY]]
    assert [len(request.images) for request in engine.requests()] == [2, 1, 1, 0, 2]
    first = engine.requests()[0]
    ids = list(unpack_ints(first.input_ids))
    placeholder = tokenizer.token_to_id("</s>")
    assert placeholder is not None
    assert [ids[each.first : each.first + 3] for each in first.images] == [[placeholder] * 3] * 2
    assert ids.count(placeholder) == 6


GENERATE_REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "no place", "image_data": CAT}, "image_data", f"'{MARKER}'"),
    ({"text": MARKER * 2, "image_data": [CAT]}, "image_data[0]", "each of its 1 images"),
    ({"text": f"{MARKER}</s>", "image_data": [CAT]}, "text", "tokens of images"),
    ({"text": f"</s></s></s>{MARKER}", "image_data": [CAT]}, "text", "tokens of images"),
    ({"input_ids": [1, 2], "image_data": CAT}, "image_data", "'text'"),
    ({"text": MARKER, "image_data": "/etc/passwd"}, "image_data", "no base64"),
    ({"text": MARKER, "image_data": "file:///etc/passwd"}, "image_data", "'data:' URLs only"),
    ({"text": MARKER, "image_data": [URL]}, "image_data[0]", "'data:' URLs only"),
    ({"text": MARKER, "image_data": [[CAT]]}, "image_data", "one prompt"),
    ({"text": [MARKER, MARKER], "image_data": CAT}, "image_data", "each prompt"),
    ({"text": [MARKER, MARKER], "image_data": [CAT]}, "image_data", "each prompt"),
    ({"text": [MARKER, "blind"], "image_data": [CAT, DOG]}, "image_data[1]", "each of its 1 images"),
    ({"text": MARKER * 33, "image_data": [CAT] * 33}, "image_data", "At most 32"),
    ({"text": MARKER, "image_data": [CAT], "session_params": {"id": "a"}}, "image_data", "session"),
]


async def test_a_text_must_have_the_places_of_its_images(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    for body, param, why in GENERATE_REFUSED:
        answer = await http_of(served).post("/generate", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert why in error["message"]
    assert engine.requests() == []


async def test_a_model_of_text_only_refuses_images(engine_of: Callable[..., FakeEngine], http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        body = {"text": MARKER, "image_data": [CAT]}
        error = (await http_of(served).post("/generate", json=body)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "image_data[0]")
        nothing = {"text": "a", "image_data": []}
        assert (await http_of(served).post("/generate", json=nothing)).status_code == 200


async def test_prompts_of_an_engine_have_images(served: Served) -> None:
    model = served.manager.models.get("tiny")

    def urls(prompt: Any, image_data: Any) -> list[list[str]]:
        requests, _ = to_requests(prompt, None, None, {"image_data": image_data}, model, {})
        prompts = [request.prompt for request in requests]
        return [[content_of(each) for each in prompt.images] for prompt in prompts if isinstance(prompt, TextPrompt)]

    assert urls(MARKER, CAT) == [[CAT]]
    assert urls(MARKER * 2, [CAT, DOG]) == [[CAT, DOG]]
    assert urls([MARKER, "blind", MARKER * 2], [CAT, None, [CAT, DOG]]) == [[CAT], [], [CAT, DOG]]
    with pytest.raises(ValueError, match="2 prompts with images of 1 in image_data"):
        urls([MARKER, MARKER], [CAT])


async def test_token_ids_of_a_chat_with_images_are_refused(served: Served) -> None:
    model = served.manager.models.get("tiny")
    to_chat([user(text("see"))], None, model, add_generation_prompt=True)
    with pytest.raises(UnsupportedParameterError, match="hold no images") as error:
        to_chat([user(text("see"), image(CAT))], None, model, add_generation_prompt=True)
    assert error.value.param == "messages[0].content[1]"


async def test_every_count_has_the_tokens_of_images(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    http = http_of(served)
    chat = {"model": "tiny", "messages": [user(text("see"), image(CAT))]}
    usage = (await http.post("/v1/chat/completions", json=chat)).json()["usage"]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CAT.partition(",")[2]}}
    content = [{"type": "text", "text": "see"}, block]
    counted = await http.post(
        "/v1/messages/count_tokens", json={"model": "tiny", "messages": [{"role": "user", "content": content}]}
    )
    tokenized = await http.post("/tokenize", json=chat)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 6, "image_tokens": 3}
    assert counted.json()["input_tokens"] == tokenized.json()["count"] == usage["prompt_tokens"]
    [request] = engine.requests()
    assert usage["prompt_tokens"] == len(unpack_ints(request.input_ids))
    blind = {"model": "tiny", "messages": [user(text("see"))]}
    usage = (await http.post("/v1/chat/completions", json=blind)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
