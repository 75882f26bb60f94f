"""The `tercet` command. Each subcommand imports its modules when it runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Dict

from tercet.frontend.__about__ import __version__
from tercet.frontend.supervisor.options import (
    DEFAULT_MODEL,
    ConfigError,
    FrontendOptions,
    SchedulerOptions,
    ServeConfig,
    ServeOptions,
    read_config,
)
from tercet.protocol.system.streams import give_up_output, prepare_streams

if TYPE_CHECKING:
    from cyclopts.argument import ArgumentCollection

_SERVE = ServeOptions()
_FRONTEND = FrontendOptions()
_SCHEDULER = SchedulerOptions()


def _fill_from_file(app: App, commands: tuple[str, ...], arguments: "ArgumentCollection") -> None:
    """Fill options that the command line left out from the file of --config."""
    for argument in arguments:
        if "--config" in argument.names and argument.tokens:
            path = argument.tokens[0].value
            Dict(read_config(Path(path)), source=path, use_commands_as_keys=False)(app, commands, arguments)


app = App(
    name="tercet",
    help="Serve language models behind the OpenAI HTTP API.",
    version=__version__,
    config=_fill_from_file,
    result_action="return_value",
)


@app.command
def serve(
    model: Annotated[
        str, Parameter(help="A directory, a GGUF file, a Hugging Face name, or a name that `tercet models` lists.")
    ] = DEFAULT_MODEL,
    *,
    config: Annotated[Path | None, Parameter(help="TOML file with a table for each part; options go over it.")] = None,
    options: ServeOptions = _SERVE,
    frontend_options: FrontendOptions = _FRONTEND,
    scheduler_options: SchedulerOptions = _SCHEDULER,
    frontend: Annotated[dict[str, str] | None, Parameter(help="--frontend.NAME VALUE: a frontend's own.")] = None,
    scheduler: Annotated[dict[str, str] | None, Parameter(help="--scheduler.NAME VALUE: a scheduler's own.")] = None,
    detokenizer: Annotated[dict[str, str] | None, Parameter(help="--detokenizer.NAME VALUE: likewise.")] = None,
) -> ServeConfig:
    """Serve a model: start every part, watch over them, stop them on Ctrl-C."""
    del config  # _fill_from_file has read it
    return ServeConfig(
        model=model,
        serve=options,
        frontend=frontend_options,
        scheduler=scheduler_options,
        frontend_extra=frontend or {},
        scheduler_extra=scheduler or {},
        detokenizer_extra=detokenizer or {},
    )


@app.command
def chat(
    *,
    url: Annotated[str, Parameter(help="Address of the server.")] = "http://127.0.0.1:30000",
    model: Annotated[str | None, Parameter(help="Name of the model; by default the first of the server.")] = None,
    system: Annotated[str | None, Parameter(help="A system message to begin with.")] = None,
    temperature: Annotated[float | None, Parameter(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, Parameter(help="The longest reply, in tokens.")] = None,
    api_key: Annotated[str | None, Parameter(help="The server's key.", env_var="TERCET_API_KEY")] = None,
) -> int:
    """Talk to a running server. /reset starts over, /exit leaves, Ctrl-C stops a reply."""
    from tercet.frontend.cli.chat import ChatError, Conversation, Server, converse

    try:
        server = Server(url, api_key)
        conversation = Conversation(
            model or server.first_model(), system=system, temperature=temperature, max_tokens=max_tokens
        )
        return converse(server, conversation, terminal=sys.stdout.isatty(), interactive=sys.stdin.isatty())
    except ChatError as error:
        print(f"tercet: error: {error}", file=sys.stderr)  # noqa: T201
        return 1


@app.command
def keys(
    directory: Annotated[Path, Parameter(help="A folder for each role is made in it.")],
    *,
    if_missing: Annotated[bool, Parameter(help="Leave a whole set of keys as it is.", negative="")] = False,
    force: Annotated[bool, Parameter(help="Put new keys in the place of others.", negative="")] = False,
) -> int:
    """Make the keys that parts meet under on tcp://. Each part gets the folder of its role, and no other."""
    from tercet.protocol.errors import KeysError
    from tercet.protocol.transport.keys import have_keys, write_keys

    try:
        if not (if_missing and have_keys(directory)):
            write_keys(directory, force=force)
    except KeysError as error:
        print(f"tercet: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


app.command("tercet.frontend.cli.bench.command:app", name="bench", help="Measure a running server.")
app.command(
    "tercet.frontend.cli.launch_server.command:app",
    name="launch_server",
    help="Serve a model with the options of SGLang's launch_server.",
)


@app.command
def pull(
    model: Annotated[str, Parameter(help="A Hugging Face name, or a short one that `tercet models` lists.")],
) -> int:
    """Download a model; after an interrupted download, only missing files."""
    from tercet.frontend.cli.model_commands import run_scheduler

    return run_scheduler("pull", "--", model)


@app.command
def models() -> int:
    """List the models on this machine, with their sizes."""
    from tercet.frontend.cli.model_commands import run_scheduler

    return run_scheduler("models")


@app.command
def doctor() -> int:
    """Print what this machine can do, and what missing pieces cost, for a bug report. No keys are in it."""
    from tercet.frontend.cli.doctor import report

    for line in report():
        print(line, flush=True)  # noqa: T201
    return 0


@app.command
def version() -> int:
    """Print the version."""
    print(__version__)  # noqa: T201
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, print failures in one line, and return the exit code.

    The code is 2 for an invalid option, 1 if the machine lacks a resource such as files, memory or disk space. Raises
    KeyboardInterrupt.
    """
    prepare_streams()
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
        if isinstance(result, ServeConfig):
            from tercet.frontend.supervisor.serve import require_adapter_files, require_packages
            from tercet.frontend.supervisor.serve import serve as run

            require_packages()
            require_adapter_files(result.lora)
            result = run(result)
        sys.stdout.flush()
    except (CycloptsError, ConfigError) as error:
        line = " ".join(str(error).split())
        if isinstance(error, UnusedCliTokensError):
            line = f"that is more than it takes: {' '.join(error.unused_tokens or ())}"
        elif isinstance(error, UnknownOptionError) and error.command_chain == ("serve",):
            line += " Options of one part are written --scheduler.NAME VALUE or --frontend.NAME VALUE"
        print(f"tercet: error: {line}", file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:
        print(f"tercet: error: {error}", file=sys.stderr)  # noqa: T201
        give_up_output()
        return 1
    return result if isinstance(result, int) else 0
