"""The request of /v1/completions: every field OpenAI documents, and this field's extensions."""

from typing import Annotated

from pydantic import Field, model_validator

from tercet.frontend.errors import BadRequestError
from tercet.frontend.generate_request import TextPrompt, TokenPrompt
from tercet.frontend.openai.sampling_schema import SamplingFields, TokenId, refuse

_MOST_CHOICES = 2048

Text = Annotated[str, Field(max_length=16_777_216)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=4_194_304)]
Batch = Field(min_length=1, max_length=_MOST_CHOICES)


class CompletionRequest(SamplingFields):
    """Text, or several texts, to go on with."""

    prompt: Text | TokenIds | Annotated[list[Text], Batch] | Annotated[list[TokenIds], Batch]
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Text | None = None

    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _only_what_is_honoured(self) -> "CompletionRequest":
        refuse("best_of", self.best_of, harmless=self.best_of == (self.n or 1))
        refuse("suffix", self.suffix, harmless=not self.suffix)
        if len(self.prompts()) * (self.n or 1) > _MOST_CHOICES:
            raise BadRequestError(f"A request can ask for {_MOST_CHOICES} completions in all.", param="n")
        return self

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        """The prompts in order."""
        special = self.add_special_tokens is not False
        match self.prompt:
            case str(text):
                return [TextPrompt(text, special)]
            case [int(), *_]:
                return [TokenPrompt([each for each in self.prompt if isinstance(each, int)])]
        shaped: list[TextPrompt | TokenPrompt] = []
        for each in self.prompt:
            match each:
                case str():
                    shaped.append(TextPrompt(each, special))
                case list():
                    shaped.append(TokenPrompt(each))
        return shaped
