"""Files of a model: location, content, and the fingerprint by which schedulers recognize equal weights."""

import hashlib
import importlib.resources
import logging
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tercet.protocol.json_files import CONFIG, error_line, one_line, parse_json
from tercet.protocol.messages.values import ModelIdentity
from tercet.scheduler.formats.downloads import HEAD, download_fault
from tercet.scheduler.formats.other_models import (
    IS_ADAPTER,
    config_fault,
    file_as_model,
    file_names,
    hub_fault,
    model_fault,
    name_fault,
    weights_fault,
)
from tercet.scheduler.formats.slow_tokenizers import SLOW_FILES, convert
from tercet.scheduler.tokenizer_files import complete_tokenizer

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

logger = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
"""Files that a frontend or detokenizer may need: tokenizer, defaults, end tokens and prompts."""
_TEMPLATES = "additional_chat_templates/*.jinja"
_MOST_TEMPLATES = 64
_SENTENCE_FILES = ("modules.json", "[0-9]*_*/config.json")
"""Patterns of further files that determine the vector of an input."""

SLOW_ON_CPU = "float16"
"""The dtype that no CPU kernel is written for."""
_TOO_LARGE = ("Gemma", "Glm4", "GptOss")
"""Prefixes of families that were trained in bfloat16 and whose hidden states exceed the 65,504 of float16."""

KNOWN_NAMES = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B-Instruct-2507",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "bge-small": "BAAI/bge-small-en-v1.5",
    "qwen3-embedding-0.6b": "Qwen/Qwen3-Embedding-0.6B",
}
"""Short names of models that anybody may download, and their Hugging Face ids. `PACKAGES` has further names."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", *(name for name in SLOW_FILES if not name.endswith(".json"))]
_HUB_LEFT_OUT = ["consolidated*", "*/*.safetensors"]
HUB_TIMEOUT = 5.0
"""Timeout in seconds for an answer of a hub; the files themselves may take as long as they need."""
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors format
_MAX_JSON = 1 << 26
"""Maximum bytes of a JSON file or a template. The index of the largest checkpoints has a quarter of it."""
_LONGEST_MESSAGE = 10_000
"""Maximum characters of an error, which may name many tensors."""
MAX_TOKENIZER = 1 << 28
"""Maximum bytes of a tokenizer.json. The largest known ones have an eighth of it."""
_MOST = dict.fromkeys(("tokenizer.json", *SLOW_FILES), MAX_TOKENIZER)
"""Maximum bytes of the files that hold a vocabulary."""
_MOST_DIMENSIONS = 16
_LONGEST_NAME = 255  # bytes, as in most file systems
_SAMPLE = 1024  # bytes hashed of each tensor
_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
_ITEM_SIZES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class ModelError(ValueError):
    """A model that cannot be served. The message is one line for clients, even if the files contain line breaks."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST_MESSAGE))


class FileTooLargeError(ModelError):
    """A file larger than the limit of its kind."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of one tensor in a safetensors file: `start` and `end` are byte offsets into the file."""

    name: str = field(repr=False)
    """Name in the file. It is excluded from `repr`, which fingerprints are made of."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def resolve_model(name: str) -> Path:
    """Return the directory of a model: "embedded", a path, a Hugging Face id, or a name of `KNOWN_NAMES`.

    A Hugging Face model is downloaded unless it is cached. Raises ModelError within a few seconds if there is no such
    directory and no hub can be reached.
    """
    if name == "embedded":
        path = Path(str(importlib.resources.files("tercet.scheduler").joinpath("embedded")))
        if not (path / "config.json").is_file():
            raise ModelError("this installation carries no embedded model: name a model directory")
        return path
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path.resolve()
    if name and path.exists():
        raise ModelError(f"{name!r} {file_as_model(path)}")
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} {name_fault(name) or 'is neither a directory nor a Hugging Face id'}")
    return _download(KNOWN_NAMES.get(name, name))


def download_config(name: str) -> Path:
    """Return the directory of the config.json of a Hugging Face model, without the rest. Raises ModelError."""
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} {name_fault(name) or 'is neither a directory nor a Hugging Face id'}")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    hub_name = KNOWN_NAMES.get(name, name)
    if isinstance(cached := try_to_load_from_cache(hub_name, "config.json"), str):
        return Path(cached).parent
    try:
        _hub_model(hub_name)
        return Path(hf_hub_download(hub_name, "config.json", etag_timeout=HUB_TIMEOUT)).parent
    except ModelError:
        raise
    except Exception as error:  # each transport that the hub library has used has its own exception tree
        raise ModelError(f"config.json of {hub_name} cannot be downloaded ({type(error).__name__})") from error


def check_model(directory: Path, *, weights: bool = True) -> None:
    """Raise ModelError for a directory that is no model that can be served, which says what it is and what to do.

    Without `weights`, none need to be there.
    """
    fault = model_fault(file_names(directory), weights=weights)
    if fault == IS_ADAPTER:
        base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
        if isinstance(base, str) and base:
            fault = f"is an adapter of {base[:_LONGEST_NAME]!r}, not a model: serve that with --lora NAME={directory}"
    if fault:
        raise ModelError(f"{directory} {fault}")
    if fault := config_fault(read_json(directory / "config.json")):
        raise ModelError(f"{directory / 'config.json'} {fault}")
    for path in weight_files(directory) if weights else []:
        with open_regular(path, most=2**63 - 1) as file:
            _check_download(path, file.read(HEAD), os.fstat(file.fileno()).st_size)


def _check_download(path: Path, head: bytes, size: int) -> None:
    if fault := download_fault(head, size, path.suffix):
        raise ModelError(f"{path} {fault}")


def resolve_adapter(name: str) -> Path:
    """Return the directory of an adapter: a path, or a Hugging Face id. Raises ModelError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise ModelError(f"{name!r} is neither a directory nor a Hugging Face id")
    return _download(name)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Run a block that reads unchecked files. Raises ModelError, in one line, for any error in it.

    `what` is the name used in the message. Tercet's own errors and MemoryError pass unchanged.
    """
    try:
        yield
    except (MemoryError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is not an Exception
        if type(error).__module__.startswith("tercet."):
            raise
        logger.debug("%s", what, exc_info=True)
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ModelError(f"{what} cannot be read: {kind}{error_line(error)}") from error


@contextmanager
def open_regular(path: Path, most: int) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises ModelError for more than `most` bytes, and for anything but a regular file.

    Opening never blocks, because a pipe or a device might not end, or keep its reader waiting. Raises FileNotFoundError
    if there is no such file.
    """
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise ModelError(f"{path} is not a regular file")
            if found.st_size > most:
                raise FileTooLargeError(f"{path} is larger than {most} bytes")
            with open(opened, "rb", closefd=False) as file:
                yield file
        finally:
            os.close(opened)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error_line(error)}") from error


def read_file(path: Path, most: int = _MAX_JSON) -> bytes:
    """Return the content of a file. Raises the errors of `open_regular`."""
    with open_regular(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # the file has grown
        raise FileTooLargeError(f"{path} is larger than {most} bytes")
    _check_download(path, content[:HEAD], len(content))
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError."""
    try:
        return json_object(read_file(path), str(path), infinity=path.name == CONFIG)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None


def json_object(content: bytes, name: str, *, infinity: bool = False) -> dict[str, Any]:
    """Return the object in the content of a JSON file of that name. Raises ModelError. See `parse_json`."""
    value = json_value(content, name, infinity=infinity)
    if not isinstance(value, dict):
        raise ModelError(f"{name} holds no JSON object")
    return value


def json_value(content: bytes, name: str, *, infinity: bool = False) -> Any:
    """Return the value in the content of a JSON file of that name. Raises ModelError. See `parse_json`."""
    try:
        return parse_json(content, infinity=infinity)
    except ValueError as error:
        raise ModelError(f"{name} cannot be read as JSON: {error_line(error)}") from error


def saved_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that config.json (`dtype` or `torch_dtype`) says the weights were saved in, such as "bfloat16".

    The default is float32, and bfloat16 beside mxfp4 weights, because gpt-oss stores its other weights so.
    """
    parts = config, config.get("text_config")  # text_config belongs to a model that reads more than text
    named = [part.get(name) for part in parts if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    quantization = config.get("quantization_config")
    mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return str(next(filter(None, named), "bfloat16" if mxfp4 else "float32")).removeprefix("torch.")


def served_dtype(directory: Path, wanted: str = "auto", *, slow: str, encoder: bool = False) -> str:
    """Return the dtype to compute a model in: the `wanted` one, or for "auto" the one it was saved in.

    "auto" never returns the dtype that is `slow` on the device: float16 on a CPU, bfloat16 on GPUs before Ampere. A
    generating model then gets the other 16-bit dtype, or float32 if its numbers are known to be too large for float16.
    An encoder gets float32, because other servers compute its vectors, too.
    """
    if wanted != "auto":
        return wanted
    config = read_json(directory / "config.json")
    saved = saved_dtype(config)
    if saved != slow:
        return saved
    if encoder:
        return "float32"
    if slow == "float16":
        return "bfloat16"
    names = config.get("architectures")
    too_large = isinstance(names, list) and any(str(name).startswith(_TOO_LARGE) for name in names)
    return "float32" if too_large else "float16"


def weight_files(directory: Path) -> list[Path]:
    """Return the sorted weight files of a checkpoint: those its index names, model.safetensors, or GGUF files."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(_is_plain_name, weight_map.values())):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif single.is_file():
        files = [single]
    elif files := sorted(directory.glob("*.gguf")):
        return files
    else:
        raise ModelError(f"{directory} {weights_fault(file_names(directory))}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{directory} lacks {', '.join(missing)}, named by its index")
    return files


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors or GGUF file, each checked against its own shape and the file's size.

    Raises ModelError for a file whose header and size disagree, as after a broken download.
    """
    if path.suffix == ".gguf":
        return _gguf_header(path)
    try:
        with open_regular(path, most=2**63 - 1) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEAD)
            _check_download(path, head, size)
            length = int.from_bytes(head[:8], "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelError(f"{path}: its header is longer than the file")
            file.seek(8)
            text = file.read(length)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    return header_tensors(text, size, str(path))


def _gguf_header(path: Path) -> dict[str, StoredTensor]:
    from tercet.scheduler.gguf.gguf_directory import stored_tensors  # loads a package that other models do not need

    with reading(str(path)):
        return {
            name: StoredTensor(
                name,
                "+".join(piece.type for piece in tensor.pieces),
                tensor.shape,
                tensor.start,
                tensor.start + tensor.size,
            )
            for name, tensor in stored_tensors(path).items()
        }


def header_tensors(text: bytes, size: int, name: str) -> dict[str, StoredTensor]:
    """Return the tensors that a safetensors header describes, of a file of `size` bytes. Raises ModelError."""
    try:
        entries = json_object(text, "JSON")
        _check_metadata(entries.pop("__metadata__", None))
        tensors = {name: _stored_tensor(name, entry, 8 + len(text)) for name, entry in entries.items()}
    except ValueError as error:
        raise ModelError(f"{name}: its header cannot be read: {error_line(error)}") from error
    end = 8 + len(text)
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != end or tensor.end - end != math.prod(tensor.shape) * _ITEM_SIZES[tensor.dtype]:
            raise ModelError(f"{name}: the bytes of {tensor.name[:200]} do not fit its shape")
        end = tensor.end
    if end != size:
        raise ModelError(f"{name}: {size} bytes, while its header describes {end}")
    return tensors


def check_tokenizer(directory: Path) -> None:
    """Raise ModelError unless the model has a complete tokenizer: frontends and detokenizers need it.

    A truncated download of a tokenizer.json is found by the file's end, which costs little. The content is not parsed
    here.
    """
    path = directory / "tokenizer.json"
    try:
        text = read_file(path, MAX_TOKENIZER)
    except FileNotFoundError:
        if "tokenizer.json" not in tokenizer_files(directory):
            others = "vocab.json with merges.txt, tokenizer.model or vocab.txt"
            raise ModelError(f"{directory} has no tokenizer.json, and none of {others}") from None
        return
    if not (text.lstrip().startswith(b"{") and text.rstrip().endswith(b"}")):
        raise ModelError(f"{path} is not whole JSON: was its download cut off?")


def has_tokenizer(directory: Path) -> bool:
    """Return whether the directory has a file with a vocabulary."""
    return any((directory / name).is_file() for name in ("tokenizer.json", *SLOW_FILES))


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of the TOKENIZER_FILES that the model has, tokenizer.json completed. Raises ModelError.

    A model without a tokenizer.json has one that is made of the files of `SLOW_FILES`.
    """
    files = _read_files(directory, [*TOKENIZER_FILES, *_template_names(directory)])
    try:
        if "tokenizer.json" in files:
            return {**files, "tokenizer.json": complete_tokenizer(files)}
        return {**files, **convert({**files, **_read_files(directory, SLOW_FILES)})}
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{directory}: {error}") from error


def _template_names(directory: Path) -> list[str]:
    """Return the names of further chat templates, relative to the directory."""
    names = sorted(path.name for path in directory.glob(_TEMPLATES) if path.name.isprintable())
    if len(names) > _MOST_TEMPLATES:
        raise ModelError(f"{directory} has more than {_MOST_TEMPLATES} additional_chat_templates")
    return [f"{_TEMPLATES.removesuffix('*.jinja')}{name}" for name in names]


def _read_files(directory: Path, names: Iterable[str]) -> dict[str, bytes]:
    return {
        name: read_file(directory / name, _MOST.get(name, _MAX_JSON)) for name in names if (directory / name).exists()
    }


def file_hashes(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each file's contents, in hexadecimal, by file name."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def model_identity(
    directory: Path,
    dtype: str,
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    context_length: int | None = None,
    weights: Path | None = None,
) -> ModelIdentity:
    """Return the fingerprint and the file hashes of a model.

    A request can continue on another scheduler if the fingerprint is equal; frontends cache files by the hashes.

    The fingerprint covers config.json, the hub's revision if there is one, the header and size of every safetensors
    file, the first bytes of each tensor, the dtype they are served in (see `served_dtype`), the quantization, the dtype
    of keys and values ("auto": that of the weights), and for models with longrope the context length. It reads a few
    hundred KiB of a checkpoint of any size. A directory without weights, usable with dummy weights, has an identity,
    too.

    If `weights` names another directory, the fingerprint is that of its weights.
    """
    own = directory if weights is None else weights
    described = own if (own / "config.json").is_file() else directory
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little") + part)

    config = read_file(described / "config.json")
    add(config)
    if b'"long_factor"' in config:
        add(f"as long as {context_length}".encode())
    for pattern in _SENTENCE_FILES:
        for path in sorted(described.glob(pattern)):
            add(read_file(path))
    settings = described / "config_sentence_transformers.json"
    if settings.exists() and b'"truncate_dim"' in (content := read_file(settings)):
        add(content)
    add(_revision(own).encode())
    served = dtype if quantization == "none" else f"{dtype} as {quantization}"
    add((served if kv_cache_dtype in ("auto", dtype) else f"{served}, cached in {kv_cache_dtype}").encode())
    for path in weight_files(own) if any(own.glob("*.safetensors")) or any(own.glob("*.gguf")) else []:
        add(f"{path.name} {path.stat().st_size}".encode())
        tensors = read_header(path)
        with open_regular(path, most=2**63 - 1) as file:
            for name, tensor in sorted(tensors.items()):
                add(f"{name} {tensor}".encode())
                file.seek(tensor.start)
                add(file.read(min(_SAMPLE, tensor.end - tensor.start)))
    return ModelIdentity(
        weights=digest.hexdigest(),
        files=file_hashes(tokenizer_files(directory)),
        path=str(directory),
        weights_path="" if weights is None else str(weights),
    )


def _stored_tensor(name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name[:200]} has no dtype, shape and pair of data_offsets") from None
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZES:
        raise ValueError(f"dtype {dtype!r} is not supported")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"the shape of {name[:200]} is not a list of at most {_MOST_DIMENSIONS} sizes")
    if not all(type(size) is int and size >= 0 for size in (start, end, *shape)):
        raise ValueError("negative or fractional sizes")
    return StoredTensor(name, dtype, tuple(shape), data_start + start, data_start + end)


def _check_metadata(metadata: Any) -> None:
    """Raise ValueError for metadata that the safetensors library refuses."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must map names to texts")


def _is_plain_name(name: Any) -> bool:
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > _LONGEST_NAME:
        return False
    return name.endswith(".safetensors") and Path(name).name == name


def _revision(directory: Path) -> str:
    """Return the commit of a directory inside the hub's cache (.../snapshots/<commit>), otherwise an empty string."""
    return directory.name if directory.parent.name == "snapshots" else ""


def _hub_model(name: str) -> "ModelInfo":
    """Return the hub's description of a model. Raises ModelError for none, and for no access."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    endpoint = constants.ENDPOINT
    try:
        return HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except GatedRepoError as error:
        raise ModelError(f"{name!r} is gated: accept its terms at {endpoint}/{name}, and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{name!r} is not a directory, and {endpoint} gives access to no model of that id") from error


def _download(name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    endpoint = constants.ENDPOINT
    try:
        info = _hub_model(name)
    except ModelError:
        raise
    except Exception as error:  # each transport that the hub library has used has its own exception tree
        return _cached(name, f"{endpoint} cannot be reached ({type(error).__name__})")
    if fault := hub_fault([file.rfilename for file in info.siblings or []]):
        raise ModelError(f"{name} {fault}")
    try:
        path = snapshot_download(
            name, revision=info.sha, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_LEFT_OUT, etag_timeout=HUB_TIMEOUT
        )
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        raise ModelError(
            f"{name} could not be downloaded from {endpoint} ({reason}): try again, whole files are kept"
        ) from error
    return Path(path)


def _cached(name: str, why: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ModelError(f"{name!r} is not a directory, not in the local cache, and {why}") from None
