"""The model that `tercet serve` serves by default."""

import sys

from tercet.scheduler.gguf.gguf_packages import packaged_gguf
from tercet.scheduler.gguf.gguf_paths import GGUFError

DEFAULT_MODEL = "smollm2-135m"
_FALLBACK = "embedded"


def print_default_model() -> None:
    """Print the name of the default model, downloaded if needed, or of the embedded one.

    If the default model cannot be downloaded, standard error says why.
    """
    name = DEFAULT_MODEL
    try:
        packaged_gguf(name)
    except GGUFError as error:
        sys.stderr.write(f"tercet: {error}; serving the small model that comes with Tercet, named {_FALLBACK!r}\n")
        name = _FALLBACK
    sys.stdout.write(name + "\n")
