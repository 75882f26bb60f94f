"""Experts are packed from the files they lie in: memory holds no second copy of them."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.kernels.tests.forks import Forks
from packages.scheduler.tests.conftest import MIXTURES
from tercet.kernels.native.library import load_library, missing_library
from tercet.scheduler.models.native import NativeCausalLM
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights

pytestmark = pytest.mark.skipif(bool(missing_library()), reason=missing_library())

_STATUS = Path("/proc/self/status")
_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "pad_token_id": None,
}
_SIZES = {"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 512, "intermediate_size": 512}
_EXPERTS_BYTES = 2 * 16 * 3 * 256 * 512 * 4


def anonymous() -> int:
    """Bytes of this process's memory that are no file's."""
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def watched() -> Iterator[list[int]]:
    """What anonymous memory comes to meanwhile, beyond what there was."""
    seen, done, before = [0], threading.Event(), anonymous()

    def watch() -> None:
        while not done.wait(0.0005):
            seen.append(anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def peak_of_loading(checkpoint: Path) -> int:
    """Bytes of anonymous memory that loading and packing `checkpoint` comes to, at most."""
    model = build_model(load_config(checkpoint))
    library = load_library()
    with torch.inference_mode(), watched() as seen:
        load_weights(model, checkpoint, keep_mapped=True)
        NativeCausalLM(model, library, quantization="int4")
    return max(seen)


@pytest.fixture(scope="module")
def measuring() -> Iterator[Forks]:
    forks = Forks(__spec__.name, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)})
    yield forks
    forks.close()


@pytest.mark.skipif(
    not _STATUS.is_file() or "RssAnon" not in _STATUS.read_text(encoding="ascii"), reason="nothing to ask"
)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_moe/fused"])
def test_experts_in_full_are_never_in_memory_beside_those_that_are_packed(
    name: str, measuring: Forks, tmp_path: Path
) -> None:
    import transformers

    family, _, form = name.partition("/")
    prefix, extra = MIXTURES[family]
    config: Any = getattr(transformers, f"{prefix}Config")(**{**extra, **_SHAPE, **_SIZES, "mlp_only_layers": []})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.save_pretrained(tmp_path, save_original_format=not form)
    # glibc raises the size from which it maps blocks by what a process has freed, and keeps what lies between
    # smaller ones: a process of its own, with the size set, measures what is in use and not what came before.
    peak = int(measuring.run("-m", __spec__.name, str(tmp_path)).stdout.splitlines()[-1])
    assert 0 < peak < _EXPERTS_BYTES / 4  # 4.5 of 32 bits are left of them


if __name__ == "__main__":
    sys.stdout.write(f"{peak_of_loading(Path(sys.argv[1]))}\n")
