# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Program that compares launches by `launch` with those by Triton: each case runs three times, and once by Triton.

A stub driver records the launches. For each case the program prints whether they were equal, and how often each of the
three called Triton. For some operations it prints how many kernels each launches, and how often a second call of it
called Triton.
"""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from tercet.kernels.tools.launch_specs import CASES
from tercet.kernels.triton.launch_cache import launch

OPERATIONS = ("moe, prefill", "moe, mxfp4, prefill", "sample, filters", "likeliest", "logprobs", "penalties")
"""Operations that run outside of graphs: of a layer of a prefill, and of a step's sampling."""

launched: list[tuple[Any, ...]] = []


class Launcher:
    def __init__(self, *_: object) -> None:
        pass

    def __call__(self, *given: Any) -> None:
        *where, _packed, _metadata, _enter, _leave = given[:9]
        addresses = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in given[9:]]
        launched.append((*where, len(addresses), *addresses[:-2]))  # which constants there are is settled


class Utils:
    loaded = 0

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return 0, self.loaded, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class Device:
    launcher_cls = Launcher
    utils = Utils()
    current = stream = 0

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, _: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@triton.jit
def kernel(out_ptr, x_ptr, bias_ptr, size, factor, SIZE: tl.constexpr, PLUS: tl.constexpr):  # noqa: N803
    column = tl.arange(0, SIZE)
    x = tl.load(x_ptr + column, mask=column < size) * factor + PLUS
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, mask=column < size)
    tl.store(out_ptr + column, x, mask=column < size)


class Hook:
    def __call__(self, _: object) -> None:
        pass


def main() -> None:
    device = Device()
    driver.set_active(device)
    asked, run = [], JITFunction.run

    def noted(self: Any, *given: Any, **named: Any) -> Any:
        asked.append(self)
        return run(self, *given, **named)

    JITFunction.run = noted
    x = torch.zeros(256)
    tensors = [(x, x, None), (x, x[4:], x), (x, x[1:], x), (x[1:], x, x), (x, x[2:], x), (x.double(), x, None)]
    numbers: list[tuple[float, float]] = [(16, 1.0), (17, 2.0), (1, 2.0), (16, 1), (16, 16), (1 << 40, 1.0)]
    cases: list[Any] = [((3,), each, (16, 1.0), {"SIZE": 16, "PLUS": 1}) for each in tensors]
    cases += [((2, 3), (x, x, None), each, {"SIZE": 16, "PLUS": 1}) for each in numbers]
    options: list[dict[str, Any]] = [{"PLUS": 2, "SIZE": 16}, {"SIZE": 32, "PLUS": 1, "num_warps": 8}]
    cases += [((1, 2, 3), (x, x, x), (16, 2.0), each) for each in options]

    def tried(name: str, case: Any) -> None:
        grid, given, others, constants = case
        times = []
        for call in (launch, launch, launch, lambda k, g, t, n, **c: k[g](*t, *n, **c)):
            asked.clear()
            call(kernel, grid, given, others, **constants)
            times.append(len(asked))
        same = all(each == launched[-1] for each in launched[-4:-1])
        sys.stdout.write(f"{name} {'same' if same else launched[-4:]} {times[0]} {times[1]} {times[2]}\n")

    for number, case in enumerate(cases):
        tried(f"case-{number}", case)
    device.stream = 7
    tried("stream", cases[0])
    device.current = 1
    tried("device", cases[0])
    hook = Hook()
    knobs.runtime.launch_enter_hook.add(hook)
    tried("hooked", cases[0])
    knobs.runtime.launch_enter_hook.remove(hook)
    tried("unhooked", cases[0])
    for name in OPERATIONS:
        CASES[name]()
        asked.clear()
        launched.clear()
        CASES[name]()
        sys.stdout.write(f"{name.replace(', ', '-')} {len(launched)} {len(asked)}\n")


if __name__ == "__main__":
    main()
