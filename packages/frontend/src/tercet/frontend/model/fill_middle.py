"""Fill-in-the-middle (FIM) prompts."""

from collections.abc import Container

import msgspec


class FillFormat(msgspec.Struct, frozen=True, kw_only=True):
    """FIM tokens of a model family: `before` and `after` precede the texts, `fill` ends the prompt."""

    before: str
    after: str
    fill: str = ""
    after_first: bool = False
    ends: tuple[str, ...] = ()
    """Additional stop tokens of a completion, as far as the vocabulary has them and they are not EOS already."""

    def text(self, before: str, after: str) -> str:
        """Return the prompt in the model's notation."""
        if self.after_first:
            return f"{self.after}{after}{self.before}{before}{self.fill}"
        return f"{self.before}{before}{self.after}{after}{self.fill}"

    @property
    def tokens(self) -> list[str]:
        """Return the tokens that the vocabulary must have."""
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
    """Return the format whose tokens are all among `added`; None if the model does not support FIM."""
    return next((each for each in _FORMATS if all(token in added for token in each.tokens)), None)
