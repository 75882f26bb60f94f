"""Adapters are read in threads, once for all who want them, and kept as long as somebody may."""

import threading
import time

import pytest

from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.executor.lora.adapter_files import Adapter, AdapterError
from tercet.scheduler.executor.lora.adapters import AdapterLoader, adapter_loader


def named(name: str) -> LoRAAdapter:
    return LoRAAdapter(f"/adapters/{name}", name * 64)


A, B, C = map(named, "abc")


class Files:
    """What is read, as soon as it may be."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.may.set()
        self.read: list[LoRAAdapter] = []
        self.sha256 = "0" * 64

    def __call__(self, adapter: LoRAAdapter) -> Adapter:
        assert self.may.wait(10)
        self.read.append(adapter)
        if adapter.path.endswith("bad"):
            raise AdapterError("it is\nbad " + "x" * 500)
        return Adapter(adapter.sha256 or self.sha256, 4, {})


def have(loader: AdapterLoader, *adapters: LoRAAdapter) -> None:
    """Want adapters, and wait for them."""
    for each in adapters:
        loader.request(each)
    settle(loader)


def sha256_of(loader: AdapterLoader, adapter: LoRAAdapter) -> str:
    loaded = loader.value_of(adapter)
    return "" if loaded is None else loaded.sha256


def settle(loader: AdapterLoader) -> list[LoRAAdapter]:
    """All that is read by the time that everything is."""
    read = []
    deadline = time.monotonic() + 10
    while loader.busy:
        assert time.monotonic() < deadline
        read += loader.pop_loaded()
    return read


def test_an_adapter_is_read_once_and_told_once() -> None:
    files = Files()
    files.may.clear()
    loader = adapter_loader(files, spare=2)
    assert [loader.request(A), loader.request(A), loader.request(B)] == [False] * 3
    assert loader.pop_loaded() == []
    files.may.set()
    assert {*settle(loader)} == {A, B}
    assert {*files.read} == {A, B}
    assert len(files.read) == 2
    assert loader.request(A)
    assert (loader.error_of(A), sha256_of(loader, A), loader.get(A).result().rank) == ("", A.sha256, 4)
    assert not loader.busy
    loader.close()


def test_what_fails_is_told_in_one_line_and_tried_again() -> None:
    files = Files()
    loader = adapter_loader(files, spare=2)
    bad = named("bad")
    have(loader, bad)
    assert loader.error_of(bad).startswith("it is bad xxx")
    assert len(loader.error_of(bad)) == 400
    assert sha256_of(loader, bad) == ""
    with pytest.raises(AdapterError):
        loader.get(bad).result()
    loader.retain(())
    have(loader, bad)
    assert files.read == [bad, bad]
    loader.close()


def test_an_adapter_path_is_read_anew_and_identified_by_its_contents() -> None:
    files = Files()
    loader = adapter_loader(files, spare=2)
    path = LoRAAdapter("/adapters/a")
    for sha256 in ("1" * 64, "2" * 64):
        files.sha256 = sha256
        assert not loader.request(path)
        assert settle(loader) == [path]
        assert sha256_of(loader, path) == sha256
    assert files.read == [path, path]
    assert loader.request(LoRAAdapter("/adapters/a", "2" * 64))
    assert loader.request(LoRAAdapter("/adapters/a", "1" * 64))  # who has it goes on with it
    assert files.read == [path, path]
    loader.close()


def test_some_that_nobody_has_are_kept() -> None:
    files = Files()
    loader = adapter_loader(files, spare=1)
    for each in (A, B, C):
        have(loader, each)
    loader.request(B)
    loader.retain([A])
    have(loader, A, B)
    assert files.read == [A, B, C]
    have(loader, C)
    assert files.read == [A, B, C, C]
    loader.close()


def test_what_is_unloaded_stays_for_those_who_have_it_and_for_nobody_else() -> None:
    files = Files()
    loader = adapter_loader(files, spare=2)
    have(loader, A)
    loader.unload(A)
    loader.retain([A])
    assert loader.get(A).result().rank == 4
    assert files.read == [A]
    loader.retain([])
    have(loader, A)
    assert files.read == [A, A]
    loader.retain([])
    have(loader, A)
    assert files.read == [A, A]
    loader.close()


def test_adapters_beyond_the_limit_wait_to_be_read() -> None:
    files = Files()
    loader = adapter_loader(files, spare=2, most=2)
    have(loader, A)
    have(loader, B)
    assert not loader.request(C)
    for _ in range(3):
        loader.retain([A, B, C])
        assert loader.pop_loaded() == []
    loader.retain([A, C])  # which makes room, for there is none to spare
    assert settle(loader) == [C]
    assert files.read == [A, B, C]
    assert not loader.request(B)
    loader.retain([A, C])  # whoever wanted it is gone
    assert loader.pop_loaded() == [B]
    assert (loader.error_of(B), sha256_of(loader, B)) == ("", "")
    assert files.read == [A, B, C]
    loader.close()


def test_what_is_being_read_is_not_forgotten() -> None:
    files = Files()
    files.may.clear()
    loader = adapter_loader(files, spare=0)
    loader.request(A)
    loader.retain([])
    files.may.set()
    assert settle(loader) == [A]
    assert files.read == [A]
    loader.close()
