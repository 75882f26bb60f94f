"""For every test: without a GPU, Triton's kernels run in its interpreter, which it must know before it is imported."""

import os
from pathlib import Path

if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
