"""Access to safetensors and GGUF files with one error type for all faults."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tercet.scheduler.model_files import reading


class _GGUFTensors:
    """The tensors of a GGUF file, dequantized one at a time to float32."""

    def __init__(self, path: Path) -> None:
        from tercet.scheduler.gguf.gguf_directory import stored_tensors
        from tercet.scheduler.gguf.gguf_values import GGUFValues, map_file

        self._file = map_file(path)
        self._values = GGUFValues(self._file, stored_tensors(path))

    def get_tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._values.array(name))

    def close(self) -> None:
        self._file.close()


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file whose header was read, like `safe_open`: its tensors are views of the mapped file.

    Those of a GGUF file are copies. Raise ModelError for a file that the library refuses for any reason.
    """
    with ExitStack() as stack:
        with reading(str(path)):
            if path.suffix == ".gguf":
                file: Any = _GGUFTensors(path)
                stack.callback(file.close)
            else:
                file = stack.enter_context(safe_open(path, framework="pt"))
        yield file
