"""Registry of the schedulers and detokenizers that this frontend is connected to, and of weights they replaced."""

from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.membership.heartbeat_timer import is_stuck
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Load, ModelIdentity, ModelLimits, Phase, Role

MAX_LINEAGE_ENTRIES = 1000
"""Maximum number of entries of a `WeightLineage`."""


@dataclass
class Peer:
    """Scheduler or detokenizer, with its last heartbeat."""

    peer: str
    incarnation: str
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(phase=Phase.LOADING))
    leaving: bool = False
    """Draining, which is final."""

    @property
    def stuck(self) -> bool:
        """Return whether its current step exceeds the time limit; a later heartbeat can revoke this."""
        return is_stuck(self.heartbeat)

    @property
    def load(self) -> Load:
        return self.heartbeat.load


@dataclass
class SchedulerPeer(Peer):
    """Scheduler; it is usable once `limits` and `identity` are known, or for a scheduler that encodes, `encoder`."""

    limits: ModelLimits | None = None
    identity: ModelIdentity | None = None
    outdated: bool = False
    """It started with weights that were replaced since, and must load their successor."""
    software: str = ""
    encoder: EmbeddingForm | None = None
    """Form of what it encodes; it takes no requests, and has no limits and identity."""
    own_tokens: int = 0
    """Tokens of this frontend's requests at the scheduler."""
    tokens_at_heartbeat: int = 0
    """Value of `own_tokens` at the last heartbeat."""

    @property
    def ready(self) -> bool:
        known = self.limits is not None or self.encoder is not None
        return known and not self.leaving and not self.stuck

    @property
    def tokens(self) -> int:
        """Estimate the scheduler's tokens: those of the last heartbeat plus the change of this frontend's own since."""
        reported = self.load.queued_tokens + self.load.running_tokens
        return max(self.own_tokens, reported + self.own_tokens - self.tokens_at_heartbeat)


@dataclass
class DetokenizerPeer(Peer):
    """Detokenizer; it is usable once it has the tokenizer."""

    has_tokenizer: bool = False

    @property
    def ready(self) -> bool:
        return self.has_tokenizer and not self.leaving and not self.stuck


class WeightLineage:
    """Map from replaced weights to their latest successor, by fingerprint.

    Requests move to the successor once no scheduler has their weights. At most `MAX_LINEAGE_ENTRIES` entries are kept:
    the first one, since schedulers may be started with those weights, and the latest.
    """

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}
        self._paths: dict[str, str] = {}

    def record(self, old: str, new: str, path: str) -> None:
        """Record that a scheduler replaced its `old` weights by the `new` ones at `path`.

        Weights that return become the latest again, and their former successors count as replaced.
        """
        self._latest.pop(new, None)
        self._latest = {each: new if latest == old else latest for each, latest in self._latest.items()}
        if old != new:
            self._latest[old] = new
        if len(self._latest) > MAX_LINEAGE_ENTRIES:
            del self._latest[next(islice(self._latest, 1, None))]
        self._paths[new] = path
        latest = {*self._latest.values()}
        self._paths = {each: path for each, path in self._paths.items() if each in latest}

    def forget(self, old: str) -> None:
        """Remove weights from the lineage: schedulers that start with them keep them."""
        self._latest.pop(old, None)

    def latest(self, weights: str) -> str:
        """Return the latest successor of these weights, or the weights themselves."""
        return self._latest.get(weights, weights)

    def path(self, weights: str) -> str:
        """Return the directory of weights that replaced others."""
        return self._paths[weights]

    def follows(self, new: str, old: str) -> bool:
        """Return whether `new` is the latest successor of `old`."""
        return new != old and self.latest(old) == new


class PeerRegistry:
    """Peers by id, in order of connection."""

    def __init__(self) -> None:
        self.schedulers: dict[str, SchedulerPeer] = {}
        self.detokenizers: dict[str, DetokenizerPeer] = {}
        self.weight_lineage = WeightLineage()

    def get(self, peer: str) -> SchedulerPeer | DetokenizerPeer | None:
        return self.schedulers.get(peer) or self.detokenizers.get(peer)

    def add(self, peer: str, role: Role, incarnation: str) -> bool:
        """Add a peer. Return False if it is known or has a role that takes no requests."""
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
        """Store a heartbeat."""
        part = self.get(peer)
        if part is None:
            return
        part.heartbeat = heartbeat
        if heartbeat.phase is Phase.DRAINING:
            part.leaving = True
        if isinstance(part, SchedulerPeer):
            part.tokens_at_heartbeat = part.own_tokens

    def scheduler_ready(self, peer: str, ready: Ready) -> bool:
        """Store a scheduler's limits and identity, or its form of embeddings. Return False if it has neither."""
        scheduler = self.schedulers.get(peer)
        if scheduler is not None and ready.encoder is not None:
            scheduler.encoder = ready.encoder
            return True
        if scheduler is None or ready.limits is None or ready.identity is None:
            return False
        new = ready.identity
        if scheduler.identity is not None:
            self.weight_lineage.record(scheduler.identity.weights, new.weights, new.weights_path or new.path)
        starts = scheduler.identity is None or scheduler.outdated
        scheduler.outdated = starts and self.weight_lineage.latest(new.weights) != new.weights
        scheduler.limits, scheduler.identity, scheduler.software = known_limits(ready.limits), new, ready.software
        return True

    def detokenizer_ready(self, peer: str) -> None:
        """Mark a detokenizer as ready."""
        if detokenizer := self.detokenizers.get(peer):
            detokenizer.has_tokenizer = True

    def remove(self, peer: str) -> Peer | None:
        """Remove a peer and return it."""
        return self.schedulers.pop(peer, None) or self.detokenizers.pop(peer, None)

    def eligible_schedulers(
        self, weights: str, *, grammars: bool = False, adapters: bool = False, media: ModelLimits | None = None
    ) -> list[SchedulerPeer]:
        """Return ready schedulers with exactly these weights, between which requests can move.

        `grammars` and `adapters` restrict the result to schedulers with support for them, `media` to those that take
        images and audio in the form of these limits.
        """
        return [
            each
            for each in self.schedulers.values()
            if each.ready
            and each.identity
            and each.identity.weights == weights
            and (not grammars or (each.limits and each.limits.grammars))
            and (not adapters or (each.limits and each.limits.max_loras))
            and (media is None or (each.limits and _forms(each.limits) == _forms(media)))
        ]

    def able_schedulers(self, state: RequestState) -> list[SchedulerPeer]:
        """Return schedulers that can run a request: those with its weights, else those with their successor.

        For an image or sound, return those that encode in its form.
        """
        if state.encodes is not None:
            ready = [each for each in self.schedulers.values() if each.ready]
            return [each for each in ready if each.encoder is not None and each.encoder.encodes_for(state.encodes)]
        weights, adapters = state.model.identity.weights, state.lora is not None
        media = state.model.limits if state.frames else None
        for each in dict.fromkeys([weights, self.weight_lineage.latest(weights)]):
            if able := self.eligible_schedulers(each, grammars=state.constrained, adapters=adapters, media=media):
                return able
        return []

    def eligible_detokenizers(self) -> list[DetokenizerPeer]:
        return [each for each in self.detokenizers.values() if each.ready]


def known_limits(limits: ModelLimits) -> ModelLimits:
    """Return limits with the form of images or sounds in its usual place also where embeddings are taken."""
    form = limits.embeddings
    return limits if form is None else structs.replace(limits, images=form.images, sounds=form.sounds, video=form.video)


def _forms(limits: ModelLimits) -> tuple[object, ...]:
    return limits.images, limits.audio, limits.sounds, limits.embeddings, limits.video
