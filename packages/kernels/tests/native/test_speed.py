"""What makes native kernels worth having, as ratios: processor time of one thread, the best of calls taken in turns.

The bounds are far from what is measured, so that only a kernel that lost its instruction set or its idea passes them.
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tercet.kernels.native.library import FOLDER, Library, load_library
from tercet.kernels.native.linear import Quantization, pack_linear
from tercet.kernels.native.ops import NativeOps
from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import sample

pytestmark = pytest.mark.skipif(not (FOLDER / "libtercet_portable.so").is_file(), reason="there was no compiler")


@pytest.fixture
def best() -> Iterator[Library]:
    """The library for this processor, on one thread; torch too."""
    library, threads = load_library(), torch.get_num_threads()
    before = library.threads
    library.set_threads(1)
    torch.set_num_threads(1)
    yield library
    library.set_threads(before)
    torch.set_num_threads(threads)


def ratio(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """Time of `one` over that of `other`."""
    seconds = [float("inf"), float("inf")]
    for call in (one, other) * rounds:
        index = int(call is other)
        start = time.thread_time()
        call()
        seconds[index] = min(seconds[index], time.thread_time() - start)
    return seconds[0] / seconds[1]


def test_a_draw_takes_a_fraction_of_what_torch_takes(best: Library) -> None:
    logits = torch.randn(1, 128_256, generator=torch.Generator().manual_seed(0)) * 3
    noise, temperature = NoiseKey(*torch.tensor([[5], [6], [0], [3]])), torch.ones(1)
    native = NativeOps(best)
    assert (
        ratio(
            lambda: native.sample(logits, temperature, None, noise),
            lambda: sample(logits, temperature, None, noise),
            rounds=8,
        )
        < 0.4  # a fifteenth with AVX2
    )


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 1.2), ("int4", 1.3)])
def test_rounded_weights_are_no_slower_to_multiply(best: Library, quantization: Quantization, bound: float) -> None:
    if best.level == "portable":
        pytest.skip("a portable build multiplies small integers one by one")
    weight, x = torch.randn(768, 576), torch.randn(32, 576)
    rounded, plain = pack_linear(best, weight, quantization=quantization), pack_linear(best, weight)
    assert ratio(lambda: rounded(x), lambda: plain(x), rounds=40) < bound  # 0.8 and 0.9 with AVX2
