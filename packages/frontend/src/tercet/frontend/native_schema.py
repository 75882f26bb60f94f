"""The requests of the routes that are not OpenAI's: SGLang's shape of /generate, and the tokenizer's."""

from typing import Annotated

from pydantic import Field, model_validator

from tercet.frontend.errors import BadRequestError
from tercet.frontend.openai.chat_messages import Message
from tercet.frontend.openai.sampling_schema import Count, Name, StopString, Strict, TokenId
from tercet.frontend.openai.structured_schema import NativeStructuredFields
from tercet.frontend.openai.tool_schema import Tools, specs_of
from tercet.frontend.parsers.port import ToolSpec
from tercet.frontend.sessions.schema import SessionParams

Text = Annotated[str, Field(max_length=16_777_216)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=4_194_304, fail_fast=True)]


class NativeSampling(NativeStructuredFields):
    """SGLang's names of the sampling parameters."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None


class NativeGenerate(Strict):
    """One prompt, as text or as ids."""

    text: Text | None = None
    input_ids: TokenIds | None = None
    model: Name | None = None
    sampling_params: NativeSampling = NativeSampling()
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=20)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    session_params: SessionParams | None = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "NativeGenerate":
        if (self.text is None) == (self.input_ids is None):
            raise BadRequestError("Give either 'text' or 'input_ids'.", param="text")
        return self


class Tokenize(Strict):
    """Text, or a chat, to turn into ids."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _has_one_prompt(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise BadRequestError("Give either 'prompt' or 'messages'.", param="prompt")
        if self.tools and self.messages is None:
            raise BadRequestError("'tools' go with 'messages'.", param="tools")
        return self

    def specs(self) -> tuple[ToolSpec, ...]:
        """Every tool that the chat's model would be told of."""
        return specs_of([tool.function for tool in self.tools or ()])


class Detokenize(Strict):
    """Ids to turn into text."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=4_194_304, fail_fast=True)]
    skip_special_tokens: bool | None = None
