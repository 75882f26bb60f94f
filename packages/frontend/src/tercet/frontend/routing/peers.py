"""The schedulers and detokenizers this frontend knows, and which of them can take a request."""

from dataclasses import dataclass, field

from tercet.frontend.routing.request_state import RequestState
from tercet.frontend.routing.weight_versions import WeightLineage
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Load, ModelIdentity, ModelLimits, Phase, Role


@dataclass
class Peer:
    """A peer that requests are routed through, as its last heartbeat told of it."""

    peer: str
    incarnation: str
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(phase=Phase.LOADING))
    leaving: bool = False
    """It has said that it takes nothing new, which it never takes back."""

    @property
    def stuck(self) -> bool:
        """Whether its step has taken so long that it counts as stuck. A later heartbeat may show that it was not."""
        return is_stuck(self.heartbeat)

    @property
    def load(self) -> Load:
        """The load that its last heartbeat told."""
        return self.heartbeat.load


@dataclass
class SchedulerPeer(Peer):
    """A scheduler; it can take work once `limits` and `identity` are known."""

    limits: ModelLimits | None = None
    identity: ModelIdentity | None = None
    outdated: bool = False
    """It started with weights that were replaced meanwhile, and is to load those that replaced them."""
    software: str = ""
    own: int = 0
    """Tokens of the requests that this frontend has there now."""
    own_told: int = 0
    """`own` when its last heartbeat came."""

    @property
    def ready(self) -> bool:
        """Whether it can be sent requests."""
        return self.limits is not None and not self.leaving and not self.stuck

    @property
    def tokens(self) -> int:
        """Tokens it has to work on: what its last heartbeat told, and what has come from here and ended since."""
        told = self.load.queued_tokens + self.load.running_tokens
        return max(self.own, told + self.own - self.own_told)


@dataclass
class DetokenizerPeer(Peer):
    """A detokenizer."""

    has_tokenizer: bool = False

    @property
    def ready(self) -> bool:
        """Whether it can be sent tokens."""
        return self.has_tokenizer and not self.leaving and not self.stuck


class PeerRegistry:
    """Peers by id, in the order they came up."""

    def __init__(self) -> None:
        self.schedulers: dict[str, SchedulerPeer] = {}
        self.detokenizers: dict[str, DetokenizerPeer] = {}
        self.successions = WeightLineage()

    def get(self, peer: str) -> SchedulerPeer | DetokenizerPeer | None:
        """The part of that id."""
        return self.schedulers.get(peer) or self.detokenizers.get(peer)

    def add(self, peer: str, role: Role, incarnation: str) -> bool:
        """A peer came up. False for one of a role that takes no requests, or known already."""
        if self.get(peer) is not None:
            return False
        match role:
            case Role.SCHEDULER:
                self.schedulers[peer] = SchedulerPeer(peer, incarnation)
            case Role.DETOKENIZER:
                self.detokenizers[peer] = DetokenizerPeer(peer, incarnation)
            case Role.FRONTEND | Role.SUPERVISOR:
                return False
        return True

    def heartbeat(self, peer: str, heartbeat: Heartbeat) -> None:
        """Remember how a part is doing."""
        part = self.get(peer)
        if part is None:
            return
        part.heartbeat = heartbeat
        if heartbeat.phase is Phase.DRAINING:
            part.leaving = True
        if isinstance(part, SchedulerPeer):
            part.own_told = part.own

    def scheduler_ready(self, peer: str, ready: Ready) -> bool:
        """A scheduler says what it serves. False when it says too little to be of use."""
        scheduler = self.schedulers.get(peer)
        if scheduler is None or ready.limits is None or ready.identity is None:
            return False
        new = ready.identity
        if scheduler.identity is not None:
            self.successions.note(scheduler.identity.weights, new.weights, new.weights_path or new.path)
        starts = scheduler.identity is None or scheduler.outdated
        scheduler.outdated = starts and self.successions.latest(new.weights) != new.weights
        scheduler.limits, scheduler.identity, scheduler.software = ready.limits, ready.identity, ready.software
        return True

    def detokenizer_ready(self, peer: str) -> None:
        """A detokenizer can take work."""
        if detokenizer := self.detokenizers.get(peer):
            detokenizer.has_tokenizer = True

    def remove(self, peer: str) -> Peer | None:
        """Forget a peer that is gone. Returns what was known of it."""
        return self.schedulers.pop(peer, None) or self.detokenizers.pop(peer, None)

    def eligible_schedulers(
        self, weights: str, *, grammars: bool = False, adapters: bool = False
    ) -> list[SchedulerPeer]:
        """Ready schedulers of exactly these weights: what a request starts on one of them, another can go on with.

        With `grammars` only those that can read any, with `adapters` only those that can run any.
        """
        return [
            each
            for each in self.schedulers.values()
            if each.ready
            and each.identity
            and each.identity.weights == weights
            and (not grammars or (each.limits and each.limits.grammars))
            and (not adapters or (each.limits and each.limits.max_loras))
        ]

    def able_schedulers(self, state: RequestState) -> list[SchedulerPeer]:
        """Schedulers that can run a request: those of its weights, or if these are gone, of what replaced them."""
        weights, adapters = state.model.identity.weights, state.lora is not None
        for each in dict.fromkeys([weights, self.successions.latest(weights)]):
            if able := self.eligible_schedulers(each, grammars=state.constrained, adapters=adapters):
                return able
        return []

    def eligible_detokenizers(self) -> list[DetokenizerPeer]:
        """Ready detokenizers."""
        return [each for each in self.detokenizers.values() if each.ready]
