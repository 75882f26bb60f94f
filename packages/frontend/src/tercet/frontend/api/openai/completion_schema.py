"""Request schema of /v1/completions: OpenAI's fields, and the extensions of SGLang, vLLM and others."""

from typing import Annotated, cast

from pydantic import Discriminator, Field, Tag, model_validator

from tercet.frontend.api.openai.sampling_schema import SamplingFields, input_shape
from tercet.frontend.api.openai.structured_schema import StructuredFields
from tercet.frontend.api.openai.token_ids import QUICK_IDS, TokenId
from tercet.frontend.errors import BadRequestError
from tercet.frontend.model.prompts import TextPrompt, TokenPrompt

MOST_CHOICES = 2048

Text = Annotated[str, Field(max_length=16_777_216)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=4_194_304, fail_fast=True), QUICK_IDS]
Batch = Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)


Prompts = Annotated[
    Annotated[Text, Tag("a text")]
    | Annotated[TokenIds, Tag("some ids")]
    | Annotated[list[Text], Batch, Tag("some texts")]
    | Annotated[list[TokenIds], Batch, Tag("lists of ids")],
    Discriminator(input_shape),
]


class CompletionRequest(SamplingFields, StructuredFields):
    """Request for completions of one or several prompts."""

    prompt: Prompts
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Text | None = None

    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> "CompletionRequest":
        if self.best_of and self.best_of < (self.n or 1):
            raise BadRequestError("'best_of' must not be less than 'n'.", param="best_of")
        if self.picks_best and self.stream:
            raise BadRequestError("The best of several completions cannot be streamed.", param="best_of")
        if self.suffix and self.echo:
            raise BadRequestError("'echo' and 'suffix' exclude each other.", param="suffix")
        prompts = self.prompts()
        if self.suffix and not all(isinstance(each, TextPrompt) for each in prompts):
            raise BadRequestError("With 'suffix' the prompt must be text.", param="suffix")
        if len(prompts) * self.candidates > MOST_CHOICES:
            param = "best_of" if self.picks_best else "n"
            raise BadRequestError(f"A request can ask for {MOST_CHOICES} completions in all.", param=param)
        return self

    @property
    def candidates(self) -> int:
        return max(self.best_of or 0, self.n or 1)

    @property
    def picks_best(self) -> bool:
        """Return whether more completions are generated than returned."""
        return self.candidates > (self.n or 1)

    @property
    def shows_logprobs(self) -> bool:
        """Return whether the response has log-probabilities, of the output or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        special = self.add_special_tokens is not False
        match self.prompt:
            case str(text):
                return [TextPrompt(text, special)]
            case [int(), *_]:
                return [TokenPrompt(cast("list[int]", self.prompt))]
        shaped: list[TextPrompt | TokenPrompt] = []
        for place, each in enumerate(self.prompt):
            param = f"prompt[{place}]"
            match each:
                case str():
                    shaped.append(TextPrompt(each, special, param))
                case list():
                    shaped.append(TokenPrompt(each, param))
        return shaped
