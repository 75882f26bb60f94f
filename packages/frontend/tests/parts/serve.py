"""`tercet serve` with tiny parts: their modes (scheduler, detokenizer, frontend), then a port or an option below."""

import sys
from dataclasses import replace
from pathlib import Path

from tercet.frontend.supervisor.options import ConfigError, FrontendOptions, ServeConfig, ServeOptions
from tercet.frontend.supervisor.parts import LaunchSpec
from tercet.frontend.supervisor.serve import serve
from tercet.protocol.messages.values import Role
from tercet.protocol.system.streams import prepare_streams

PART = Path(__file__).with_name("part.py")


def tiny_parts(config: ServeConfig, directory: Path) -> list[LaunchSpec]:
    """Return one part of each role in the given mode; restarts are marked in the run directory."""
    env = {"TERCET_API_KEYS": "\n".join(config.frontend.api_key)} if config.frontend.api_key else {}
    return [
        LaunchSpec(
            f"{role}-0",
            role,
            (sys.executable, str(PART), mode, f"--once={directory / mode}.once"),
            env if role is Role.FRONTEND else {},
            inherits_listener=role is Role.FRONTEND,
        )
        for role, mode in zip((Role.SCHEDULER, Role.DETOKENIZER, Role.FRONTEND), sys.argv[1:4], strict=True)
    ]


if __name__ == "__main__":
    prepare_streams()
    config = ServeConfig(frontend=FrontendOptions(api_key=("s3cret",)), serve=ServeOptions(port=0))
    match sys.argv[4:]:
        case ["--grace", seconds]:
            config = replace(config, frontend=FrontendOptions(shutdown_grace=int(seconds)))
        case ["--extra-grace", seconds]:
            config = replace(config, frontend_extra={"shutdown_grace": seconds})
        case ["--key-file", path]:
            keys = {"api-key-file": path}
            config = ServeConfig(serve=ServeOptions(host="0.0.0.0", port=0), frontend_extra=keys)
        case ["--open"]:
            config = ServeConfig(serve=ServeOptions(host="0.0.0.0", port=0))
        case ["--json"]:
            config = replace(config, serve=ServeOptions(port=0, log_format="json"))
        case [port]:
            config = replace(config, serve=ServeOptions(port=int(port)))
    try:
        raise SystemExit(serve(config, tiny_parts))
    except ConfigError as error:
        sys.exit(f"tercet: error: {error}")
