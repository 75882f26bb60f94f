import numpy as np
import pytest
import torch

from packages.scheduler.tests.device.scarce_memory import take_memory
from tercet.scheduler.device.staging import Array, HostToDevice, pack_into, starts, unpack

ARRAYS: list[Array] = [
    np.array([3, -1, 1 << 62]),
    np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)[:, 1:],  # 16 bytes, not contiguous
    np.array([], dtype=np.int64),
    np.array([0.5, -np.inf, -1e30], dtype=np.float32),  # 12 bytes
    np.array([7]),
]


def test_many_arrays_are_one_piece_and_come_out_as_they_went_in() -> None:
    staged = torch.full((starts(ARRAYS)[-1],), 255, dtype=torch.uint8)
    pack_into(staged, ARRAYS)
    views = unpack(staged.clone(), ARRAYS)  # as the device has them
    for view, array in zip(views, ARRAYS, strict=True):
        assert torch.equal(view, torch.from_numpy(array))
        assert view.dtype == torch.from_numpy(array).dtype
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert starts(ARRAYS) == [0, 32, 48, 48, 64, 80], "each where Triton knows it without compiling again"


def test_nothing_is_sent_as_nothing() -> None:
    assert unpack(torch.empty(starts([])[-1], dtype=torch.uint8), []) == []
    assert [tensor.tolist() for tensor in HostToDevice(torch.device("cpu")).send([np.array([], dtype=np.int64)])] == [
        []
    ]


def test_on_a_cpu_nothing_is_copied() -> None:
    (tensor,) = HostToDevice(torch.device("cpu")).send([ARRAYS[0]])
    assert tensor.data_ptr() == ARRAYS[0].ctypes.data


@pytest.mark.parametrize("scarce", [False, True])
def test_numbers_are_sent_from_any_memory_where_none_can_be_pinned(
    scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = take_memory(monkeypatch, scarce=scarce)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _, non_blocking: tensor.clone() if non_blocking else None)
    to_device = HostToDevice(torch.device("cuda"))
    for sent, array in zip(to_device.send(ARRAYS), ARRAYS, strict=True):
        assert torch.equal(sent, torch.from_numpy(array))
    staged = to_device.stage(5)
    assert (staged.shape, staged.dtype) == ((5,), torch.int64)
    assert pinned.count(True) == 2
