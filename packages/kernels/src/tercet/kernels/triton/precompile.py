"""Compilation of kernels before they are launched, by several processes at a time, into Triton's cache on disk.

`recorded` notes the kernels that some calls would compile. `compile_all` has worker processes compile them, which need
no GPU: a later launch finds each in the cache. A kernel that fails here is compiled by its first launch.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

_SECONDS = 600.0
"""Seconds after which workers are ended."""
_UNFILLED = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

Report = Callable[[int, int], None]
"""A function of (kernels compiled so far, all)."""


class CompileTarget:
    """Stub driver of an absent GPU."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]  # kernels are cached by device: one per architecture

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@dataclass(frozen=True)
class Recorded:
    """Kernel of a launch: its module and name, Triton's description of its specialization, and the GPU's target."""

    module: str
    name: str
    specialization: str
    backend: str
    architecture: int
    warp_size: int
    source: str
    """Hash of the kernel's source and all that it calls."""

    @property
    def mark(self) -> Path:
        """The file that says that the kernel is in the cache."""
        content = json.dumps([triton.__version__, *vars(self).values()])
        return Path(str(knobs.cache.dir)) / "tercet-compiled" / hashlib.sha256(content.encode()).hexdigest()


class _Zeroed(TorchFunctionMode):
    """Mode in which new tensors are zeros, because no kernel fills them: ids among them must be valid."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _UNFILLED else result


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """Record the kernels that would be compiled, each once, and launch none of them."""
    found: dict[Recorded, None] = {}
    kernels: list[Recorded] = []

    def take(fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002
        target = driver.active.get_current_target()
        place = target.backend, target.arch, target.warp_size
        specialization = compile["specialization_data"]
        found[Recorded(fn.module, fn.name, specialization, *place, fn.jit_function.cache_key)] = None
        return True

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, take
    try:
        with _Zeroed():
            yield kernels
    finally:
        knobs.runtime.jit_cache_hook = before
        kernels += found


def missing(kernels: Sequence[Recorded]) -> list[Recorded]:
    """Return the kernels that were not compiled on this machine yet."""
    return [kernel for kernel in kernels if not kernel.mark.exists()]


def compile_all(kernels: Sequence[Recorded], workers: int, report: Report) -> list[str]:
    """Compile kernels by that many processes at a time. Return a line for each that failed."""
    waiting, lock, failures, done = iter(kernels), threading.Lock(), list[str](), 0

    def finish(kernel: Recorded, trouble: str) -> None:
        nonlocal done
        if trouble:
            failures.append(f"{kernel.name}: {trouble}")
        else:
            kernel.mark.parent.mkdir(parents=True, exist_ok=True)
            kernel.mark.touch()
        done += 1
        report(done, len(kernels))

    def work(_: int) -> None:
        with _worker() as ask:
            while True:
                with lock:
                    kernel = next(waiting, None)
                if kernel is None:
                    return
                trouble = ask(kernel)
                with lock:
                    finish(kernel, "its worker ended" if trouble is None else trouble)
                if trouble is None:
                    return

    with ThreadPoolExecutor(workers, thread_name_prefix="compile") as threads:
        list(threads.map(work, range(workers)))
    return failures


@contextmanager
def _worker() -> Iterator[Callable[[Recorded], str | None]]:
    """Yield a function that has a worker process compile a kernel; it returns the problem, or None without a worker."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdin is not None
    assert process.stdout is not None
    given, answers, limit = process.stdin, process.stdout, threading.Timer(_SECONDS, process.kill)

    def ask(kernel: Recorded) -> str | None:
        try:
            given.write(json.dumps(vars(kernel)) + "\n")
            given.flush()
        except BrokenPipeError:
            return None
        answer = answers.readline()
        return str(json.loads(answer)) if answer else None

    limit.start()
    try:
        yield ask
    finally:
        with suppress(BrokenPipeError):  # of a worker that has ended
            given.close()
        process.wait()
        limit.cancel()
        answers.close()


def compile_here(kernel: Recorded) -> None:
    """Compile a kernel into the cache on disk. Raise the compiler's errors."""
    driver.set_active(CompileTarget(GPUTarget(kernel.backend, kernel.architecture, kernel.warp_size)))
    function: Any = getattr(import_module(kernel.module), kernel.name)
    function.preload(kernel.specialization)


def _serve() -> None:
    """Compile the kernel of each line of stdin, and answer with a line: its problem, or an empty string."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers may print
    for line in sys.stdin:
        trouble = ""
        try:
            compile_here(Recorded(**json.loads(line)))
        except Exception as error:  # any error of a compiler: the kernel is compiled again by its first launch
            trouble = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        answers.write(json.dumps(trouble) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
