"""The schedulers and detokenizers this frontend knows, and which of them can take a request."""

from dataclasses import dataclass, field

from tercet.protocol.messages import Heartbeat, Ready
from tercet.protocol.values import Load, ModelIdentity, ModelLimits, Phase, Role


@dataclass
class SchedulerPeer:
    """A scheduler; it can take work once `limits` and `identity` are known."""

    peer: str
    incarnation: str
    limits: ModelLimits | None = None
    identity: ModelIdentity | None = None
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(phase=Phase.LOADING))

    @property
    def ready(self) -> bool:
        """Whether it has said what it serves and is not leaving."""
        return self.limits is not None and self.heartbeat.phase is not Phase.DRAINING

    @property
    def load(self) -> Load:
        """As its last heartbeat told."""
        return self.heartbeat.load


@dataclass
class DetokenizerPeer:
    """A detokenizer."""

    peer: str
    incarnation: str
    ready: bool = False


class Fleet:
    """Peers by id, in the order they came up."""

    def __init__(self) -> None:
        self.schedulers: dict[str, SchedulerPeer] = {}
        self.detokenizers: dict[str, DetokenizerPeer] = {}

    def add(self, peer: str, role: Role, incarnation: str) -> bool:
        """A peer came up. False for one of a role that takes no requests, or known already."""
        if peer in self.schedulers or peer in self.detokenizers:
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
        """Remember how busy a scheduler is."""
        if scheduler := self.schedulers.get(peer):
            scheduler.heartbeat = heartbeat

    def scheduler_ready(self, peer: str, ready: Ready) -> bool:
        """A scheduler says what it serves. False when it says too little to be of use."""
        scheduler = self.schedulers.get(peer)
        if scheduler is None or ready.limits is None or ready.identity is None:
            return False
        scheduler.limits, scheduler.identity = ready.limits, ready.identity
        return True

    def detokenizer_ready(self, peer: str) -> None:
        """A detokenizer can take work."""
        if detokenizer := self.detokenizers.get(peer):
            detokenizer.ready = True

    def remove(self, peer: str) -> None:
        """Forget a peer that is gone."""
        self.schedulers.pop(peer, None)
        self.detokenizers.pop(peer, None)

    def eligible_schedulers(self, weights: str) -> list[SchedulerPeer]:
        """Ready schedulers of exactly these weights: what a request starts on one of them, another can go on with."""
        return [
            each
            for each in self.schedulers.values()
            if each.ready and each.identity and each.identity.weights == weights
        ]

    def eligible_detokenizers(self) -> list[DetokenizerPeer]:
        """Ready detokenizers."""
        return [each for each in self.detokenizers.values() if each.ready]
