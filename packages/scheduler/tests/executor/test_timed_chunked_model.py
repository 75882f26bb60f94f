"""Whoever computes for minutes says so, and whoever hangs does not."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tercet.kernels.native.library import missing_library
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.values import SamplingParams, Task, pack_ints
from tercet.protocol.testing import ScriptedClock
from tercet.scheduler.core.embedding.plan import EncodePlan, EncodeRow
from tercet.scheduler.core.plan import PageUpdate, Plan, Row, SlotInit
from tercet.scheduler.executor.chunked_model import LONGEST_CALL, TimedChunkedModel, report_layers
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker
from tercet.scheduler.executor.tp_worker import TpModelWorker
from tercet.scheduler.executor.worker_options import WorkerOptions
from tercet.scheduler.status import StatusBoard

MIXED = [(0, 1, 2), (1, 7, 12), (2, 4, 7), (3, 9, 9)]
BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}
QWEN = {
    "architectures": ["Qwen3Model"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODERN = {**BERT, "architectures": ["ModernBertModel"]}
LLAMA = {**QWEN, "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "tie_word_embeddings": True}
LAYERS = 5


class Watched:
    """A board whose clock goes on by some seconds in each piece of work, and what heartbeats would say by then."""

    def __init__(self) -> None:
        self.clock = ScriptedClock()
        self.board = StatusBoard(self.clock)
        self.ages: list[float] = []
        self.stuck = False

    def work(self, seconds: float) -> None:
        self.clock.advance(seconds)
        beat = self.board.heartbeat("f")
        self.ages.append(beat.step_age)
        self.stuck |= is_stuck(beat)


class Slow(nn.Module):
    """Ten layers of ten seconds each."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(10))
        self._watched = watched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self._watched.work(10.0)
            x = layer(x)
        return x


@pytest.mark.parametrize("tells", [True, False])
def test_a_long_step_is_stuck_only_if_it_tells_nothing(tells: bool) -> None:
    watched = Watched()
    module = Slow(watched)
    if tells:
        report_layers(module, watched.board.advance)
    watched.board.begin_step()
    module(torch.zeros(1))
    assert watched.clock() == 1100.0
    assert watched.stuck is not tells
    watched.board.end_step()
    assert watched.board.heartbeat("f").longest_step == (10.0 if tells else 100.0)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Those in the only list of so many modules."""
    [layers] = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each) == LAYERS]
    return list(layers)


@pytest.mark.parametrize("config", [BERT, MODERN, QWEN], ids=lambda config: config["architectures"][0])
def test_every_layer_of_an_encoder_is_told_of(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    watched = Watched()
    options = EncoderOptions(model=tmp_path, task=Task.EMBED, device="cpu", load_format="dummy")
    worker = EncoderWorker(options, None, watched.board.advance)
    for layer in layers_of(worker._model.module):
        layer.register_forward_pre_hook(lambda *_: watched.work(29.0))
    watched.board.begin_step()
    worker.submit(EncodePlan(step=0, rows=[EncodeRow(pack_ints([5, 6, 7]))])).result()
    watched.board.end_step()
    assert watched.ages == [29.0] * LAYERS
    assert not watched.stuck


def prefill(tokens: int) -> Plan:
    init = SlotInit(
        slot=0,
        tokens=pack_ints(range(1, tokens + 1)),
        prompt_tokens=tokens,
        choice=0,
        sampling=SamplingParams(max_new_tokens=9, temperature=1.0, seed=5),
    )
    return Plan(step=0, introduce=[init], pages=[PageUpdate(0, 0, [[1, 3]])], rows=[Row(0, 0, tokens, sample=True)])


@pytest.mark.parametrize("backend", ["torch_native", "cpu"])
def test_a_decoder_on_a_cpu_tells_of_layers_or_of_parts(backend: str, tmp_path: Path) -> None:
    if backend == "cpu" and missing_library():
        pytest.skip(missing_library())
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    told: list[int] = []
    options = WorkerOptions(
        model=tmp_path, load_format="dummy", device="cpu", slots=2, page_size=8, attention_backend=backend
    )
    worker = TpModelWorker(options, None, lambda: told.append(1))
    worker.submit(prefill(12)).result()
    # Of the native one: two halves of a first step, and the logits.
    assert len(told) == (LAYERS if backend == "torch_native" else 3)
    worker.close()


class Timed:
    """A model of which each call takes some seconds, and more for each of its tokens."""

    def __init__(self, model: Any, watched: Watched, base: float, seconds: float) -> None:
        self.model = model
        self.watched = watched
        self.base = base
        self.seconds = seconds
        self.calls: list[int] = []

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        self.calls.append(len(input_ids))
        self.watched.work(self.base + self.seconds * len(input_ids))
        result: torch.Tensor = self.model(input_ids, positions, batch)
        return result

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.watched.work(self.base)
        result: torch.Tensor = self.model.compute_logits(hidden)
        return result


def run(model: TimedChunkedModel, watched: Watched, batch: Any) -> torch.Tensor:
    watched.board.begin_step()
    hidden = model(batch.input_ids, batch.positions, batch)
    watched.board.end_step()
    return hidden


def test_a_step_in_one_call_is_cut_into_parts_that_tell_and_gives_the_same(attending: Any, steps: Any) -> None:
    plain, cut, watched = steps(), steps(), Watched()
    timed = Timed(attending, watched, 0.5, 2.0)
    model = TimedChunkedModel(timed, watched.board.advance, watched.clock)
    for rows in ([(0, 1, 1), (1, 5, 5), (2, 3, 3)], MIXED):
        expected_batch, batch = plain.step(rows), cut.step(rows)
        expected = attending(expected_batch.input_ids, expected_batch.positions, expected_batch)
        torch.testing.assert_close(run(model, watched, batch), expected)
    assert timed.calls == [4, 5, 5, 5, 5, 6]
    assert max(watched.ages) < 1.5 * LONGEST_CALL
    assert not watched.stuck
    for mine, theirs in zip(cut.pool.layer(0), plain.pool.layer(0), strict=True):
        assert torch.equal(mine, theirs)


Rows = Sequence[tuple[int, int, int]]


def calls_of(given: Sequence[tuple[Rows, float]], attending: Any, steps: Any) -> list[list[int]]:
    """How steps of such rows, each taking so many seconds a token, are cut."""
    watched, made = Watched(), steps()
    timed = Timed(attending, watched, 0.0, 0.0)
    model = TimedChunkedModel(timed, watched.board.advance, watched.clock)
    calls: list[list[int]] = []
    for rows, seconds in given:
        timed.seconds, timed.calls = seconds, []
        run(model, watched, made.step(rows))
        calls.append(timed.calls)
    return calls


PROMPT, FOUR, NINE = [(0, 20, 20)], [(0, 4, 4)], [(seq % 4, 1, 5 + seq // 4) for seq in range(9)]


def test_what_is_fast_is_cut_once_only(attending: Any, steps: Any) -> None:
    calls = calls_of([(PROMPT, 0.01), (PROMPT, 0.01), (FOUR, 0.01), (PROMPT, 0.01)], attending, steps)
    assert calls == [[5, 5, 10], [20], [4], [20]]


def test_what_was_slow_once_is_whole_again(attending: Any, steps: Any) -> None:
    calls = calls_of([(FOUR, 0.01), (PROMPT, 5.0), (PROMPT, 0.01), (PROMPT, 0.01)], attending, steps)
    assert calls == [[4], [20], [5, 5, 10], [20]]


def test_slow_decodes_cut_no_prompt(attending: Any, steps: Any) -> None:
    calls = calls_of([(NINE, 0.4), (NINE, 0.4), (PROMPT, 0.4), (NINE, 2.0), (PROMPT, 0.4)], attending, steps)
    assert calls == [[4, 5], [9], [20], [9], [20]]


def test_logits_are_told_of(attending: Any) -> None:
    told: list[int] = []
    hidden = torch.randn(3, 8)
    model = TimedChunkedModel(attending, lambda: told.append(1))
    assert torch.equal(model.compute_logits(hidden), attending.compute_logits(hidden))
    assert told == [1]


def test_a_call_that_fails_tells_nothing(attending: Any, steps: Any) -> None:
    told: list[int] = []

    class Failing(Timed):
        def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
            raise MemoryError

    model = TimedChunkedModel(Failing(attending, Watched(), 0.0, 0.0), lambda: told.append(1))
    batch = steps().step([(0, 1, 1)])
    with pytest.raises(MemoryError):
        model(batch.input_ids, batch.positions, batch)
    assert told == []
