"""Settings of sentence-transformers: prompts, similarity, and the activation of classification heads."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from tercet.protocol.json_files import read_object

_Form = TypeVar("_Form")
Activation = Callable[[Sequence[float]], list[float]]
Similarity = Callable[[Sequence[float], Sequence[float]], float]


def softmax(scores: Sequence[float]) -> list[float]:
    """Return probabilities of mutually exclusive labels."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def sigmoid(scores: Sequence[float]) -> list[float]:
    """Return independent probabilities of labels."""
    return [1 / (1 + math.exp(-score)) if score >= 0 else 1 - 1 / (1 + math.exp(score)) for score in scores]


def identity(scores: Sequence[float]) -> list[float]:
    return list(scores)


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the cosine similarity; 0 if a vector is zero."""
    lengths = math.hypot(*left) * math.hypot(*right)
    return dot(left, right) / lengths if lengths else 0.0


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    total: float = sum(map(operator.mul, left, right))
    return total


def euclidean(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the negated Euclidean distance."""
    return -math.dist(left, right)


def manhattan(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the negated Manhattan distance."""
    total: float = sum(map(abs, map(operator.sub, left, right)))
    return -total


_SIMILARITIES: dict[str, Similarity] = {"cosine": cosine, "dot": dot, "euclidean": euclidean, "manhattan": manhattan}
_BY_NAME: dict[str, Activation] = {"Sigmoid": sigmoid, "Identity": identity, "Softmax": softmax}
"""Keyed by the last component of torch's class names."""


class _Settings(msgspec.Struct):
    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    activation_fn: str | None = None
    similarity_fn_name: Literal["cosine", "dot", "euclidean", "manhattan"] | None = None


class _Transformer(msgspec.Struct):
    do_lower_case: bool | None = None


class SentenceFiles:
    """Settings from the files of sentence-transformers; missing files mean defaults. Raises ValueError if invalid."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        settings = _read(files, "config_sentence_transformers.json", _Settings)
        self.prompts = {name: text for name, text in (settings.prompts or {}).items() if text}
        """Prompts to put before a text, by name."""
        self.default_prompt = self.prompts.get(settings.default_prompt_name or "", "")
        transformer = _read(files, "sentence_bert_config.json", _Transformer)
        self.lowercase = bool(transformer.do_lower_case)
        """Lower the case of texts before tokenization."""
        self.similarity = _SIMILARITIES[settings.similarity_fn_name or "cosine"]
        """Similarity of two vectors."""
        self.activation = _activation(settings.activation_fn, read_object(files, "config.json"))
        """Activation of the head's logits; None chooses it by the number of labels."""

    def activate(self, scores: Sequence[float]) -> list[float]:
        """Return the scores for the logits of a head."""
        return (self.activation or (sigmoid if len(scores) == 1 else softmax))(scores)


def _read(files: Mapping[str, bytes], name: str, form: type[_Form]) -> _Form:
    try:
        return msgspec.convert(read_object(files, name), form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from error


def _activation(setting: str | None, config: Mapping[str, Any]) -> Activation | None:
    """Return the activation saved by sentence-transformers, else that of the config's `problem_type`.

    Names outside torch are ignored, like in sentence-transformers. Raises ValueError for an unsupported class of torch.
    """
    saved = config.get("sentence_transformers")
    name = setting or (saved.get("activation_fn") if isinstance(saved, dict) else None)
    name = name or config.get("sbert_ce_default_activation_function")
    if isinstance(name, str) and name.startswith("torch."):
        if (found := _BY_NAME.get(name.rpartition(".")[2])) is None:
            raise ValueError(f"the activation {name[:100]!r} is not supported, only {', '.join(_BY_NAME)}")
        return found
    match config.get("problem_type"):
        case "multi_label_classification":
            return sigmoid
        case "regression":
            return identity
        case "single_label_classification":
            return softmax
    return None
