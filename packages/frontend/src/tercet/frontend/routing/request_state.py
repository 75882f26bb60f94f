"""What every request in flight has, whatever it asks for: who it is, where it is, and how often it was sent there."""

from abc import ABC, abstractmethod

from tercet.frontend.errors import ApiError
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.wake import Wake
from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import LoRAAdapter


class RequestState(ABC):
    """A request from its first dispatch to its one final answer. `wake` may be shared with its siblings."""

    def __init__(self, rid: str, model: ServedModel, prompt_ids: bytes, wake: Wake) -> None:
        self.rid = rid
        self.model = model
        self.prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids) // 4
        self.attempt = -1
        self.alone = False
        """Whether its present attempt runs while nothing else does."""
        self.offered_by = ""
        """The scheduler that runs nothing but this request: if it dies now, this request was the cause."""
        self.scheduler = ""
        """Where its present attempt runs; empty while it waits for a scheduler."""
        self.detokenizer = ""
        self.waited: float | None = None
        """Seconds that it waited in a scheduler, once it is known."""
        self.began_at = 0.0
        self.dispatched_at = 0.0
        self.refused = False
        """Whether its last attempt was refused. Without output it is sent as a new one, which a full queue refuses."""
        self.refused_by: set[str] = set()
        self.suspicions = 0
        """How many schedulers in a row may have died of it: each died before it gave a token."""
        self.retries = 0
        """How often since its last token it was dispatched again because no token came."""
        self.unheard_at: set[str] = set()
        """Schedulers that held it and sent nothing, over several dispatches."""
        self.unheard: tuple[float, float] | None = None
        """The first and the last time since its last token that it was dispatched again because tokens were missing."""
        self.error: ApiError | None = None
        self._wake = wake

    @property
    def salt(self) -> str:
        """Only requests of equal salt share cached prefixes."""
        return ""

    @property
    def has_text(self) -> bool:
        """Whether its answer is text, and goes by way of a detokenizer."""
        return True

    @property
    def constrained(self) -> bool:
        """Whether only a scheduler that reads grammars can run it."""
        return False

    @property
    def lora(self) -> LoRAAdapter | None:
        """The adapter that is added to the model for it: only a scheduler that runs adapters can run it."""
        return None

    @property
    def next_attempt(self) -> int:
        """The number of its next dispatch."""
        return self.attempt + 1

    @property
    def output_tokens(self) -> int:
        """Tokens emitted over all choices."""
        return 0

    @property
    def has_progressed(self) -> bool:
        """Whether its present attempt has brought anything."""
        return False

    @property
    @abstractmethod
    def open_indices(self) -> list[int]:
        """The choices that have no finish yet."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the request has its final answer."""

    @property
    @abstractmethod
    def signature(self) -> bytes:
        """With the prompt, tells a request again that comes again: it leaves out the seed, which differs each time."""

    @abstractmethod
    def blamed(self, code: str, context: int) -> str | None:
        """The client's parameter that a refusal with this code is about. `context` is that of who refused."""

    @abstractmethod
    def position(self, index: int) -> int:
        """The position of a choice that comes next."""

    @abstractmethod
    def message(
        self, attempt: int, detokenizer: str, *, alone: bool = False, hold: bool = False
    ) -> TokenizedGenerateReqInput | TokenizedEmbeddingReqInput:
        """The request as a scheduler gets it."""

    def dispatched(self, scheduler: str, detokenizer: str, now: float, *, alone: bool = False) -> None:
        """The next attempt is on its way."""
        self.attempt = self.next_attempt
        self.scheduler, self.detokenizer = scheduler, detokenizer
        self.dispatched_at = now
        self.alone, self.refused = alone, False
        if not alone or self.offered_by != scheduler:
            self.offered_by = ""

    def fail(self, error: ApiError) -> None:
        """End the request with an error, unless it has ended already."""
        if not self.done:
            self.error = error
            self._wake.set()
