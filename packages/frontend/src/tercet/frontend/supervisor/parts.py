"""Parts to start on one machine, with their command lines."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from tercet.frontend.supervisor.options import ServeConfig, extra_flags, parse_bytes
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import supervised_id

_MAX_LORAS = 8
_NOT_COPIED = {"api_key", "admin_key", "lora", "response_store"}
"""Options of a frontend that do not become flags as they are. Keys travel in the environment."""


@dataclass(frozen=True)
class LaunchSpec:
    """Process to keep alive. `command` lacks the arguments common to all parts: peer id, addresses, parent pipe."""

    name: str
    """Peer id."""
    role: Role
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables, for secrets that must not show in a command line."""
    inherits_listener: bool = False
    """Passes the listening socket to the part, as --fd."""
    startup_args: tuple[str, ...] = ()
    """Added to the command until the part has been ready once: faults that stop a start but not a running server."""


def local_parts(config: ServeConfig, directory: Path, *, frontends: bool = True) -> list[LaunchSpec]:
    """Return this machine's parts with inboxes in `directory`: without frontends for offline use.

    A host other than the first of a model has a scheduler's process alone, which runs ranks.
    """
    module = (sys.executable, "-m")
    parts = [
        LaunchSpec(
            supervised_id(Role.SCHEDULER, number),
            Role.SCHEDULER,
            (
                *(*module, "tercet.scheduler", f"--model={config.model}"),
                *config.scheduler.flags(),
                *_lora_flags(config),
                *_device_flags(config, number),
                *(["--language-only"] if config.serve.encoders else []),
                *([f"--data-parallel-rank={number}"] if config.schedulers > 1 else []),
                *extra_flags(config.scheduler_extra),
            ),
        )
        for number in range(config.schedulers)
    ]
    if config.scheduler.node_rank:
        return parts
    parts += [
        LaunchSpec(
            supervised_id(Role.SCHEDULER, config.schedulers + number),
            Role.SCHEDULER,
            (*module, "tercet.scheduler", f"--model={config.model}", *_encoder_flags(config, number)),
        )
        for number in range(config.serve.encoders)
    ]
    parts += [
        LaunchSpec(
            supervised_id(Role.DETOKENIZER, number),
            Role.DETOKENIZER,
            (*module, "tercet.detokenizer", *extra_flags(config.detokenizer_extra)),
        )
        for number in range(config.serve.detokenizer_workers)
    ]
    if not frontends:
        return parts
    frontend = config.frontend
    flags = [
        *frontend_flags(config),
        *("--scheduler", f"ipc://{directory}/scheduler-*", "--detokenizer", f"ipc://{directory}/detokenizer-*"),
    ]
    given = {"TERCET_API_KEYS": frontend.api_key, "TERCET_ADMIN_KEYS": frontend.admin_key}
    env = {name: "\n".join(keys) for name, keys in given.items() if keys}
    command = (*module, "tercet.frontend", *flags)
    startup_args = ("--require-lora",) if frontend.lora else ()
    names = [supervised_id(Role.FRONTEND, number) for number in range(config.serve.frontend_workers)]
    for name in names:
        siblings = (f"--sibling={other}" for other in names if other != name)
        parts.append(
            LaunchSpec(
                name, Role.FRONTEND, (*command, *siblings), env, inherits_listener=True, startup_args=startup_args
            )
        )
    return parts


def dry_run_command(config: ServeConfig) -> list[str]:
    """Return the command that prints the memory of the model."""
    memory = [f"--memory={parse_bytes(config.serve.memory)}"] if config.serve.memory else []
    flags = [*config.scheduler.flags(), *_lora_flags(config), *extra_flags(config.scheduler_extra)]
    return [sys.executable, "-m", "tercet.scheduler", "dry-run", f"--model={config.model}", *flags, *memory]


def frontend_flags(config: ServeConfig) -> list[str]:
    """Return the command line of a frontend's options."""
    flags = [f"--lora={name}={path}" for name, path in config.lora.items()]
    for option in fields(config.frontend):
        value = getattr(config.frontend, option.name)
        if option.name in _NOT_COPIED or value == option.default:
            continue
        if isinstance(value, Path):
            value = value.expanduser().absolute()
        values = value if isinstance(value, tuple) else (value,)
        flags += [f"--{option.name.replace('_', '-')}={each}" for each in values]
    if config.serve.grpc_mode:
        flags.append(f"--grpc-listen={config.serve.grpc_address}")
    return [*flags, f"--response-store={config.frontend.response_store}", *extra_flags(config.frontend_extra)]


def _device_flags(config: ServeConfig, number: int) -> list[str]:
    """Return the flag that gives each of several schedulers its own GPUs, unless a device was configured."""
    if config.schedulers + config.serve.encoders == 1 or "device" in config.scheduler_extra:
        return []
    return [f"--device=auto:{number * _ranks(config)}"]


def _ranks(config: ServeConfig) -> int:
    """Return the processes of a scheduler."""
    return (config.scheduler.tensor_parallel_size or 1) * (config.scheduler.pipeline_parallel_size or 1)


def _encoder_flags(config: ServeConfig, number: int) -> list[str]:
    """Return the options of a scheduler that only encodes: those that it shares with the others, and its own GPU.

    GPUs of encoders come after those of the schedulers.
    """
    own = {
        "dtype": config.scheduler.dtype,
        "threads": config.scheduler.threads,
        "max-queued-requests": config.scheduler_extra.get("max-queued-requests"),
        "device": config.scheduler_extra.get("device", f"auto:{config.schedulers * _ranks(config) + number}"),
    }
    return ["--encoder-only", *(f"--{name}={value}" for name, value in own.items() if value is not None)]


def _lora_flags(config: ServeConfig) -> list[str]:
    """Return the flag for the number of adapters if --lora names some and no number was configured."""
    return [f"--max-loras={_MAX_LORAS}"] if config.frontend.lora and config.scheduler.max_loras is None else []
