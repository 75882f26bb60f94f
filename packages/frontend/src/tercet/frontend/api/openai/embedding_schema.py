"""Request schemas of /v1/embeddings, /v1/rerank, /v1/score and /v1/classify."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tercet.frontend.api.openai.sampling_schema import Name, Strict, input_shape, refuse
from tercet.frontend.api.openai.token_ids import QUICK_IDS, TokenId
from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.embedding_request import EmbeddingRequest, Input, PairInput, TextInput, TokenInput

MAX_INPUTS = 2048

Text = Annotated[str, Field(min_length=1, max_length=16_777_216)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=1_048_576, fail_fast=True), QUICK_IDS]
Batch = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Texts = Annotated[list[Text], Batch]


Inputs = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[TokenIds, Tag("some ids")]
    | Annotated[Texts, Tag("some texts")]
    | Annotated[list[TokenIds], Batch, Tag("lists of ids")],
    Discriminator(input_shape),
]


def _check_truncation(tokens: int) -> int:
    if tokens == 0:
        raise BadRequestError("Nothing would be left of the input.", param="truncate_prompt_tokens")
    return tokens


Truncation = Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_truncation)]


class _Encoded(Strict):
    """Fields of all requests for vectors or scores."""

    model: Name
    user: Name | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    def request(self, inputs: list[Input], params: list[str], prompt_name: str | None = None) -> EmbeddingRequest:
        return EmbeddingRequest(
            model=self.model,
            inputs=inputs,
            params=params,
            prompt_name=prompt_name,
            truncate=self.truncate_prompt_tokens,
            priority=self.priority or 0,
        )


class InputRequest(_Encoded):
    """A request with one or several inputs, as text or token ids."""

    input: Inputs
    prompt_name: Name | None = None

    def to_request(self) -> EmbeddingRequest:
        """Return the request. Its parameter names, for errors, are those of the client."""
        inputs = inputs_of(self.input)
        lone = isinstance(self.input, str) or isinstance(self.input[0], int)
        params = ["input"] if lone else [f"input[{place}]" for place in range(len(inputs))]
        return self.request(inputs, params, self.prompt_name)


class EmbeddingCreate(InputRequest):
    """Request of /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class ClassifyRequest(InputRequest):
    """Request of /v1/classify."""

    use_activation: bool | None = None


class Document(Strict):
    """Document to rank."""

    text: Text


class RerankRequest(_Encoded):
    """Request of /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Batch]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None

    @model_validator(mode="after")
    def _refuse_unsupported_documents(self) -> "RerankRequest":
        refuse("max_chunks_per_doc", self.max_chunks_per_doc, harmless=False)
        refuse("rank_fields", self.rank_fields, harmless=False)
        return self

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(_Encoded):
    """Request of /v1/score: one text against one or many, or two lists of equal length."""

    text_1: Text | Texts
    text_2: Text | Texts
    use_activation: bool | None = None

    def pairs(self) -> list[PairInput]:
        """Return the pairs in order. A single text on the left is paired with each text on the right."""
        left = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        right = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        params = _params("text_1", self.text_1)
        if len(left) == 1:
            left, params = left * len(right), params * len(right)
        if len(left) != len(right):
            message = f"'text_1' has {len(left)} texts and 'text_2' has {len(right)}: one, or as many, are possible."
            raise BadRequestError(message, param="text_1")
        return [PairInput(*each) for each in zip(left, right, params, strict=True)]

    def params(self) -> list[str]:
        """Return the parameter name of the second text of each pair."""
        return _params("text_2", self.text_2)


def _params(name: str, given: str | list[str]) -> list[str]:
    """Return the parameter name of each text."""
    return [name] if isinstance(given, str) else [f"{name}[{place}]" for place in range(len(given))]


def inputs_of(given: str | list[int] | list[str] | list[list[int]]) -> list[Input]:
    """Return one input for a text or a list of ids, or one for each of several."""
    match given:
        case str(text):
            return [TextInput(text)]
        case [int(), *_]:
            return [TokenInput([each for each in given if isinstance(each, int)])]
    inputs: list[Input] = []
    for each in given:
        match each:
            case str(text):
                inputs.append(TextInput(text))
            case list(ids):
                inputs.append(TokenInput(ids))
    return inputs
