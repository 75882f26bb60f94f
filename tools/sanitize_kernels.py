"""Tests of the native kernels in a build with address and undefined-behavior sanitizers.

python tools/sanitize_kernels.py [PYTEST ARGUMENT ...]: needs GCC. The exit status is that of the tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "packages" / "kernels"
TESTS = [KERNELS / "tests/native", KERNELS / "tests/attention", ROOT / "packages/scheduler/tests/models/test_native.py"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]


PLUGIN = f"""
from pathlib import Path
from packages.kernels.tests import emulated
from tercet.kernels.native import library
library.FOLDER = Path(__file__).parent
emulated.OPTIONS = {SANITIZERS}
"""


def main(arguments: list[str]) -> int:
    """Build into a separate folder, preload the sanitizer's runtime, and run the tests."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, KERNELS / "hatch_build.py", folder, *SANITIZERS], check=True)
        (Path(folder) / "sanitized.py").write_text(PLUGIN, encoding="utf-8")
        compiler = shutil.which("c++") or "c++"
        libraries = []
        for name in ("libasan.so", "libstdc++.so"):  # libasan sees exceptions only if it finds libstdc++ when it starts
            asked = [compiler, f"-print-file-name={name}"]
            libraries.append(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # leaks are Python's own
            "PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH")))),
        }
        timed = f"--ignore={KERNELS / 'tests/native/test_speed.py'}"  # sanitizers are slow, and unevenly
        command = [sys.executable, "-m", "pytest", "-p", "sanitized", timed, *map(str, TESTS), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
