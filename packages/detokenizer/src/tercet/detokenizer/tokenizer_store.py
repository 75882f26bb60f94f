"""Tokenizers sent by schedulers: verified by SHA-256, parsed once, dropped when no scheduler uses them."""

import hashlib
import logging

from tercet.detokenizer.errors import TokenizerError
from tercet.detokenizer.vocabulary import Vocabulary
from tercet.protocol.messages.messages import TokenizerFiles

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"


class TokenizerStore:
    """Tokenizers in use, by SHA-256 of their tokenizer.json, and the tokenizer of each scheduler's model."""

    def __init__(self) -> None:
        self._vocabularies: dict[str, Vocabulary] = {}
        self._of_scheduler: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._vocabularies)

    def get(self, sha256: str, scheduler: str) -> Vocabulary | None:
        """Return the tokenizer of that hash; for an empty hash that of the scheduler's model, or the only one."""
        if not sha256:
            sha256 = self._of_scheduler.get(scheduler, "")
            if not sha256 and len(self._vocabularies) == 1:
                return next(iter(self._vocabularies.values()))
        return self._vocabularies.get(sha256)

    def add(self, scheduler: str, sha256: str, vocabulary: Vocabulary) -> None:
        """Set a scheduler's tokenizer, and drop those that no scheduler uses any more."""
        self._of_scheduler[scheduler] = sha256
        self._vocabularies[sha256] = vocabulary
        for unused in self._vocabularies.keys() - self._of_scheduler.values():
            del self._vocabularies[unused]

    def read(self, scheduler: str, message: TokenizerFiles, frames: tuple[memoryview, ...]) -> None:
        """Load the tokenizer among a scheduler's files. Raises TokenizerError, whose message is for the log."""
        if not len(message.names) == len(message.sha256) == len(frames):
            raise TokenizerError(f"{len(message.names)} names and {len(message.sha256)} hashes for {len(frames)} files")
        if TOKENIZER_FILE not in message.names:
            raise TokenizerError(f"{message.model} has no {TOKENIZER_FILE}, which text cannot be made without")
        place = message.names.index(TOKENIZER_FILE)
        sha256 = hashlib.sha256(frames[place]).hexdigest()
        if sha256 != message.sha256[place]:
            raise TokenizerError(f"{TOKENIZER_FILE} of {message.model} does not have the SHA-256 it came with")
        vocabulary = self._vocabularies.get(sha256)
        if vocabulary is None:
            try:
                vocabulary = Vocabulary(bytes(frames[place]).decode())
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{TOKENIZER_FILE} of {message.model} is not UTF-8") from error
            logger.info("loaded tokenizer model=%s sha256=%s", message.model, sha256[:12])
            if vocabulary.joining is None:
                logger.warning(
                    "tokenizer model=%s: its decoder depends on neighboring tokens, so detokenization is slow",
                    message.model,
                )
        self.add(scheduler, sha256, vocabulary)

    def drop_scheduler(self, scheduler: str) -> None:
        """Forget a scheduler that is down. Its tokenizer stays until another comes: the next start will need it."""
        self._of_scheduler.pop(scheduler, None)
