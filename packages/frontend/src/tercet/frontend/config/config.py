"""The options of a frontend process."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from tercet.frontend.config.validation import (
    AdminKeys,
    ApiKeys,
    check_grpc_listen,
    check_keys,
    check_notations,
    check_origins,
    check_otlp_endpoint,
    read_adapters,
    read_media_hosts,
)
from tercet.protocol.messages.values import Role
from tercet.protocol.options import NodeOptions
from tercet.protocol.transport.endpoints import default_peer

Repeatable = Annotated[tuple[str, ...], Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of request handling that `tercet serve` takes, too."""

    served_model_name: Repeatable = ()
    """Names that clients know the model by, instead of the scheduler's; repeatable."""
    lora: Repeatable = ()
    """NAME=PATH of an adapter that requests can name, as schedulers find it; repeatable."""
    chat_template: Path | None = None
    """File with a chat template in Jinja, in place of the model's own."""
    tool_call_parser: str = "auto"
    """Notation of the model's tool calls: a parser's name, auto for what its chat template uses, or none."""
    reasoning_parser: str = "auto"
    """Notation of the model's reasoning: a parser's name, auto for what its chat template uses, or none."""
    reasoning_field_name: str = "reasoning_content"
    """Field of chat messages that holds reasoning, for clients that look for it elsewhere."""
    allowed_media_host: Repeatable = ()
    """HOST or HOST:PORT that images of requests are read from, by http and https; repeatable. Without any, none."""

    def __post_init__(self) -> None:
        read_adapters(self.lora)
        read_media_hosts(self.allowed_media_host)
        check_notations(
            tools=self.tool_call_parser, reasoning=self.reasoning_parser, reasoning_field=self.reasoning_field_name
        )
        for name in self.served_model_name:
            if not name.isprintable() or not name.strip():
                raise ValueError(f"--served-model-name must be printable, and not empty, which {name!r} is not")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """Options of the HTTP server that `tercet serve` takes, too."""

    api_key: ApiKeys = ()
    """A key that clients must show as a bearer token; repeatable. Without any the server is open."""
    admin_key: AdminKeys = ()
    """A key that also opens the routes that concern everybody, such as /flush_cache; repeatable."""
    allowed_origin: Repeatable = ()
    """Origin of web pages that may read answers, or * for all pages; repeatable. Without any, none may."""
    page: bool = True
    """Serve a page at /, with a chat and a live view of the server, and the API's documentation at /docs."""
    shutdown_grace: Annotated[int, Parameter(validator=Number(gte=0))] = 30
    """Seconds that requests in flight have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        check_keys("--api-key", self.api_key)
        check_keys("--admin-key", self.admin_key)
        check_origins("--allowed-origin", self.allowed_origin)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """Options of request logs and traces that `tercet serve` takes, too."""

    log_requests: Annotated[bool, Parameter(negative="")] = False
    """Log a line for each request that ended: ids, outcome, lengths and times."""
    log_requests_level: Literal[0, 1, 2, 3] = 0
    """Add to these lines: 1 sampling parameters, 2 also 2,048 characters of input and output, 3 16,384."""
    log_requests_share: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 1.0
    """Share of the requests that --log-requests logs, chosen at random."""
    slow_request_seconds: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0
    """Log a warning for each request that takes as long as this; 0 for none."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector that gets a trace of each request by OTLP over HTTP; without one, no traces."""

    def __post_init__(self) -> None:
        if not self.log_requests and (self.log_requests_level or self.log_requests_share < 1):
            raise ValueError("--log-requests-level and --log-requests-share have no use without --log-requests")
        if self.otlp_endpoint:
            check_otlp_endpoint(self.otlp_endpoint)


@Parameter(name="*", negative="")
@dataclass(frozen=True, kw_only=True)
class LinkConfig(NodeOptions):
    """Connections of this frontend to schedulers, detokenizers and the supervisor."""

    peer: str = field(default_factory=lambda: default_peer(Role.FRONTEND))
    listen: str = "tcp://127.0.0.1:0"
    scheduler: Repeatable = ()
    """Inbox of a scheduler; repeatable, and an ipc path may be a glob."""
    detokenizer: Repeatable = ()
    """Inbox of a detokenizer; repeatable, and an ipc path may be a glob."""
    sibling: Repeatable = ()
    """Peer id of another frontend at the same --fd, whose inbox is in the same directory; repeatable."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class HttpConfig(HttpOptions):
    """Options of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on, unless --fd is given."""
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8000
    """Port to listen on; 0 takes any that is free."""
    fd: int | None = None
    """A listening socket inherited from the parent."""
    grpc_listen: str = ""
    """HOST:PORT where SGLang's gRPC service is served beside HTTP; needs the extra `grpc`."""
    api_key_file: Path | None = None
    """A file of such keys, separated by white space, which keeps them out of the process list."""
    max_requests_per_key: Annotated[int, Parameter(validator=Number(gte=0))] = 0
    """Answers of one API key that may be in flight here at once; more get a 429. 0 is no limit. A request counts
    as many as its prompts times its choices (n, or best_of); one for vectors or scores counts as one."""
    share_cache_between_keys: Annotated[bool, Parameter(negative="")] = False
    """Share cached prefixes between API keys, which then learn what others have asked. For keys of one tenant."""
    open_admin: bool = False
    """Let every caller do what needs an admin key, as training programs expect of SGLang. For trusted networks."""
    open_metrics: bool = False
    """Answer /metrics without a key."""
    max_body_bytes: Annotated[int, Parameter(validator=Number(gte=1))] = 32 * 1024 * 1024
    """Longest request body that is read."""
    max_header_bytes: Annotated[int, Parameter(validator=Number(gte=1))] = 64 * 1024
    """Longest request head that is read."""
    keep_alive: Annotated[int, Parameter(validator=Number(gte=0))] = 75
    """Seconds an idle connection stays open."""
    access_log: bool = False
    """Log a line for every request."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("--host is given and empty, which would be every address: give one, such as 127.0.0.1")
        if self.grpc_listen:
            check_grpc_listen(self.grpc_listen)
        super().__post_init__()

    def api_keys(self) -> tuple[str, ...]:
        """Return all keys, including those of the file. Raises ValueError for an empty file or invalid keys."""
        if self.api_key_file is None:
            return self.api_key
        try:
            keys = tuple(self.api_key_file.read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ValueError(f"--api-key-file {self.api_key_file}: {reason}") from None
        if not keys:
            raise ValueError(f"{self.api_key_file} holds no key, and an open server is not what it was meant for")
        check_keys(f"{self.api_key_file}: a key", keys)
        return self.api_key + keys


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServingConfig(ServingOptions):
    """Options of request handling."""

    require_lora: Annotated[bool, Parameter(negative="")] = False
    """Be ready once schedulers have read every adapter of --lora, and end where they refuse one."""
    routing_policy: Literal["cache_aware", "least_loaded", "power_of_two", "round_robin"] = "cache_aware"
    """How requests are spread over schedulers, where there is more than one."""
    recovery_timeout: Annotated[float, Parameter(validator=Number(gte=0))] = 60.0
    """Seconds a request waits for a part that takes it."""
    max_waiting: Annotated[int, Parameter(validator=Number(gte=0))] = 256
    """New requests that may wait while no scheduler takes any; more are turned away."""
    tokenizer_threads: Annotated[int, Parameter(validator=Number(gte=1, lte=1024))] = 2
    """Threads that render templates and tokenize."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of the database for responses, chat completions, conversations, sessions and adapter names."""

    response_store: str = "none"
    """The SQLite file to keep them in; auto for one in this user's state directory, none to keep nothing."""
    response_store_days: Annotated[float, Parameter(validator=Number(gt=0))] = 30.0
    """Days after which they are forgotten."""
    response_store_bytes: Annotated[int, Parameter(validator=Number(gte=1 << 20))] = 1 << 30
    """Bytes that the file may hold; then the oldest of the key that has most are forgotten."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Options of a frontend process."""

    link: LinkConfig = field(default_factory=LinkConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    telemetry: TelemetryOptions = field(default_factory=TelemetryOptions)
