"""Prompts with a gap to fill, for models that were trained on them: what is before it and after it between tokens."""

from collections.abc import Container

import msgspec


class FillFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One family's tokens, as its tokenizer spells them. `before` and `after` come before the texts, `fill` last."""

    before: str
    after: str
    fill: str = ""
    after_first: bool = False
    ends: tuple[str, ...] = ()
    """Tokens that end what is filled in, where the vocabulary has them and they are no end of sequence already."""

    def text(self, before: str, after: str) -> str:
        """The prompt, in the model's own notation."""
        if self.after_first:
            return f"{self.after}{after}{self.before}{before}{self.fill}"
        return f"{self.before}{before}{self.after}{after}{self.fill}"

    @property
    def tokens(self) -> list[str]:
        """What a vocabulary must have."""
        return [token for token in (self.before, self.after, self.fill) if token]


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma, Granite 4
    FillFormat(
        before="<|fim_prefix|>",
        after="<|fim_suffix|>",
        fill="<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 2, Granite 3
    FillFormat(
        before="<fim_prefix>",
        after="<fim_suffix>",
        fill="<fim_middle>",
        ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>"),
    ),
    # StarCoder, SantaCoder
    FillFormat(before="<fim-prefix>", after="<fim-suffix>", fill="<fim-middle>", ends=("<|endoftext|>",)),
    # DeepSeek-Coder
    FillFormat(before="<｜fim▁begin｜>", after="<｜fim▁hole｜>", fill="<｜fim▁end｜>"),
    # Code Llama
    FillFormat(before="▁<PRE>", after="▁<SUF>", fill="▁<MID>", ends=("▁<EOT>",)),
    # Codestral
    FillFormat(before="[PREFIX]", after="[SUFFIX]", after_first=True),
)


def fill_format(added: Container[str]) -> FillFormat | None:
    """The format of a model with these added tokens; None for one that fills no gaps."""
    return next((each for each in _FORMATS if all(token in added for token in each.tokens)), None)
