"""How steps of encoders run on a device: where memory is short, and what is copied."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from packages.scheduler.tests.executor.encoders.encoders import LENGTHS, Make, close, some_inputs, vectors_of
from tercet.protocol.messages.values import Task, pack_ints, unpack_floats
from tercet.scheduler.core.embedding.plan import EncodePlan, EncodeRow
from tercet.scheduler.device.staging import HostToDevice
from tercet.scheduler.executor import encoder_worker
from tercet.scheduler.executor.encoder_worker import EncoderOptions, EncoderWorker, PendingVectors
from tercet.scheduler.models.layers.packed import Packed


class Small(torch.nn.Module):
    """A model with room for so many tokens at once. What it says beyond is one of the ways in which memory runs out."""

    def __init__(self, module: torch.nn.Module, room: int, error: Exception | None = None) -> None:
        super().__init__()
        self.module = module
        self.room = room
        self.error = error
        self.tried: list[int] = []

    def forward(self, packed: Packed) -> torch.Tensor:
        tokens = len(packed.input_ids)
        self.tried.append(tokens)
        if tokens > self.room:
            if self.error is not None:
                raise self.error
            torch.empty(1 << 50, dtype=torch.uint8)  # more than any address space has
        hidden: torch.Tensor = self.module(packed)
        return hidden


def shrink(worker: EncoderWorker, room: int, error: Exception | None = None) -> Small:
    small = Small(worker._model.module, room, error)
    worker._model = replace(worker._model, module=small)
    return small


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), None])
@pytest.mark.parametrize("room", [30, 45, 62])
def test_a_step_that_there_is_no_memory_for_is_computed_in_halves(
    room: int, error: Exception | None, make: Make
) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    wanted = [vectors_of(worker, [row])[0] for row in rows]
    small = shrink(worker, room, error)
    for vector, exact in zip(vectors_of(worker, rows), wanted, strict=True):
        close(vector, exact)
    assert small.tried[0] == sum(LENGTHS) > room
    assert sum(count for count in small.tried if count <= room) == sum(LENGTHS)


def test_an_input_that_there_is_no_memory_for_fails_alone(make: Make) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    wanted = torch.stack([vectors_of(worker, [row])[0] for row in rows])
    shrink(worker, 13, torch.OutOfMemoryError())
    result = worker.submit(EncodePlan(step=0, rows=rows)).result()
    assert (result.too_large, result.failed) == ([4, 7], [])
    vectors = torch.tensor(list(unpack_floats(result.vectors))).view(len(rows), -1)
    others = [row for row in range(len(rows)) if row not in result.too_large]
    close(vectors[others], wanted[others])
    assert worker.submit(EncodePlan(step=1, rows=[rows[4]])).result().too_large == [0]


def test_a_step_that_was_too_large_is_halved_at_once(make: Make) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()
    small = shrink(worker, 45, torch.OutOfMemoryError())
    first = vectors_of(worker, rows)
    assert small.tried == [91, 91, 13, 17, 12, 19, 30]
    small.tried = []
    for vector, known in zip(vectors_of(worker, rows), first, strict=True):
        close(vector, known)
    assert small.tried == [13, 17, 12, 19, 30]


def test_an_input_that_finds_memory_once_it_was_given_back_is_computed(make: Make) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    rows = some_inputs()[:1]
    [wanted] = vectors_of(worker, rows)
    small = shrink(worker, 0, torch.OutOfMemoryError())
    small.register_forward_pre_hook(lambda *_: setattr(small, "room", 5 * len(small.tried)))
    [vector] = vectors_of(worker, rows)
    assert small.tried == [5, 5]
    close(vector, wanted)


def test_what_fails_for_another_reason_is_no_lack_of_memory(make: Make) -> None:
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    shrink(worker, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        worker.submit(EncodePlan(step=0, rows=some_inputs()))


def test_a_step_is_sent_as_steps_are_that_nobody_waits_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its numbers: what else is copied to a GPU waits for the steps in flight there."""
    directory, _ = make("BertModel", {})
    worker = EncoderWorker(EncoderOptions(model=directory, task=Task.EMBED, device="cpu"))
    sent: list[list[int]] = []
    send = HostToDevice.send

    def noted(to_device: HostToDevice, arrays: Sequence[Any]) -> list[torch.Tensor]:
        sent.extend(array.tolist() for array in arrays)
        return send(to_device, arrays)

    monkeypatch.setattr(HostToDevice, "send", noted)
    rows = [EncodeRow(pack_ints([7, 8, 9]), pack_ints([0, 1, 1])), EncodeRow(pack_ints([5]), pack_ints([1]))]
    worker.submit(EncodePlan(step=0, rows=rows))
    assert sent == [[5, 7, 8, 9], [1, 0, 1, 1], [1, 0]]


def test_a_result_waits_for_its_own_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied:
        """What happens when the vectors have come."""

        def __init__(self, vectors: torch.Tensor, there: torch.Tensor) -> None:
            self.vectors, self.there = vectors, there

        def synchronize(self) -> None:
            self.there.copy_(self.vectors)

    def start_copies(tensors: list[torch.Tensor], _: torch.device) -> tuple[list[torch.Tensor], Copied]:
        [vectors] = tensors
        there = torch.full_like(vectors, torch.nan)
        return [there], Copied(vectors, there)

    monkeypatch.setattr(encoder_worker, "start_copies", start_copies)
    result = PendingVectors(3, torch.tensor([[1.0, 2.0], [torch.inf, 0.0]])).result()
    assert (result.step, result.failed) == (3, [1])
    assert [*unpack_floats(result.vectors)][:2] == [1.0, 2.0]
