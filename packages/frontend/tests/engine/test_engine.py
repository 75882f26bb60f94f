import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tercet.frontend.engine.engine import Engine, EngineError
from tercet.frontend.errors import ApiError
from tercet.frontend.supervisor.options import ConfigError, ServeConfig
from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.protocol.messages.values import Role

PARTS = Path(__file__).parents[1] / "parts"
Make = Callable[[ServeConfig, Path], Sequence[LaunchSpec]]


def echo_parts(step: float = 0.0, *options: str) -> Make:
    """Return a scheduler that repeats the prompt, and a detokenizer for it."""

    def make(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
        command = (sys.executable, str(PARTS / "echo.py"), str(step), *options)
        return [
            LaunchSpec("scheduler-0", Role.SCHEDULER, command),
            LaunchSpec("detokenizer-0", Role.DETOKENIZER, command),
        ]

    return make


def failing_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
    return [LaunchSpec("scheduler-0", Role.SCHEDULER, (sys.executable, str(PARTS / "part.py"), "refuse"))]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(make_parts=echo_parts()) as started:
        yield started


def test_one_prompt_gives_one_answer(engine: Engine) -> None:
    answer = engine.generate("one two three", {"max_new_tokens": 5})
    assert answer["text"] == " one two three one two"
    assert answer["output_ids"] == [0, 1, 2, 0, 1]
    assert answer["meta_info"]["prompt_tokens"] == 3
    assert answer["meta_info"]["completion_tokens"] == 5
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "matched": None, "length": 5}


def test_a_list_of_prompts_gives_a_list_in_order(engine: Engine) -> None:
    prompts = ["one", "two", "five four"]
    answers = engine.generate(prompts, [{"max_new_tokens": count} for count in (1, 2, 3)])
    assert [answer["text"] for answer in answers] == [" one", " two two", " five four five"]
    assert engine.generate([]) == []
    assert len(engine.generate(["one"], {"max_new_tokens": 1})) == 1


def test_token_ids_are_taken_as_they_are(engine: Engine) -> None:
    assert engine.generate(input_ids=[3, 4], sampling_params={"max_new_tokens": 3})["output_ids"] == [3, 4, 3]
    answers = engine.generate(input_ids=[[0], [1]], sampling_params={"max_new_tokens": 1})
    assert [answer["output_ids"] for answer in answers] == [[0], [1]]


def test_n_choices_are_a_list(engine: Engine) -> None:
    answers: Any = engine.generate("four", {"max_new_tokens": 2, "n": 3})
    assert [(answer["index"], answer["text"]) for answer in answers] == [(index, " four four") for index in range(3)]


def test_a_stream_grows_to_the_whole_answer(engine: Engine) -> None:
    answers = list(engine.generate("one two", {"max_new_tokens": 6}, stream=True))
    assert answers[-1]["text"] == " one two one two one two"
    assert all(later["text"].startswith(answer["text"]) for answer, later in itertools.pairwise(answers))
    assert [bool(answer["meta_info"]["finish_reason"]) for answer in answers] == [False] * (len(answers) - 1) + [True]


async def test_another_event_loop_can_wait_for_answers(engine: Engine) -> None:
    params = {"max_new_tokens": 3}
    one, many = await asyncio.gather(
        engine.async_generate("one", params), engine.async_generate(["two", "three"], params)
    )
    assert one["text"] == " one one one"
    assert [answer["text"] for answer in many] == [" two two two", " three three three"]
    texts = [answer["text"] async for answer in await engine.async_generate("five", params, stream=True)]
    assert texts[-1] == " five five five"


def test_a_thousand_prompts_at_once(engine: Engine) -> None:
    answers = engine.generate(["one two"] * 1000, {"max_new_tokens": 2})
    assert [answer["text"] for answer in answers] == [" one two"] * 1000


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "either a prompt or input_ids"),
        ({"prompt": "one", "input_ids": [1]}, ValueError, "either a prompt or input_ids"),
        ({"prompt": "one", "sampling_params": {"temperature": -1}}, ValueError, "temperature"),
        ({"prompt": "one", "sampling_params": {"temprature": 1}}, ValueError, "temprature"),
        ({"prompt": ["one", "two"], "sampling_params": [{}]}, ValueError, "2 prompts with 1 sampling_params"),
        ({"prompt": "one", "sampling_params": {"max_new_tokens": 5000}}, ApiError, "maximum context length"),
        ({"input_ids": [99]}, ApiError, "99 is not a token id"),
    ],
)
def test_what_cannot_be_is_refused(engine: Engine, arguments: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        engine.generate(**arguments)


def test_one_bad_prompt_does_not_leave_the_others_running(engine: Engine) -> None:
    with pytest.raises(ApiError):
        engine.generate(input_ids=[[0], [99]], sampling_params={"max_new_tokens": 4000})
    assert engine.generate("one", {"max_new_tokens": 1})["text"] == " one"


@pytest.mark.parametrize("victim", ["scheduler-0", "detokenizer-0"])
def test_a_killed_part_costs_no_token(victim: str) -> None:
    with Engine(make_parts=echo_parts(step=0.02)) as engine:
        answers = engine.generate("one two three", {"max_new_tokens": 50}, stream=True)
        for answer in answers:
            if len(answer["output_ids"]) >= 10:
                break
        os.kill(engine.supervisor.pids()[victim], signal.SIGKILL)
        *_, last = answers
        assert last["output_ids"] == [position % 3 for position in range(50)]
        assert last["text"] == "".join([" one", " two", " three"][position % 3] for position in range(50))


def test_a_part_that_cannot_start_is_named() -> None:
    with pytest.raises(EngineError, match="scheduler-0: --dtype: no such dtype: float7"):
        Engine(make_parts=failing_parts)


def test_a_tokenizer_that_cannot_be_read_is_why_it_does_not_start() -> None:
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"the tokenizer files of scheduler-0 are of no use: .*tokenizer"):
        Engine(make_parts=echo_parts(0.0, "--torn"))
    assert time.monotonic() - began < 20


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="page_sise"):
        Engine(page_sise=3)
    with pytest.raises(ConfigError, match="--page-size"):
        Engine(page_size=0)
    with pytest.raises(ConfigError, match=r"--dtype must be one of auto, .*, not 'float8'"):
        Engine(dtype="float8")
    with pytest.raises(ConfigError, match="--threads must be a whole number, not 'two'"):
        Engine(threads="two")
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at least 1, not 0"):
        Engine(tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="--lora"):
        Engine(lora={"two\nlines": "/a"})
    with pytest.raises(TypeError, match="NoneType"):
        Engine(None)  # type: ignore[arg-type]


def test_an_adapter_is_read_before_the_engine_is_there(tmp_path: Path) -> None:
    told: list[ServeConfig] = []

    def make_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
        told.append(config)
        return list(echo_parts()(config, directory))

    with Engine(lora={"back": tmp_path, "again": "/elsewhere"}, make_parts=make_parts) as engine:
        three = {"max_new_tokens": 3}
        assert engine.generate("one two three", three, lora_path="back")["text"] == " three two one"
        assert engine.generate("one two three", three)["text"] == " one two three"
        answers = engine.generate(["one two", "three four"], three, lora_path=[None, "again"])
        assert [each["text"] for each in answers] == [" one two one", " four three four"]
        *_, last = engine.generate("one two", three, lora_path="back", stream=True)
        assert last["text"] == " two one two"
        with pytest.raises(ApiError, match="'other'"):
            engine.generate("one", lora_path="other")
        with pytest.raises(ValueError, match="2 prompts with 1 adapters"):
            engine.generate(["one", "two"], lora_path=["back"])
        with pytest.raises(ValueError, match="lora_path"):
            engine.generate("one", lora_path=[7])
    assert told[0].lora == {"back": str(tmp_path), "again": "/elsewhere"}


def test_an_adapter_that_cannot_be_read_is_named() -> None:
    with pytest.raises(EngineError, match=r"the adapter 'back' cannot be used: .* scheduler-0: nothing there"):
        Engine(lora={"back": "org/nowhere"}, make_parts=echo_parts())


def test_a_path_and_a_number_of_bytes_are_told_as_on_a_command_line(tmp_path: Path) -> None:
    told: list[ServeConfig] = []

    def make_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
        told.append(config)
        return list(echo_parts()(config, directory))

    with Engine(tmp_path / "model", kv_cache_bytes=1 << 30, make_parts=make_parts):
        pass
    assert told[0].model == str(tmp_path / "model")
    assert told[0].scheduler.flags() == ["--kv-cache-bytes=1073741824"]


def test_shutdown_ends_the_parts_and_whoever_waits(capfd: pytest.CaptureFixture[str]) -> None:
    engine = Engine(make_parts=echo_parts(step=10.0))
    pids = list(engine.supervisor.pids().values())
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            engine.generate("one", {"max_new_tokens": 100})
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    engine.shutdown()
    engine.shutdown()
    thread.join(20)
    assert [type(error) for error in errors] == [EngineError]
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(EngineError, match="shut down"):
        engine.generate("one")
    assert "Traceback" not in capfd.readouterr().err
