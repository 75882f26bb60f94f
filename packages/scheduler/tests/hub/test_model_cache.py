"""`tercet-scheduler pull` and `models`: downloads from a hub, and the list of what is on the disk."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.scheduler.tests.gguf.gguf_checkpoints import write_gguf
from packages.scheduler.tests.hub.fake_hub import FakeHub, fake_hub
from tercet.scheduler.hub.model_cache import StoredModel, pull, readable_size
from tercet.scheduler.model_files import KNOWN_NAMES, ModelError

Checkpoints = Callable[[str], Path]


def run(hub: FakeHub, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the hub, whose library reads its address when it is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "tercet.scheduler", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_a_download_that_broke_off_goes_on(checkpoints: Checkpoints, tmp_path: Path) -> None:
    files = {**contents(checkpoints("llama")), "README.md": b"not wanted"}
    wanted = files.keys() - {"README.md"}
    size = readable_size(sum(len(files[name]) for name in wanted))
    with fake_hub("org/tiny", files) as hub:
        hub.lost = {"model.safetensors"}
        broken = run(hub, tmp_path, "pull", "org/tiny")
        assert broken.returncode == 2
        assert broken.stderr.splitlines()[-1].startswith("tercet-scheduler: org/tiny could not be downloaded from")
        listed = run(hub, tmp_path, "models").stdout.splitlines()
        assert listed[0].split()[0] == "embedded"
        assert "were not downloaded" in next(line for line in listed if line.startswith("org/tiny "))

        hub.lost = set()
        pulled = run(hub, tmp_path, "pull", "org/tiny")
        assert pulled.stdout == f"org/tiny: {size}, ready for `tercet serve org/tiny`\n"
        assert "100%" in pulled.stderr
        assert sorted(hub.sent) == sorted(wanted)
        listed = run(hub, tmp_path, "models").stdout.splitlines()
        assert next(line for line in listed if line.startswith("org/tiny ")).split() == ["org/tiny", *size.split()]

        unknown = run(hub, tmp_path, "pull", "org/other")
        assert unknown.returncode == 2
        assert "gives access to no model of that id" in unknown.stderr


def test_a_gguf_file_of_a_repository_is_downloaded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    file = write_gguf(checkpoints("qwen3"), tmp_path / "m.gguf")
    with fake_hub("org/tiny", {"m.gguf": file.read_bytes(), "other.gguf": b"not wanted"}) as hub:
        refused = run(hub, tmp_path, "pull", "org/tiny")
        assert "org/tiny holds GGUF files: name one of them behind a colon, as in :m.gguf" in refused.stderr
        pulled = run(hub, tmp_path, "pull", "hf:org/tiny:m.gguf")
        assert pulled.stdout.endswith("ready for `tercet serve hf:org/tiny:m.gguf`\n")
        assert hub.sent == ["m.gguf"]
        listed = run(hub, tmp_path, "models").stdout.splitlines()
        assert "as in :m.gguf" in next(line for line in listed if line.startswith("org/tiny "))
        assert "cannot be downloaded" in run(hub, tmp_path, "pull", "org/other:m.gguf").stderr


def test_only_models_are_downloaded(tmp_path: Path, checkpoints: Checkpoints) -> None:
    with fake_hub("org/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}) as hub:
        refused = run(hub, tmp_path, "pull", "org/adapter")
    assert refused.returncode == 2
    assert "org/adapter is an adapter, not a model" in refused.stderr
    with pytest.raises(ModelError, match="is on this machine, and needs no download"):
        pull(str(checkpoints("llama")))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_400, "99.4 kB"), (99_960, "100 kB"), (999_499, "999 kB")),
        *((999_500, "1.0 MB"), (1_234_567_890, "1.2 GB"), (5 * 10**15, "5000 TB")),
    ],
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable_size(size) == text


def test_a_line_says_why_a_model_cannot_be_served() -> None:
    assert StoredModel("a/b", 1000).line(5) == "a/b      1.0 kB"
    assert StoredModel("a/b", 1000, "is empty").line(5).endswith("1.0 kB  is empty")


def test_short_names_are_no_ids() -> None:
    assert all("/" not in name and name == name.lower() and "/" in hub_id for name, hub_id in KNOWN_NAMES.items())
