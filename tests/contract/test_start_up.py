"""Parts with an unsafe configuration do not start: one line says why, and the exit status says not to retry."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tercet.protocol.transport.keys import write_keys

PARTS = ("frontend", "scheduler", "detokenizer")
EXIT_CONFIG = 2

Damage = Callable[[Path, str], object]
WRONG: dict[str, tuple[str, Damage | None, str]] = {
    "no keys, any address": ("tcp://0.0.0.0:0", None, "tcp://0.0.0.0:0: tcp:// needs keys"),
    "no keys, loopback": ("tcp://127.0.0.1:0", None, "or --insecure-loopback"),
    "no such folder": ("tcp://127.0.0.1:0", lambda keys, part: (keys / part).rename(keys / "away"), "secret: No such"),
    "no secret": ("tcp://127.0.0.1:0", lambda keys, part: (keys / part / "secret").unlink(), "secret: No such file"),
    "a secret for all to read": (
        "tcp://127.0.0.1:0",
        lambda keys, part: (keys / part / "secret").chmod(0o644),
        "within others' reach (mode 0644)",
    ),
    "a secret cut short": (
        "tcp://127.0.0.1:0",
        lambda keys, part: (keys / part / "secret").write_text("short"),
        "holds no key",
    ),
    "the keys of another role": (
        "tcp://127.0.0.1:0",
        lambda keys, part: (keys / "supervisor").rename((keys / part).rename(keys / "away").with_name(part)),
        "is the secret of supervisor",
    ),
    "keys that cannot be read do not matter less on ipc": (
        "ipc:///tmp/tercet-never-bound",
        lambda keys, part: (keys / part / "scheduler.public").unlink(),
        "scheduler.public: No such file",
    ),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_safe_does_not_start(tmp_path: Path, part: str, wrong: str) -> None:
    """CVE-2026-26220 and similar: missing authentication must refuse, not admit everyone."""
    listen, damage, complaint = WRONG[wrong]
    words = ["--listen", listen]
    if damage:
        write_keys(tmp_path)
        damage(tmp_path, part)
        words += ["--keys", str(tmp_path / part)]
    command = [sys.executable, "-m", f"tercet.{part}", *words, *(["--port=0"] if part == "frontend" else [])]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ended.returncode == EXIT_CONFIG
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"tercet-{part}: ")
    assert complaint in line


@pytest.mark.parametrize("part", ["scheduler", "detokenizer"])
def test_a_probe_says_what_it_lacks_and_tells_nobody_there_from_bad_keys(tmp_path: Path, part: str) -> None:
    write_keys(tmp_path)
    probe = [sys.executable, "-m", f"tercet.{part}", "probe", "--listen", "tcp://127.0.0.1:1", "--timeout", "0.2"]
    without = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert (without.returncode, "tcp://127.0.0.1:1: tcp:// needs keys" in without.stderr) == (EXIT_CONFIG, True)
    nobody = subprocess.run([*probe, "--keys", str(tmp_path / part)], timeout=60, check=False, capture_output=True)
    assert nobody.returncode == 1


def test_a_frontend_that_is_not_there_is_not_healthy() -> None:
    probe = [sys.executable, "-m", "tercet.frontend", "probe", "http://127.0.0.1:1", "--timeout", "0.2"]
    ended = subprocess.run(probe, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
