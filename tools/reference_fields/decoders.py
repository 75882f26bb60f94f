"""Fields of config.json in transformers for the architectures that run on Tercet's own modules."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

from tercet.scheduler.architectures import generators
from tools.reference_fields.walker import Fields, fields_of, imports_of, root

FILE = Path(__file__).with_name("transformers-decoders.toml")
SHARED = (
    "cache_utils",
    "configuration_utils",
    "integrations/heterogeneity/configuration_utils",
    "integrations/moe",
    "integrations/sdpa_attention",
    "masking_utils",
    "modeling_layers",
    "modeling_rope_utils",
    "modeling_utils",
)
"""Modules of transformers that every architecture uses and that read configs."""
_WITHOUT_FIELDS = (
    "activations",
    "generation",  # reads generation_config.json
    "image_processing_utils",  # of images
    "initialization",
    "integrations",  # their relevant parts are above
    "integrations/accelerate",
    "models/auto",
    "models/auto/configuration_auto",
    "models/auto/modeling_auto",
    "modeling_flash_attention_utils",
    "modeling_outputs",
    "processing_utils",
    "utils",
    "utils/generic",
    "utils/import_utils",
    "utils/output_capturing",
    "utils/type_validators",
    "vision_utils",  # of images, which are not read
)
"""Modules that architectures import and that read no config field which changes an answer."""
_MODELS = {
    "KimiK25ForConditionalGeneration": ("kimi_k25",),
    "LLaMAForCausalLM": ("llama",),
    "MistralForCausalLM": ("mistral", "ministral"),
}
"""Folders of models for architectures with another one than their class: older names, and choices of `AutoConfig`."""


def models_of(architecture: str) -> tuple[str, ...]:
    """Return the folders of an architecture's classes below `models`. Raises LookupError for one without."""
    if architecture in _MODELS:
        return _MODELS[architecture]
    for path in sorted(root().glob("models/*/modeling_*.py")):
        if f"class {architecture}(" in path.read_text():
            return (path.parent.name,)
    raise LookupError(f"transformers {version('transformers')} has no {architecture}")


def fields_of_architecture(architecture: str) -> Fields:
    """Return the fields that an architecture's files declare and read. Raises LookupError for an unknown import."""
    found = Fields()
    for model in models_of(architecture):
        paths = [f"models/{model}/{kind}_{model}.py" for kind in ("configuration", "modeling")]
        for path in paths:
            unknown = {name for name in imports_of(path) if name not in (*SHARED, *_WITHOUT_FIELDS)}
            if other := {name for name in unknown if not name.startswith(f"models/{model}/")}:
                raise LookupError(f"{path} imports {', '.join(sorted(other))}: say in decoders.py what it reads")
            found.add(fields_of(path))
    found.read -= found.methods | shared_fields().methods
    return found


@cache
def shared_fields() -> Fields:
    """Return the fields that modules of all architectures declare and read."""
    found = Fields()
    for module in SHARED:
        found.add(fields_of(f"{module}.py"))
    found.read -= found.methods
    return found


def written() -> str:
    """Return the contents of the file of fields."""
    lines = [
        "# Fields of config.json that transformers declares and reads. Written by python -m tools.reference_fields.",
        f'transformers = "{version("transformers")}"',
        "",
        *_table("shared", shared_fields()),
    ]
    for architecture in sorted(generators()):
        lines += ["", *_table(architecture, fields_of_architecture(architecture))]
    return "\n".join(lines) + "\n"


def _table(name: str, fields: Fields) -> list[str]:
    return [
        f"[{name}]",
        *_names("read", fields.read),
        *_names("rope", fields.rope),
        f"[{name}.aliases]",
        *(f"{alias} = {_quoted(field)}" for alias, field in sorted(fields.aliases.items())),
        f"[{name}.declared]",
        *(f"{field} = {_quoted(default)}" for field, default in sorted(fields.declared.items())),
    ]


def _names(key: str, names: set[str]) -> list[str]:
    return [f"{key} = [", *(f'    "{name}",' for name in sorted(names)), "]"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
