"""Parts of new weights become a checkpoint: with safetensors' own reader as the reference."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from tercet.protocol.messages.messages import ControlReply, UpdateWeightsFromDiskReq
from tercet.protocol.messages.weight_transfers import GetWeightsByNameReq, UpdateWeightsFromTensorReq, WeightTransferReq
from tercet.protocol.system.claimed_directory import remove_unclaimed
from tercet.scheduler.model_files import ModelError, model_identity
from tercet.scheduler.weight_transfer import staged_weights
from tercet.scheduler.weight_transfer.staged_weights import StagedWeights, rows_of
from tercet.scheduler.weight_transfer.weight_transfers import NoUpdateGroups, Outcome, WeightTransfers

OLD = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor([7], dtype=torch.int8),
    "d": torch.zeros(0, 4),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Write the old weights in two shards."""
    directory = tmp_path / "base"
    directory.mkdir()
    for file, names in (("1.safetensors", "ab"), ("2.safetensors", "cd")):
        save_file({name: OLD[name] for name in names}, directory / file)
    index = {"weight_map": {name: "1.safetensors" if name in "ab" else "2.safetensors" for name in OLD}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.fixture
def stage(tmp_path: Path) -> StagedWeights:
    return StagedWeights(lambda: tmp_path / "state", "scheduler/0")


def staged(path: Path) -> dict[str, torch.Tensor]:
    [file] = path.glob("*.safetensors")
    return load_file(file)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in wanted.items()
    )


def test_parts_replace_tensors_and_the_others_stay(stage: StagedWeights, base: Path) -> None:
    first = {"a": torch.full((2, 3), 5.0), "c": torch.tensor([1], dtype=torch.int8)}
    second = {"a": torch.full((2, 3), 6.0)}
    stage.add(0, [save(first)])
    stage.add(1, [save(second), save({"b": 2 * OLD["b"]})])
    stage.add(2, [])
    path = stage.complete(base)
    assert equal(staged(path), {**OLD, **first, **second, "b": 2 * OLD["b"]})
    assert path.stat().st_mode & 0o077 == 0
    assert equal(staged(path), staged(path))
    stage.add(0, [save({"b": OLD["b"]})])
    assert equal(staged(stage.complete(path)), {**OLD, **first, **second})


def test_the_fingerprint_covers_every_byte(stage: StagedWeights, base: Path, tmp_path: Path) -> None:
    """The first bytes of a tensor, which fingerprints of other checkpoints cover, are equal."""
    (base / "config.json").write_text("{}")
    large = torch.zeros(10_000)
    fingerprints = []
    for last in (1.0, 2.0, 1.0):
        large[-1] = last
        stage.add(0, [save({"a": large})])
        fingerprints.append(model_identity(base, "float32", weights=stage.complete(base)).weights)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    other = StagedWeights(lambda: tmp_path / "other", "scheduler-1")
    other.add(0, [save({"a": large})])
    assert model_identity(base, "float32", weights=other.complete(base)).weights == fingerprints[0]


def test_a_part_whose_predecessors_are_missing_is_refused(base: Path, tmp_path: Path) -> None:
    stage = StagedWeights(lambda: tmp_path / "state", "scheduler/0")
    stage.add(0, [save({"a": OLD["a"]})])
    for part in (2, 3):
        with pytest.raises(ModelError, match=f"it has 1 of the {part} parts before this one"):
            stage.add(part, [])
    with pytest.raises(ModelError, match=r"another server stages weights in .*: give --state-dir"):
        StagedWeights(lambda: tmp_path / "state", "scheduler/0").add(1, [])
    stage.close()
    restarted = StagedWeights(lambda: tmp_path / "state", "scheduler/0")
    restarted.add(1, [save({"b": 3 * OLD["b"]})])
    assert equal(staged(restarted.complete(base)), {**OLD, "b": 3 * OLD["b"]})
    with pytest.raises(ModelError, match="it has 0 of the 2 parts"):
        restarted.add(2, [])


def test_an_update_that_begins_within_another_is_refused_once(stage: StagedWeights, base: Path) -> None:
    """Frontends count parts: one that has counted none would mix its update with that of another."""
    stage.add(0, [save({"a": -OLD["a"]})])
    with pytest.raises(ModelError, match="1 parts of an unfinished update were dropped: send all parts again"):
        stage.add(0, [save({"b": 5 * OLD["b"]})])
    stage.add(0, [save({"b": 5 * OLD["b"]})])
    assert equal(staged(stage.complete(base)), {**OLD, "b": 5 * OLD["b"]})


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", save({"a": OLD["a"]})[:-1], b"\xff" * 100])
def test_a_part_that_is_no_safetensors_file_is_refused(stage: StagedWeights, base: Path, content: bytes) -> None:
    stage.add(0, [save({"b": 4 * OLD["b"]})])
    with pytest.raises(ModelError):
        stage.add(1, [save({"a": -OLD["a"]}), content])
    stage.add(1, [])
    assert equal(staged(stage.complete(base)), {**OLD, "b": 4 * OLD["b"]})


def test_the_last_two_checkpoints_are_kept(stage: StagedWeights, base: Path) -> None:
    transfers, paths = WeightTransfers(stage, base, NoUpdateGroups("none here")), []
    for value in range(4):
        stage.add(0, [save({"a": torch.full((2, 3), float(value))})])
        paths.append(stage.complete(base))
        transfers.on_loaded(paths[-1])
    assert [path.is_dir() for path in paths] == [False, False, True, True]
    assert base.is_dir()
    transfers.close()
    stage.remove()
    assert not paths[-1].exists()


def test_refused_checkpoints_are_removed_if_staged_and_not_served(stage: StagedWeights, base: Path) -> None:
    transfers, paths = WeightTransfers(stage, base, NoUpdateGroups("none here")), []
    for value in range(2):
        stage.add(0, [save({"a": torch.full((2, 3), float(value))})])
        paths.append(stage.complete(base))
    transfers.on_loaded(paths[0])
    stage.add(0, [save({"a": OLD["a"]})])
    paths.append(stage.complete(base))
    for path in (*paths, base):
        transfers.on_refused(path)
    assert [path.is_dir() for path in (*paths, base)] == [True, False, False, True]
    transfers.close()


def test_checkpoints_outlive_a_supervised_scheduler(stage: StagedWeights, base: Path, tmp_path: Path) -> None:
    stage.add(0, [save({"a": OLD["a"]})])
    path = stage.complete(base)
    stage.add(0, [save({"b": OLD["b"]})])
    stage.remove_unfinished()
    assert path.is_dir()
    with pytest.raises(ModelError, match="it has 0 of the 1 parts"):
        stage.add(1, [])
    remove_unclaimed(path.parent)
    assert path.is_dir(), "a running scheduler uses it"
    stage.close()
    remove_unclaimed(path.parent)
    assert not path.parent.exists()
    again = StagedWeights(lambda: tmp_path / "state", "scheduler/0")
    again.add(0, [save({"b": OLD["b"]})])
    again.remove_unfinished()
    assert not path.parent.exists()


def end_of(transfers: WeightTransfers, request: WeightTransferReq, *frames: bytes) -> Outcome:
    transfers.request("frontend-0", request, frames)
    while not (ended := transfers.pop_finished()):
        assert transfers.busy
    [(source, outcome)] = ended
    assert source == "frontend-0"
    return outcome


def test_transfers_end_in_a_reply_or_in_an_update(stage: StagedWeights, base: Path) -> None:
    transfers = WeightTransfers(stage, base, NoUpdateGroups("none here"))
    part = UpdateWeightsFromTensorReq(id="1", part=0, last=False)
    assert end_of(transfers, part, save({"a": OLD["a"]})) == ControlReply(id="1", ok=True)
    update = end_of(transfers, UpdateWeightsFromTensorReq(id="2", part=1, last=True))
    assert isinstance(update, UpdateWeightsFromDiskReq)
    assert equal(staged(Path(update.path)), OLD)
    refused = end_of(transfers, UpdateWeightsFromTensorReq(id="3", part=1, last=True))
    assert isinstance(refused, ControlReply)
    assert (refused.ok, "it has 0 of the 1 parts" in refused.message) == (False, True)
    rows = end_of(transfers, GetWeightsByNameReq(id="4", name="a", rows=1))
    assert rows == ControlReply(id="4", ok=True, message="[[0.0, 1.0, 2.0]]")
    transfers.close()


def test_rows_are_those_of_the_files(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tensor in OLD.items():
        assert json.loads(rows_of(base, name, 2)) == tensor[:2].float().tolist()
    with pytest.raises(ModelError, match="no tensor 'e'"):
        rows_of(base, "e", 2)
    monkeypatch.setattr(staged_weights, "_MOST_VALUES", 3)
    with pytest.raises(ModelError, match="lower truncate_size"):
        rows_of(base, "a", 2)
