"""Clips through OpenAI's client: the texts of transformers on the same frames, from two families of Qwen-VL."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from tokenizers import Tokenizer

pytest.importorskip("av")

from packages.frontend.tests.media.image_files import data_url as image_url
from packages.frontend.tests.media.image_files import noise, saved
from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tests.integration.video_families import Reference, Run, clip_file
from tests.server_process import Server

ANSWER = 24
GREEDY: dict[str, Any] = {
    "max_tokens": ANSWER,
    "temperature": 0.0,
    "extra_body": {"return_token_ids": True, "ignore_eos": True},
}


def clip(name: str) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(clip_file(name)).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_chat_with_a_clip_and_an_image(start: Callable[..., Server], tmp_path: Path, family: str) -> None:
    directory = write_qwen(tmp_path / "watching", family)
    server = start(str(directory), "--dtype", "float32", "--kv-cache-bytes", "64MiB").wait()
    create: Any = server.client().chat.completions.create
    shown = {"type": "image_url", "image_url": {"url": image_url(saved(noise(32, 32, seed=len("square"))))}}
    content = [text("See "), clip("clip"), text(" and "), shown, text("?")]
    asked = {"model": "watching", "messages": [{"role": "user", "content": content}], **GREEDY}
    whole = create(**asked, n=2)
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    broken = {"type": "video_url", "video_url": {"url": image_url(saved(noise(9, 9)))}}
    with pytest.raises(BadRequestError) as refused:
        create(**asked | {"messages": [{"role": "user", "content": [text("See"), broken]}]})
    assert server.stop() == 0, "\n".join(server.lines)

    run = Run(directory)
    media = [run.decoded("clip"), run.decoded("square")]
    ids = Reference(family, directory).continued(run, whole.prompt_token_ids, media, ANSWER)
    run.worker.close()
    expected = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(ids)
    assert [each.message.content for each in whole.choices] == [expected] * 2
    said = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert said == expected
    assert chunks[-1].usage.prompt_tokens_details.model_extra["video_tokens"] > 0
    assert refused.value.param == "messages[0].content[1]"
    assert "The video is refused: it is none of MP4" in refused.value.message
