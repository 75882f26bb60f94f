"""Conversion of the arguments of an `Engine` to requests of the frontend."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from tercet.frontend.api.sglang.generate import prompts_of, to_generate_requests
from tercet.frontend.api.sglang.generate_schema import NativeGenerate, Tokenize
from tercet.frontend.errors import ApiError, BadRequestError, UnsupportedParameterError
from tercet.frontend.http.loop_turns import result_of
from tercet.frontend.http.request_body import validation_error
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.embedding_request import EmbeddingRequest, Input, TextInput
from tercet.frontend.model.prompts import ChatPrompt, Prompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.values import LoRAAdapter, Task

Texts = str | Iterable[str]
Ids = Iterable[int] | Iterable[Iterable[int]]
Sampling = Mapping[str, Any] | Iterable[Mapping[str, Any] | None]

OPTIONS = frozenset(
    {
        *("return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs"),
        *("priority", "cache_salt", "lora_path", "image_data"),
    }
)
"""Parameters of /generate other than prompts and sampling parameters."""


def to_requests(
    prompt: Texts | None,
    input_ids: Ids | None,
    sampling: Sampling | None,
    options: Mapping[str, Any],
    model: ServedModel,
    lora: Mapping[str, LoRAAdapter],
) -> tuple[list[GenerateRequest], bool]:
    """Return one request per prompt, and whether the prompt was single, not a list. `lora` maps names to adapters.

    Arrays, series and tensors are accepted as lists. Raises TypeError for an unknown option, ValueError and
    BadRequestError for invalid values; a note names the prompt if there are several.
    """
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"there is no option {min(unknown)!r}: there are {', '.join(sorted(OPTIONS))}")
    if (prompt is None) == (input_ids is None):
        raise ValueError("give either a prompt or input_ids")
    inputs, single = _texts(prompt) if prompt is not None else _ids(input_ids)
    each = [sampling] * len(inputs) if sampling is None or isinstance(sampling, str | Mapping) else list(sampling)
    if len(each) != len(inputs):
        raise ValueError(f"{len(inputs)} prompts with {len(each)} sampling_params")
    named = options.get("lora_path")
    names = [named] * len(inputs) if named is None or isinstance(named, str) else list(named)
    if len(names) != len(inputs):
        raise ValueError(f"{len(inputs)} prompts with {len(names)} adapters in lora_path")
    sent = options.get("image_data")
    images = [sent] if single else [None] * len(inputs) if sent is None else list(sent)
    if len(images) != len(inputs):
        raise ValueError(f"{len(inputs)} prompts with images of {len(images)} in image_data")
    requests = []
    for place, (given, params, name, own_images) in enumerate(zip(inputs, each, names, images, strict=True)):
        own = {"sampling_params": {} if params is None else params, "lora_path": name, "image_data": own_images}
        try:
            requests.append(_request({**given, **options, **own}, model, lora))
        except (ValueError, ApiError) as error:
            if not single:
                add_prompt_note(error, place)
            raise
    return requests, single


def to_chat(
    messages: Iterable[Mapping[str, Any]],
    tools: Iterable[Mapping[str, Any]] | None,
    model: ServedModel,
    *,
    add_generation_prompt: bool,
) -> Prompt:
    """Return the prompt of a chat in the format of /v1/chat/completions. Raises ValueError, BadRequestError.

    Images are refused: the token ids of the prompt would be sent without them.
    """
    body = {"messages": list(messages), "tools": tools and list(tools), "add_generation_prompt": add_generation_prompt}
    try:
        [prompt] = prompts_of(Tokenize.model_validate(body), model)
    except ValidationError as error:
        raise ValueError(str(validation_error(error, body, Tokenize))) from None
    if isinstance(prompt, ChatPrompt) and prompt.images:
        raise UnsupportedParameterError(
            "Token ids hold no images: give a text with its image_data to generate, or send the chat to a server.",
            param=prompt.images[0].param,
        )
    return prompt


def to_inputs(prompt: Texts, model: ServedModel, truncate: int | None) -> tuple[EmbeddingRequest, bool]:
    """Return the texts to embed, and whether the text was single. Raises ValueError, BadRequestError."""
    if model.limits.task is not Task.EMBED:
        raise BadRequestError(f"The model {model.name!r} makes no vectors.", param="model")
    if truncate is not None and truncate != -1 and truncate < 1:
        raise ValueError(f"truncate must be a number of tokens, or -1 for what the model reads, not {truncate}")
    texts, single = _texts(prompt)
    inputs: list[Input] = [TextInput(each["text"]) for each in texts]
    params = ["prompt" if single else f"prompt[{place}]" for place in range(len(inputs))]
    return EmbeddingRequest(model=model.name, inputs=inputs, params=params, truncate=truncate), single


def add_prompt_note(error: BaseException, place: int) -> None:
    """Add a note to an error that names the prompt by its index, from 0."""
    error.add_note(f"This is about prompt {place} of the list.")


def _request(body: dict[str, Any], model: ServedModel, lora: Mapping[str, LoRAAdapter]) -> GenerateRequest:
    if not isinstance(body["sampling_params"], Mapping):
        raise ValueError(f"sampling_params must be a mapping, or one for each prompt, not {body['sampling_params']!r}")
    body["sampling_params"] = {name: _to_python(value) for name, value in body["sampling_params"].items()}
    try:
        asked = NativeGenerate.model_validate(body)
    except ValidationError as error:
        raise ValueError(str(validation_error(error, body, NativeGenerate))) from None
    for name, param in asked.adapters().items():
        if name not in lora:
            raise BadRequestError(f"The engine was made without an adapter {name!r}.", param=param)
    [request] = result_of(to_generate_requests(asked, model, lora))
    return request


def _texts(prompt: Any) -> tuple[list[dict[str, Any]], bool]:
    if isinstance(prompt, str):
        return [{"text": prompt}], True
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt must be a text, or several in a list, not {type(prompt).__name__}")
    texts = _to_list(prompt)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"prompt {place} of the list is no text but {type(text).__name__}")
    return [{"text": text} for text in texts], False


def _ids(given: Any) -> tuple[list[dict[str, Any]], bool]:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"input_ids must be a list of ids, or several of them, not {type(given).__name__}")
    ids = _to_list(given)
    if ids and not isinstance(ids[0], Iterable):
        return [{"input_ids": ids}], True
    return [{"input_ids": _to_list(each) if isinstance(each, Iterable) else each} for each in ids], False


def _to_list(values: Any) -> list[Any]:
    """Return an iterable as a list of Python numbers and strings; arrays and their scalars have `tolist`."""
    listed = list(_to_python(values))
    if listed and hasattr(listed[0], "tolist") and not isinstance(listed[0], Iterable):
        return list(map(_to_python, listed))
    return listed


def _to_python(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
