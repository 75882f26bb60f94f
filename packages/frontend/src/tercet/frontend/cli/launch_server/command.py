"""The command `tercet launch_server`, and its help."""

import sys
from typing import Annotated

from cyclopts import App, Parameter

from tercet.frontend.cli.launch_server.translation import server_args, translate
from tercet.frontend.supervisor.options import ServeConfig


def _epilogue() -> str:
    """Return the end of the help: each option of SGLang that is taken, with its equal or the lack of an effect."""
    args = server_args()
    lines = ["It takes these options of SGLang, each with its equal, and all options of `tercet serve`."]
    lines += [f"- `{', '.join(arg.names)}`: `{arg.ours}`" for arg in args if arg.alias]
    lines += [f"- `{', '.join(arg.names)}`: no effect: {arg.ignored}" for arg in args if arg.ignored]
    return "\n".join([lines[0], "", *lines[1:], "", "Any other option of SGLang is refused, with what to use instead."])


app = App(name="launch_server", help_epilogue=_epilogue(), help_format="markdown", result_action="return_value")


@app.default
def launch_server(*tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> ServeConfig:
    """Serve a model with the options of SGLang's launch_server."""
    from tercet.frontend.cli.main import app as tercet

    arguments, notes = translate(tokens)
    for note in notes:
        print(f"tercet: note: {note}", file=sys.stderr)  # noqa: T201
    config = tercet(["serve", *arguments], exit_on_error=False, print_error=False)
    assert isinstance(config, ServeConfig)
    return config
