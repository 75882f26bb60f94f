"""Fields of the files that sentence-transformers puts beside a model, and their settings for reading texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercet.protocol.messages.values import Task
from tercet.scheduler.file_fields import FileFields, Only, unsupported
from tercet.scheduler.model_files import read_json

SETTINGS = "config_sentence_transformers.json"
TRANSFORMER_NAMES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Candidate files of the transformer's fields: the first one that exists and is not empty is read."""
ACTIVATIONS = ("Sigmoid", "Identity", "Softmax")
"""Torch modules that turn logits into scores and that frontends support."""

_PREFIX = "sentence_transformers."
_NOTE = "a note about how the file was made"
_TASKS = {Task.EMBED: "feature-extraction", Task.CLASSIFY: "sequence-classification"}
_OUTPUTS = {Task.EMBED: ("last_hidden_state", "token_embeddings"), Task.CLASSIFY: ("logits", "scores")}
_SENTENCE_EMBEDDING = ("sentence_embedding",)
_BUILT_IN_PROMPTS = ("query", "document")

MODULE = FileFields(
    honoured=frozenset({"type", "path"}),
    no_effect={"idx": "modules stand in order", "name": _NOTE},
    refused={"kwargs": Only("arguments of a module's call are not given")},
)
"""Fields of an entry of modules.json."""
TRANSFORMER = FileFields(
    honoured=frozenset(
        {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"}
        | {"model_args", "model_kwargs", "config_args", "config_kwargs", "tokenizer_args", "processor_kwargs"}
    ),
    no_effect={"unpad_inputs": "inputs are not padded"},
    refused={
        "document_length": Only("lengths by kind of text are not supported"),
        "processing_kwargs": Only("arguments of the tokenizer are not supported"),
        "query_expansion": Only("queries are not expanded"),
        "query_length": Only("lengths by kind of text are not supported"),
        "tokenizer_name_or_path": Only("the tokenizer must lie in the model's own folder"),
    },
)
ARGUMENTS = {
    "model": ("attn_implementation", "dtype", "torch_dtype", "trust_remote_code"),
    "config": ("trust_remote_code",),
    "tokenizer": ("clean_up_tokenization_spaces", "padding_side", "trust_remote_code", "use_fast"),
}
"""Arguments for loading each part that have no effect here."""
POOLING = FileFields(
    honoured=frozenset(
        {"pooling_mode", "include_prompt", "pooling_mode_cls_token", "pooling_mode_max_tokens"}
        | {"pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens"}
        | {"pooling_mode_lasttoken"}
    ),
    no_effect=dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), "it is the model's hidden_size"),
)
NORMALIZE = FileFields(
    honoured=frozenset(),
    refused={
        "module_input_name": Only("only whole texts are normalized", _SENTENCE_EMBEDDING),
        "module_output_name": Only("only whole texts are normalized", _SENTENCE_EMBEDDING),
    },
)
SETTINGS_FIELDS = FileFields(
    honoured=frozenset({"prompts", "default_prompt_name", "truncate_dim", "activation_fn", "similarity_fn_name"}),
    no_effect={
        "__version__": _NOTE,
        "keep_in_fp32_modules": "--dtype chooses the numbers of all modules",
        "requirements": _NOTE,
    },
    refused={
        "model_type": Only(
            "only models of one vector or one score are supported", ("sentencetransformer", "crossencoder")
        )
    },
)


def kind_of(module: Mapping[str, Any], where: str) -> str:
    """Return the last part of a module's type. Raises ModelError for a type in a model's own code."""
    MODULE.check(module, f"{where}: ")
    name = module.get("type")
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        raise unsupported(f"{where}: type", name, f"only modules of {_PREFIX.removesuffix('.')} are")
    return name.rpartition(".")[2]


def longest_text(directory: Path, task: Task) -> int | None:
    """Return `max_seq_length`, or None if it is missing. Raises ModelError for unsupported fields."""
    for name in TRANSFORMER_NAMES:
        path = directory / name
        config = read_json(path) if path.is_file() else {}
        if config:
            _check_transformer(config, f"{path}: ", task)
            if name != TRANSFORMER_NAMES[0] and config.get("do_lower_case"):
                raise unsupported(f"{path}: do_lower_case", True, f"it is read in {TRANSFORMER_NAMES[0]} only")
            length = config.get("max_seq_length")
            if length is not None and (type(length) is not int or length < 1):
                raise unsupported(f"{path}: max_seq_length", length, "it is no positive number of tokens")
            return None if length is None else min(length, 2**31 - 1)
    return None


def shortened_to(directory: Path, task: Task) -> int | None:
    """Return the number of dimensions to keep of a vector, or None for all.

    Raises ModelError for unsupported fields.
    """
    path = directory / SETTINGS
    if not path.is_file():
        return None
    settings = read_json(path)
    SETTINGS_FIELDS.check(settings, f"{path}: ", unknown=False)
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if name is not None and name not in _BUILT_IN_PROMPTS and (not isinstance(prompts, dict) or name not in prompts):
        raise unsupported(f"{path}: default_prompt_name", name, "it is none of the prompts")
    if task is Task.CLASSIFY and isinstance(prompts, dict) and prompts.get(name):
        raise unsupported(f"{path}: default_prompt_name", name, "pairs of texts have no prompt")
    similarity = settings.get("similarity_fn_name")
    if similarity not in (None, "cosine", "dot", "euclidean", "manhattan"):
        raise unsupported(f"{path}: similarity_fn_name", similarity, "it is none of sentence-transformers'")
    check_activation(settings.get("activation_fn"), f"{path}: activation_fn")
    dimensions = settings.get("truncate_dim")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise unsupported(f"{path}: truncate_dim", dimensions, "it is no positive number")
    return dimensions


def check_activation(name: Any, where: str) -> None:
    """Raise ModelError for a torch module that frontends do not support.

    Other names are ignored by the reference, too.
    """
    if isinstance(name, str) and name.startswith("torch.") and name.rpartition(".")[2] not in ACTIVATIONS:
        raise unsupported(where, name, f"only {', '.join(ACTIVATIONS)} are computed")


def _check_transformer(config: Mapping[str, Any], where: str, task: Task) -> None:
    TRANSFORMER.check(config, where, unknown=False)
    output, name = _OUTPUTS[task]
    only = {"transformer_task": _TASKS[task], "module_output_name": name}
    for field, value in only.items():
        if config.get(field) not in (None, value):
            raise unsupported(f"{where}{field}", config[field], f"a model that is there to {task.value} has {value!r}")
    modalities = config.get("modality_config")
    text = {"method": "forward", "method_output_name": output}
    if modalities is not None and (not isinstance(modalities, dict) or modalities.get("text") != text):
        raise unsupported(f"{where}modality_config", modalities, f"texts have {output!r} of 'forward'")
    if modalities is not None and "message" in modalities:
        raise unsupported(f"{where}modality_config", "message", "texts are not put into a chat template")
    for part, harmless in ARGUMENTS.items():
        for field in (f"{part}_args", f"{'processor' if part == 'tokenizer' else part}_kwargs"):
            arguments = config.get(field) or {}
            if not isinstance(arguments, dict) or arguments.keys() - {*harmless}:
                raise unsupported(f"{where}{field}", arguments, f"only {', '.join(harmless)} may stand there")


def check_classifier(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a classifier's config.json with an unsupported activation."""
    saved = config.get("sentence_transformers")
    if isinstance(saved, dict):
        check_activation(saved.get("activation_fn"), "config.json: sentence_transformers.activation_fn")
    name = "sbert_ce_default_activation_function"
    check_activation(config.get(name), f"config.json: {name}")
