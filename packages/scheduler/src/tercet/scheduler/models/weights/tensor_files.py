"""Access to safetensors and GGUF files with one error type for all faults."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tercet.kernels.ops.quantized import QuantizedWeight, pack_int4
from tercet.scheduler.model_files import reading


class GGUFTensors:
    """The tensors of a GGUF file, dequantized one at a time to float32."""

    def __init__(self, path: Path) -> None:
        from tercet.scheduler.gguf.gguf_directory import stored_tensors
        from tercet.scheduler.gguf.gguf_file import map_file
        from tercet.scheduler.gguf.gguf_values import GGUFValues

        self._file = map_file(path)
        self._values = GGUFValues(self._file, stored_tensors(path))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor's values in float32; bytes of MXFP4 as they are."""
        return torch.from_numpy(self._values.array(name))

    def get_blocks(self, name: str) -> QuantizedWeight | None:
        """Return a matrix in few bits as it is stored, with its scales and minimums; None for any other tensor."""
        blocks = self._values.blocks(name)
        if blocks is None:
            return None
        codes = torch.from_numpy(blocks.codes)
        return QuantizedWeight(
            format="int4" if blocks.bits == 4 else "int8",
            codes=pack_int4(codes) if blocks.bits == 4 else codes,
            scales=torch.from_numpy(blocks.scales),
            zeros=torch.zeros_like(torch.from_numpy(blocks.scales)) if blocks.bits == 4 else None,
            block=(1, blocks.block),
            minimums=None if blocks.minimums is None else torch.from_numpy(blocks.minimums),
        )

    def close(self) -> None:
        """Close the mapped file. Tensors stay valid, because they are copies."""
        self._file.close()


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file whose header was read, like `safe_open`: its tensors are views of the mapped file.

    Those of a GGUF file are copies. Raise ModelError for a file that the library refuses for any reason.
    """
    with ExitStack() as stack:
        with reading(str(path)):
            if path.suffix == ".gguf":
                file: Any = GGUFTensors(path)
                stack.callback(file.close)
            else:
                file = stack.enter_context(safe_open(path, framework="pt"))
        yield file
