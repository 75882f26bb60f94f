"""Options of `tercet serve`: a table for each part, from the command line and one TOML file."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, get_type_hints

from cyclopts import Parameter

from tercet.frontend.config.config import HttpOptions, ServingOptions, TelemetryOptions
from tercet.frontend.config.validation import read_adapters
from tercet.protocol.system.log_lines import LogFormat, LogLevel

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("KMGT")}
_UNITS |= {f"{prefix}iB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")}
_PARTS_AT_MOST = 64
_FROM_ZERO = {"max_loras", "node_rank"}
"""Numbers of schedulers that may be 0; others are at least 1."""
_KEY_OPTIONS = {"api-key", "admin-key"}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "task": ("auto", "generate", "embed", "classify"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "load_format": ("auto", "safetensors", "dummy"),
    "kv_cache_dtype": ("auto", "bfloat16", "fp8_e4m3"),
    "quantization": ("none", "int8", "int4"),
    "schedule_policy": ("lpm", "fcfs", "priority", "fair"),
}
"""Choices that schedulers of this release know. `--scheduler.NAME` passes other values through unchecked."""


class ConfigError(ValueError):
    """An invalid option. The text is one line that names it."""


def parse_bytes(text: str) -> int:
    """Parse a size such as 2GiB, 500MB or 1073741824 to bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B|)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 2GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def _check_size(flag: str, text: str) -> None:
    """Raise ConfigError for a text that is no size."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if size < 1:
        raise ConfigError(f"{flag} must be at least 1 byte")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the server as a whole: table [serve]."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on; 0 takes any that is free."""
    dp_size: int = 1
    """Scheduler processes, each with its own copy of the model, unless --enable-dp-attention is given."""
    encoders: int = 0
    """Scheduler processes that only encode images or sounds; the others then have no tower (--language-only)."""
    detokenizer_workers: int = 1
    """Detokenizer processes."""
    frontend_workers: int = 1
    """Frontend processes, all on the one port."""
    grpc_mode: Annotated[bool, Parameter(negative="")] = False
    """Serve SGLang's gRPC service on the port, and HTTP on the next one."""
    log_level: LogLevel = "info"
    """How much every part logs."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or one JSON object a line."""
    startup_timeout: float = 600.0
    """Seconds within which every part must be ready."""
    dry_run: Annotated[bool, Parameter(negative="")] = False
    """Print the memory of each process of the model, from its config.json alone, and whether it fits; start nothing."""
    memory: str = ""
    """Memory of each GPU (or CPU process) for --dry-run, such as 80GiB; otherwise that of this machine."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ConfigError("--host is given and empty: give an address, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be 0 to 65535, not {self.port}")
        if self.grpc_mode and not 0 < self.port < 65535:
            raise ConfigError(f"--grpc-mode needs --port to be 1 to 65534, not {self.port}: HTTP has the next port")
        for option in ("dp_size", "detokenizer_workers", "frontend_workers"):
            if not 1 <= (number := getattr(self, option)) <= _PARTS_AT_MOST:
                raise ConfigError(f"--{option.replace('_', '-')} must be 1 to {_PARTS_AT_MOST}, not {number}")
        if not 0 <= self.encoders <= _PARTS_AT_MOST:
            raise ConfigError(f"--encoders must be 0 to {_PARTS_AT_MOST}, not {self.encoders}")
        if self.memory and not self.dry_run:
            raise ConfigError("--memory is for --dry-run: --kv-cache-bytes or --mem-fraction-static sizes the KV cache")
        if self.memory:
            _check_size("--memory", self.memory)
        if not 0 < self.startup_timeout < float("inf"):
            raise ConfigError(f"--startup-timeout must be a number of seconds above 0, not {self.startup_timeout}")

    @property
    def http_port(self) -> int:
        """Return the port of the HTTP server."""
        return self.port + self.grpc_mode

    @property
    def grpc_address(self) -> str:
        """Return HOST:PORT of the gRPC server; empty without --grpc-mode."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.grpc_mode else ""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FrontendOptions(HttpOptions, ServingOptions, TelemetryOptions):
    """Options of the frontends: table [frontend]."""

    response_store: str = "auto"
    """The SQLite file to keep responses in; auto for one in this user's state directory, none to keep nothing."""

    def __post_init__(self) -> None:
        try:
            HttpOptions.__post_init__(self)
            ServingOptions.__post_init__(self)
            TelemetryOptions.__post_init__(self)
        except ValueError as error:
            raise ConfigError(str(error)) from None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of the schedulers: table [scheduler]. A scheduler chooses values that are not given."""

    task: str | None = None
    """What the model is for: auto (as its files say), generate, embed or classify."""
    dtype: str | None = None
    """Number format of weights: auto, float32, bfloat16 or float16."""
    load_format: str | None = None
    """Where weights come from: auto, safetensors, or dummy for random ones."""
    kv_cache_dtype: str | None = None
    """Number format of keys and values: auto (that of the weights), bfloat16 or fp8_e4m3."""
    kv_cache_bytes: str | None = None
    """Memory for keys and values in each process of a model, such as 2GiB."""
    mem_fraction_static: float | None = None
    """Share of memory for the weights with keys and values, instead of --kv-cache-bytes: above 0 and below 1."""
    max_total_tokens: int | None = None
    """The most tokens that the KV cache is made for."""
    context_length: int | None = None
    """Tokens of prompt and answer together, where that is to be less than the model's own."""
    max_running_requests: int | None = None
    """Requests that may generate at the same time."""
    chunked_prefill_size: int | None = None
    """Tokens that one step may compute."""
    page_size: int | None = None
    """Tokens in one page of the KV cache."""
    schedule_policy: str | None = None
    """Which waiting request goes first: lpm (longest cached prefix), fcfs, priority, or fair (API keys take turns)."""
    disable_radix_cache: Annotated[bool, Parameter(negative="")] = False
    """Do not share cached prefixes between requests."""
    attention_backend: str | None = None
    """Attention kernels: auto or a name that `tercet-kernels check` lists."""
    quantization: str | None = None
    """Number format that weights are packed in: none, int8 or int4."""
    threads: int | None = None
    """Threads of the CPU kernels, in each process."""
    tensor_parallel_size: Annotated[int | None, Parameter(alias=("--tp-size", "--tp"))] = None
    """Processes that share each scheduler's model, each on a GPU or a share of the cores of its own; also --tp."""
    pipeline_parallel_size: Annotated[int | None, Parameter(alias=("--pp-size", "--pp"))] = None
    """Pipeline stages of each scheduler's model, each of --tensor-parallel-size processes; also --pp."""
    expert_parallel_size: Annotated[int | None, Parameter(alias=("--ep-size", "--ep"))] = None
    """Groups of the --tensor-parallel-size processes, each with some experts of every mixture; also --ep."""
    enable_dp_attention: Annotated[bool, Parameter(negative="")] = False
    """One scheduler whose --dp-size processes compute attention of requests of their own, and have parts of experts."""
    nnodes: int | None = None
    """Hosts that share the model, each of which runs an equal share of its processes; 1 when not given."""
    node_rank: int | None = None
    """Number of this host: 0 serves, and the others run processes of the model alone."""
    dist_init_addr: str | None = None
    """HOST:PORT at which host 0 waits for the others."""
    dist_timeout: float | None = None
    """Seconds in which the hosts must meet: 300 when not given."""
    keys: Path | None = None
    """Folder of the schedulers' CURVE keys for links between hosts: DIRECTORY/scheduler of `tercet keys DIRECTORY`."""
    max_loras: int | None = None
    """LoRA adapters that can run side by side: 0 unless --lora is given, and 8 then."""
    max_lora_rank: int | None = None
    """The highest rank of an adapter: 64 when not given."""
    kv_events_config: str | None = None
    """Publish changes of the prefix cache as KV events: a JSON object with the keys of vLLM and SGLang."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):
            value, flag = getattr(self, option.name), f"--{option.name.replace('_', '-')}"
            choices = CHOICES.get(option.name, (value,))
            if value is not None and value not in choices:
                raise ConfigError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
            if value is None or hints[option.name] != int | None:
                continue
            if not isinstance(value, int):
                raise ConfigError(f"{flag} must be a whole number, not {value!r}")
            if value < (least := 0 if option.name in _FROM_ZERO else 1):
                raise ConfigError(f"{flag} must be at least {least}, not {value}")
        fraction = self.mem_fraction_static
        if fraction is not None and not 0 < fraction < 1:
            raise ConfigError(f"--mem-fraction-static must be above 0 and below 1, not {fraction}")
        if self.kv_cache_bytes is not None:
            _check_size("--kv-cache-bytes", self.kv_cache_bytes)

    def flags(self) -> list[str]:
        """Return the command line of a scheduler with these options, sizes in bytes."""
        flags: list[str] = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "kv_cache_bytes" and value is not None:
                value = parse_bytes(value)
            if isinstance(value, Path):
                value = value.expanduser().absolute()
            name = "--" + option.name.replace("_", "-")
            if value is True:
                flags.append(name)
            elif value is not None and value is not False:
                flags.append(f"{name}={value}")
        return flags


DEFAULT_MODEL = "default"
"""MODEL if none is named. The scheduler's package knows it, and replaces it if it cannot be downloaded."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Options of `tercet serve`. The `_extra` options are passed on unread, and the part refuses invalid ones."""

    model: str = "embedded"
    serve: ServeOptions = ServeOptions()
    frontend: FrontendOptions = FrontendOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    frontend_extra: Mapping[str, str] = field(default_factory=dict)
    scheduler_extra: Mapping[str, str] = field(default_factory=dict)
    detokenizer_extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.model or self.model.startswith("-"):
            raise ConfigError(f"MODEL must be a directory or a Hugging Face name, not {self.model!r}")
        self._check_data_parallel()
        self._check_encoders()
        if self.frontend.lora and self.scheduler.max_loras == 0:
            raise ConfigError("--lora has no use with --max-loras 0")
        for extra in (self.frontend_extra, self.scheduler_extra, self.detokenizer_extra):
            extra_flags(extra)

    def _check_data_parallel(self) -> None:
        size, ranks = self.serve.dp_size, self.scheduler.tensor_parallel_size or 1
        if self.scheduler.enable_dp_attention and size != ranks and not self.scheduler.node_rank:
            raise ConfigError(
                f"--enable-dp-attention: --dp-size {size} must be equal to --tensor-parallel-size {ranks}, because one "
                "process computes the attention of a request"
            )
        if self.schedulers > 1 and self.several_hosts:
            raise ConfigError(f"--dp-size {size}: a model on several hosts has one scheduler, so far")

    def _check_encoders(self) -> None:
        """Refuse encoders for a model whose towers they could not be."""
        if self.serve.encoders and self.several_hosts:
            raise ConfigError(f"--encoders {self.serve.encoders}: a model on several hosts has one scheduler, so far")
        for name in ("encoder-only", "language-only"):
            if name in {each.replace("_", "-") for each in self.scheduler_extra}:
                raise ConfigError(f"--{name} is for one scheduler: `tercet serve` starts both kinds with --encoders N")

    @property
    def schedulers(self) -> int:
        """Return the number of scheduler processes."""
        return 1 if self.scheduler.enable_dp_attention else self.serve.dp_size

    @property
    def several_hosts(self) -> bool:
        """Return whether several hosts share the model."""
        return bool(self.scheduler.node_rank) or (self.scheduler.nnodes or 1) > 1

    @property
    def lora(self) -> dict[str, str]:
        """Return paths of adapters by name. Paths of local directories are made absolute."""
        paths = {name: os.path.expanduser(path) for name, path in read_adapters(self.frontend.lora).items()}
        return {name: os.path.abspath(path) if os.path.isdir(path) else path for name, path in paths.items()}


def extra_flags(extra: Mapping[str, str]) -> list[str]:
    """Return options that only the part knows as its command line. Raises ConfigError for those the supervisor sets."""
    ours = {
        "peer",
        "listen",
        "supervisor",
        "parent-fd",
        "log-level",
        "log-format",
        "fd",
        "host",
        "port",
        "api-key",
        "admin-key",
        "scheduler",
        "detokenizer",
        "sibling",
        "data-parallel-rank",
        "grpc-listen",
    }
    names = {name: name.replace("_", "-") for name in extra}
    for name in names.values():
        if name in ours:
            raise ConfigError(f"{name} is not for one part to be told: `tercet serve` decides it")
    return [f"--{names[name]}={value}" for name, value in extra.items()]


def read_config(path: Path) -> dict[str, object]:
    """Return the options of a TOML file, keyed by their command-line names. Raises ConfigError, naming file and key.

    Tables are [serve], [frontend], [scheduler] and [detokenizer]. A key of a part's table that `tercet serve` does not
    know is passed on to that part, which refuses it if it does not know it either.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    known: dict[str, set[str]] = {
        "serve": {"model", *_names(ServeOptions)},
        "frontend": _names(FrontendOptions),
        "scheduler": _names(SchedulerOptions),
        "detokenizer": set(),
    }
    options: dict[str, object] = {}
    for table, content in tables.items():
        if table not in known or not isinstance(content, dict):
            raise ConfigError(f"--config {path}: {table!r} is not one of the tables {', '.join(known)}")
        for key, value in content.items():
            name = key.replace("_", "-")
            if name in _KEY_OPTIONS and value == []:
                raise ConfigError(f"--config {path}: [{table}] {key} is empty: give a key, or leave out the line")
            if name in known[table]:
                options[name] = value
            elif table == "serve":
                raise ConfigError(f"--config {path}: [serve] has no {key!r}; it has {', '.join(sorted(known[table]))}")
            else:
                extra = options.setdefault(table, {})
                assert isinstance(extra, dict)
                extra[name] = _scalar(path, table, key, value)
    return options


def _names(options: type) -> set[str]:
    return {option.name.replace("_", "-") for option in fields(options)}


def _scalar(path: Path, table: str, key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    raise ConfigError(f"--config {path}: [{table}] {key} must be text, a number, true or false")
