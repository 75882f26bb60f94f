"""What a model's files say of inputs and scores: sentence-transformers' prompts, and what makes scores of logits."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tercet.frontend.model_json import read_object

_Form = TypeVar("_Form")
Activation = Callable[[Sequence[float]], list[float]]


def softmax(scores: Sequence[float]) -> list[float]:
    """Shares of one, for labels that exclude each other."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def sigmoid(scores: Sequence[float]) -> list[float]:
    """Each between 0 and 1, for labels that do not."""
    return [1 / (1 + math.exp(-score)) if score >= 0 else 1 - 1 / (1 + math.exp(score)) for score in scores]


def identity(scores: Sequence[float]) -> list[float]:
    """As they are."""
    return list(scores)


_BY_NAME: dict[str, Activation] = {"Sigmoid": sigmoid, "Identity": identity, "Softmax": softmax}
"""By the last part of the names of torch's modules."""


class _Prompts(msgspec.Struct):
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None


class _Transformer(msgspec.Struct):
    do_lower_case: bool | None = None


class SentenceFiles:
    """Files of the wrong form raise ValueError; those that are not there say nothing."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        prompts = _read(files, "config_sentence_transformers.json", _Prompts)
        self.prompts = {name: text for name, text in (prompts.prompts or {}).items() if text}
        """Put before a text, by name."""
        self.default_prompt = self.prompts.get(prompts.default_prompt_name or "", "")
        transformer = _read(files, "sentence_bert_config.json", _Transformer)
        self.lowers = bool(transformer.do_lower_case)
        """Whether texts are put into lower case first."""
        self.activation = _activation(read_object(files, "config.json"))
        """Makes scores of what the model's head gives; None leaves that to the number of labels."""

    def activate(self, scores: Sequence[float]) -> list[float]:
        """What a client is told of a head's numbers."""
        return (self.activation or (sigmoid if len(scores) == 1 else softmax))(scores)


def _read(files: Mapping[str, bytes], name: str, form: type[_Form]) -> _Form:
    try:
        return msgspec.convert(read_object(files, name), form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error


def _activation(config: Mapping[str, Any]) -> Activation | None:
    """What sentence-transformers saved, else what the kind of problem asks for."""
    saved = config.get("sentence_transformers")
    name = saved.get("activation_fn") if isinstance(saved, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if isinstance(name, str) and (found := _BY_NAME.get(name.rpartition(".")[2])):
        return found
    match config.get("problem_type"):
        case "multi_label_classification":
            return sigmoid
        case "regression":
            return identity
        case "single_label_classification":
            return softmax
    return None
