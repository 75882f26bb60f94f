import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tercet.scheduler.model_files import (
    ModelError,
    file_hashes,
    model_identity,
    read_header,
    resolve_model,
    served_dtype,
    tokenizer_files,
    weight_files,
)

Checkpoints = Callable[[str], Path]


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A checkpoint to change."""
    return shutil.copytree(checkpoints("llama"), tmp_path / "model")


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("model") == tmp_path / "model"
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"


@pytest.mark.parametrize("name", ["", "/no/such/place", "../elsewhere", "a/b/c", "a b", "-x/y"])
def test_what_is_neither_a_directory_nor_an_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="neither a directory nor a Hugging Face id"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.zip"
    file.write_bytes(b"PK")
    with pytest.raises(ModelError, match=r"model\.zip' is an archive"):
        resolve_model(str(file))


def test_no_hub_is_one_line_within_seconds_and_needs_no_torch(tmp_path: Path) -> None:
    """The hub library reads its address when it is imported, hence a process of its own."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    script = (
        "import sys; from tercet.scheduler.model_files import ModelError, resolve_model\n"
        "try: resolve_model('some/model')\n"
        "except ModelError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    started = time.monotonic()
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 10
    message, torch_imported = done.stdout.splitlines()
    assert message.startswith(
        f"'some/model' is not a directory, not in the local cache, and {endpoint} cannot be reach"
    )
    assert torch_imported == "False"


def test_a_model_in_the_cache_needs_no_hub(copy: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    copy.rename(repo / "snapshots" / ("0" * 40))
    script = "from tercet.scheduler.model_files import resolve_model; print(resolve_model('some/model'))"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(repo / "snapshots" / ("0" * 40))


def test_the_files_a_frontend_asks_for(checkpoints: Checkpoints) -> None:
    files = tokenizer_files(checkpoints("llama"))
    assert sorted(files) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads(files["tokenizer.json"])["model"]["type"] == "BPE"
    assert file_hashes({"a": b"abc"}) == {"a": hashlib.sha256(b"abc").hexdigest()}


def test_every_further_template_is_sent(copy: Path) -> None:
    folder = copy / "additional_chat_templates"
    folder.mkdir()
    for name in ("tool_use.jinja", "rag.jinja", "notes.txt"):
        (folder / name).write_text(name)
    found = {name: text for name, text in tokenizer_files(copy).items() if "/" in name}
    assert found == {f"additional_chat_templates/{name}": name.encode() for name in ("rag.jinja", "tool_use.jinja")}
    for number in range(70):
        (folder / f"{number}.jinja").touch()
    with pytest.raises(ModelError, match="more than 64 additional_chat_templates"):
        tokenizer_files(copy)


def test_auto_is_the_dtype_of_the_weights_where_that_is_not_slow(tmp_path: Path) -> None:
    served = {}
    for saved in ("float32", "bfloat16", "float16"):
        (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": saved}))
        places = [(slow, encoder) for slow in ("", "float16", "bfloat16") for encoder in (False, True)]
        served[saved] = [served_dtype(tmp_path, slow=slow, encoder=encoder) for slow, encoder in places]
        assert served_dtype(tmp_path, "float16", slow="float16") == "float16"
    assert served["float32"] == ["float32"] * 6
    assert served["bfloat16"] == [*["bfloat16"] * 4, "float16", "float32"]
    assert served["float16"] == ["float16", "float16", "bfloat16", "float32", "float16", "float16"]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("LlamaForCausalLM", "float16"), ("Gemma3ForCausalLM", "float32"), ("GptOssForCausalLM", "float32")],
)
def test_what_is_too_large_for_float16_is_never_put_in_it(architecture: str, dtype: str, tmp_path: Path) -> None:
    config = {"torch_dtype": "bfloat16", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_dtype(tmp_path, slow="bfloat16") == dtype


def test_identity(copy: Path, checkpoints: Checkpoints) -> None:
    original = model_identity(checkpoints("llama"), "float32")
    assert original.path == str(checkpoints("llama"))
    assert original.files == file_hashes(tokenizer_files(copy))
    assert model_identity(copy, "float32").weights == original.weights
    assert model_identity(copy, "bfloat16").weights != original.weights
    assert model_identity(copy, "float32", "int8").weights != original.weights
    assert model_identity(copy, "float32", "none", "fp8_e4m3").weights != original.weights
    bfloat16 = model_identity(copy, "bfloat16").weights
    assert model_identity(copy, "bfloat16", "none", "bfloat16").weights == bfloat16
    assert model_identity(copy, "bfloat16", "none", "fp8_e4m3").weights != bfloat16
    assert model_identity(checkpoints("llama/sharded"), "float32").weights != original.weights


def test_an_identity_is_that_of_older_versions(tmp_path: Path) -> None:
    """Or requests could not move between schedulers of both, while one is put in the other's place."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    one, other = {"dtype": "F32", "shape": [2, 3]}, {"dtype": "BF16", "shape": [4]}
    header = {"a": one | {"data_offsets": [0, 24]}, "b": other | {"data_offsets": [24, 32]}}
    write(tmp_path / "model.safetensors", header, bytes(range(32)))
    golden = "cda0350bf0326351ac4b164edebe8036d1f3b390f11d23eaec9f32932a5d19fc"
    assert model_identity(tmp_path, "float32").weights == golden


def test_identity_covers_the_length_by_which_a_model_rotates(checkpoints: Checkpoints) -> None:
    for name, differs in (("llama", False), ("phi3_longrope", True)):
        long, short = (model_identity(checkpoints(name), "float32", context_length=length) for length in (None, 32))
        assert (long.weights != short.weights) is differs


def test_identity_sees_a_changed_tensor_but_not_a_changed_template(copy: Path) -> None:
    before = model_identity(copy, "float32")
    (copy / "chat_template.jinja").write_text("other")
    after = model_identity(copy, "float32")
    assert after.weights == before.weights
    assert {name for name in before.files if before.files[name] != after.files[name]} == {"chat_template.jinja"}
    path = copy / "model.safetensors"
    place = read_header(path)["model.layers.2.self_attn.o_proj.bias"].start
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert model_identity(copy, "float32").weights != before.weights


def test_identity_covers_the_hubs_revision(copy: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir()
    one = shutil.copytree(copy, snapshots / "aaaa")
    other = shutil.copytree(copy, snapshots / "bbbb")
    assert model_identity(one, "float32").weights != model_identity(other, "float32").weights


def test_a_directory_for_dummy_weights_has_an_identity(copy: Path) -> None:
    with_weights = model_identity(copy, "float32")
    (copy / "model.safetensors").unlink()
    without = model_identity(copy, "float32")
    assert without.files == with_weights.files
    assert without.weights != with_weights.weights


def test_a_gguf_file_beside_safetensors_is_not_read(copy: Path) -> None:
    (copy / "model.gguf").touch()
    assert weight_files(copy) == [copy / "model.safetensors"]


def test_only_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="holds pickled weights only"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "weight_map",
    [
        *(None, {}, [], {"a": 1}, {"a": "../b.safetensors"}, {"a": "/b.safetensors"}, {"a": "b.bin"}),
        *({"a": f"{name}.safetensors"} for name in ("b" * 300, "\ud800", "b\0")),
    ],
)
def test_an_index_that_points_outside(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"weight_map must map|half a surrogate pair"):
        weight_files(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(ModelError, match=r"lacks two\.safetensors, named by its index"):
        weight_files(tmp_path)


def test_a_header_is_read(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [2, 3], 0, 12), "b": entry("F32", [], 12, 16)}
    tensors = read_header(write(tmp_path / "x.safetensors", header, bytes(16)))
    start = tensors["a"].start
    assert (tensors["a"].shape, tensors["a"].end - start) == ((2, 3), 12)
    assert (tensors["b"].shape, tensors["b"].start, tensors["b"].end) == ((), start + 12, start + 16)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": entry("F32", [2], 0, 8)}, 7),  # torn
        ({"a": entry("F32", [2], 0, 8)}, 9),  # something follows
        ({"a": entry("F32", [3], 0, 8)}, 8),  # shape and size disagree
        ({"a": entry("F32", [2], 4, 12)}, 12),  # a gap
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12),  # overlap
        ({"a": entry("F32", [2**62, 4], 0, 0)}, 0),  # would overflow elsewhere
        ({"a": entry("F32", [-2, -1], 0, 8)}, 8),
        ({"a": entry("F32", [2.0], 0, 8)}, 8),
        ({"a": entry("F8_E5M2", [8], 0, 8)}, 8),
        ({"a": entry("F32", [2], "0", 8)}, 8),
        ({"a": entry("F32", "2", 0, 8)}, 8),
        ({"a": {"dtype": "F32"}}, 0),
        ({"a": 1}, 0),
        ([], 0),
        (b"{", 0),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0),
        (b"\xff", 0),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, header: Any, size: int) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(ModelError, match=r"x\.safetensors: "):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1), struct.pack("<Q", 2**63) + b"{}"])
def test_a_file_too_short_for_its_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"longer than the file|is empty"):
        read_header(path)
