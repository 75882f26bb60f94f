"""`tercet serve` from its options to its exit code: the port, the directory, the parts and their supervisor."""

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cyclopts import CycloptsError

from tercet.frontend.config.config import FrontendConfig
from tercet.frontend.server.listener import is_local, url_of
from tercet.frontend.supervisor.options import DEFAULT_MODEL, ConfigError, ServeConfig
from tercet.frontend.supervisor.parts import LaunchSpec, dry_run_command, frontend_flags, local_parts
from tercet.frontend.supervisor.restart_policy import Timeouts
from tercet.frontend.supervisor.run_directory import run_directory
from tercet.frontend.supervisor.supervisor import Supervisor
from tercet.frontend.supervisor.terminal import Display, JsonTerminal, choose_terminal
from tercet.protocol.errors import ChannelError
from tercet.protocol.messages.messages import Ready
from tercet.protocol.messages.values import ModelLimits, Task
from tercet.protocol.system.file_limit import LOWEST, raise_file_limit
from tercet.protocol.system.process import on_signals
from tercet.protocol.system.streams import keep_output

_ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
_FILES_PER_PART = 10
"""File descriptors that the supervisor needs per part: its pipes, and its links in both directions."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def listen(host: str, port: int) -> socket.socket:
    """Return the server's listening socket. Raises ConfigError if the address cannot be bound."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # create_server's error texts are long, and a resolver's error numbers are not the system's.
        number = None if isinstance(error, socket.gaierror) else error.errno
        reason = os.strerror(number) if number else error.strerror or str(error)
        raise ConfigError(f"--host {host} --port {port}: {reason}") from None


def require_packages() -> None:
    """Raise ConfigError unless the packages of every part are installed."""
    parts = ("scheduler", "detokenizer")
    missing = [f"tercet-{part}" for part in parts if importlib.util.find_spec(f"tercet.{part}") is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed: docs/install.md installs all parts")


def require_adapter_files(paths: Mapping[str, str]) -> None:
    """Raise ConfigError for an adapter of `--lora` that is not at its path.

    Schedulers check names that may be at Hugging Face, and the content of the files.
    """
    for name, path in paths.items():
        if fault := _adapter_fault(path):
            raise ConfigError(f"--lora {name}={path}: {fault}")


def _adapter_fault(path: str) -> str:
    """Return why a path is not an adapter's directory; empty if it may be one."""
    directory = Path(path)
    if not os.path.isdir(path):  # unlike Path.is_dir, it does not raise without permission
        if os.path.lexists(path):
            return "it is no directory: an adapter is one with an adapter_config.json and weights in safetensors"
        return "" if _HUB_NAME.fullmatch(path) else "there is no such directory"
    for file in _ADAPTER_FILES:
        try:
            (directory / file).open("rb").close()
        except FileNotFoundError:
            return f"the directory has no {file}"
        except OSError as error:
            return f"its {file} cannot be read: {error.strerror}"
    return ""


def parse_frontend_config(config: ServeConfig) -> FrontendConfig:
    """Return the options of a frontend. Raises ConfigError for options that every frontend would refuse."""
    from tercet.frontend.__main__ import app

    try:
        _, bound, _ = app.parse_args(frontend_flags(config), exit_on_error=False, print_error=False)
        bound.apply_defaults()
        frontend: FrontendConfig = bound.arguments["config"]
        frontend.http.api_keys()
        if frontend.serving.chat_template is not None:
            from tercet.frontend.model.template_files import operator_template

            operator_template(frontend.serving.chat_template)
    except (CycloptsError, ValueError) as error:
        raise ConfigError(f"frontend: {' '.join(str(error).split())}") from None
    return frontend


def serve(config: ServeConfig, make_parts: Callable[[ServeConfig, Path], Sequence[LaunchSpec]] = local_parts) -> int:
    """Serve until Ctrl-C or SIGTERM, and return the exit code.

    Raises ConfigError, and OSError if the machine lacks a resource.
    """
    began = time.monotonic()
    keep_output()
    if config.serve.dry_run:
        return subprocess.run(dry_run_command(config), stdin=subprocess.DEVNULL, check=False).returncode
    if config.scheduler.node_rank:
        return _serve_ranks(config, make_parts)
    http = parse_frontend_config(config).http
    locked = bool(config.frontend.api_key or http.api_keys())
    display = choose_terminal(config.serve)
    with listen(config.serve.host, config.serve.http_port) as listener, run_directory() as directory:
        if config.model == DEFAULT_MODEL:
            config = replace(config, model=_default_model())
        parts = make_parts(config, directory)
        _require_file_limit(len(parts))
        url = url_of(listener)

        def announce(readies: dict[str, Ready]) -> None:
            limits = next((ready.limits for ready in readies.values() if ready.limits), None)
            model = next(iter(config.frontend.served_model_name), limits.model if limits else config.model)
            grpc = config.serve.grpc_address
            _show_ready(display, welcome(url, model, locked, time.monotonic() - began, limits, grpc))

        supervisor = Supervisor(
            parts,
            directory,
            display,
            listener=listener,
            log_level=config.serve.log_level,
            log_format=config.serve.log_format,
            timeouts=Timeouts(startup=config.serve.startup_timeout),
            drain=http.shutdown_grace,
            announce=announce,
        )
        _stop_on_signals(supervisor)
        if not locked and not is_local(listener):
            display.line(f"tercet: warning: without --api-key everybody who reaches {url} may use it")
        display.line(f"tercet: starting {len(parts)} parts for {config.model} at {url}")
        return supervisor.run()


def _serve_ranks(config: ServeConfig, make_parts: Callable[[ServeConfig, Path], Sequence[LaunchSpec]]) -> int:
    """Run this host's share of a model that another host serves, until Ctrl-C or SIGTERM. Return the exit code."""
    host = config.scheduler.node_rank
    display = choose_terminal(config.serve)
    with run_directory() as directory:
        if config.model == DEFAULT_MODEL:
            config = replace(config, model=_default_model())
        parts = make_parts(config, directory)
        _require_file_limit(len(parts))

        def announce(_: dict[str, Ready]) -> None:
            _show_ready(display, f"ready: host {host} runs its share of {config.model}\n")

        supervisor = Supervisor(
            parts,
            directory,
            display,
            log_level=config.serve.log_level,
            log_format=config.serve.log_format,
            timeouts=Timeouts(startup=config.serve.startup_timeout),
            announce=announce,
        )
        _stop_on_signals(supervisor)
        address = config.scheduler.dist_init_addr
        display.line(f"tercet: starting host {host} of {config.model} for host 0 at {address}")
        return supervisor.run()


def _show_ready(display: Display, text: str) -> None:
    """Write lines to stdout; into the log if it is JSON, so that a collector of both streams gets only objects."""
    display.close()
    if isinstance(display, JsonTerminal):
        for line in text.splitlines():
            display.line(line)
        return
    sys.stdout.write(text)
    sys.stdout.flush()


def _stop_on_signals(supervisor: Supervisor) -> None:
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    on_signals([number for number in ends if signal.getsignal(number) is not signal.SIG_IGN], supervisor.stop)


def _default_model() -> str:
    """Return the name of the model to serve if none is named, downloaded with a progress bar on standard error."""
    command = [sys.executable, "-m", "tercet.scheduler", "default-model"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError("the default model cannot be found: name a MODEL")
    return done.stdout.strip()


def _require_file_limit(parts: int) -> None:
    """Raise OSError if this process, or a part that inherits its limit, may open too few files for so many parts."""
    try:
        raise_file_limit(LOWEST + _FILES_PER_PART * parts)
    except ChannelError as error:
        raise OSError(str(error)) from error


_EXAMPLES: dict[Task, tuple[str, dict[str, object]]] = {
    Task.GENERATE: ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    Task.EMBED: ("embeddings", {"input": "Hello"}),
    Task.CLASSIFY: ("classify", {"input": "Hello"}),
}


def welcome(
    url: str, model: str, locked: bool, seconds: float, limits: ModelLimits | None = None, grpc: str = ""
) -> str:
    """Return the text printed when the server is ready: its URL, its address of gRPC, and a curl command to try it."""
    key = ' -H "Authorization: Bearer $TERCET_API_KEY"' if locked else ""
    path, example = _EXAMPLES[limits.task if limits else Task.GENERATE]
    body = f" -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps({'model': model, **example}))}"
    if limits and limits.audio:
        path, body = "audio/transcriptions", f"{key} -F file=@audio.wav -F {shlex.quote(f'model={model}')}"
    also = f", gRPC at {grpc}" if grpc else ""
    return f"ready at {url} in {seconds:.1f} s{also}\ncurl {url}/v1/{path}{body}\n"
