"""Embeddings of tokens that are none of the vocabulary's, such as those of images."""

from typing import NamedTuple

import torch


class ReplacedEmbeddings(NamedTuple):
    """Embeddings of some tokens of a step, in the place of those of their ids, and what tokens of the step see."""

    places: torch.Tensor  # int64 [replaced]: tokens of the step, ascending
    # [replaced, parts * hidden]: parts after the first are added after the first layers; [replaced, 0] in a later stage
    vectors: torch.Tensor
    seen: torch.Tensor | None = None  # int32 [tokens]: see `AttentionBatch.seen`
    in_windows: bool = False  # `seen` applies to layers with a window alone

    def part(self, tokens: slice) -> "ReplacedEmbeddings | None":
        """Return those of some of the step's tokens; None if there are none. Tokens must not see later parts."""
        inside = (self.places >= tokens.start) & (self.places < tokens.stop)
        if not inside.any():
            return None
        seen = None if self.seen is None else self.seen[tokens]
        return ReplacedEmbeddings(self.places[inside] - tokens.start, self.vectors[inside], seen, self.in_windows)
