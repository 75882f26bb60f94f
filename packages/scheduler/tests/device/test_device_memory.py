"""What a container's limit leaves, as both versions of cgroups tell it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tercet.scheduler.device import device_memory
from tercet.scheduler.device.device_memory import available_bytes, shares_host_memory, total_bytes

STAT = "anon 300\nfile 250\ninactive_file 150\nactive_file 90\nslab 10\n"
"""Of 560 bytes: files that are mapped into memory, weights among them, are given up for whoever needs theirs."""


def write(directory: Path, **files: str) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text, encoding="ascii")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(device_memory, "_CGROUP", tmp_path)
    return tmp_path


def available() -> int:
    return available_bytes(torch.device("cpu"))


def total() -> int:
    return total_bytes(torch.device("cpu"))


def test_what_files_take_is_free(cgroup: Path) -> None:
    write(cgroup, memory__max="1000\n", memory__current="560\n", memory__stat=STAT)
    assert available() == 1000 - 560 + 150 + 90
    assert total() == 1000


def test_the_first_version_of_cgroups_has_other_names(cgroup: Path) -> None:
    write(cgroup / "memory", memory__limit_in_bytes="1000\n", memory__usage_in_bytes="560\n", memory__stat=STAT)
    assert available() == 680
    assert total() == 1000


def test_beyond_the_limit_there_is_nothing(cgroup: Path) -> None:
    write(cgroup, memory__max="100\n", memory__current="560\n", memory__stat=STAT)
    assert available() == 0


def test_without_a_limit_it_is_what_the_machine_has(cgroup: Path) -> None:
    alone = available()
    write(cgroup, memory__max="max\n", memory__current="560\n", memory__stat=STAT)
    assert min(alone, available()) > 1 << 20
    assert total() > available()


@pytest.mark.parametrize("integrated", [0, 1])
def test_a_gpu_without_memory_of_its_own_has_what_the_machine_has(
    integrated: int, cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(is_integrated=integrated))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (77, 100))
    write(cgroup, memory__max="1000\n", memory__current="560\n", memory__stat=STAT)
    gpu = torch.device("cuda")
    assert available_bytes(gpu) == (available() if integrated else 77)
    assert shares_host_memory(gpu) == bool(integrated)
    assert shares_host_memory(torch.device("cpu"))
