"""Effect of routing: four simulated schedulers under each policy, against one scheduler with all their memory.

The schedulers are real cores with a model that costs nothing; a step takes simulated time by the tokens it computes.
Sixty-four clients, or twelve, send requests without pause, through one frontend, or in turn through two that do not
know each other's requests. Their knowledge of the schedulers' load is a quarter of a second old, as in production.
Throughput is output tokens per simulated second; the one large scheduler has the memory, not the speed, of four.

`exact` is `cache_aware` with the schedulers' own caches in place of what was sent to them.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.policies import POLICIES, CacheAware, Routed, RoutingPolicy
from tercet.frontend.routing.prefix_tree import PrefixTree
from tercet.protocol.messages.messages import BatchTokenIDOutput, Heartbeat, TokenizedGenerateReqInput
from tercet.protocol.messages.values import ModelLimits, Phase, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.testing import FakeExecutor, request, small_capacity

Row = tuple[str, float, str, float | None]

SCHEDULERS = 4
CLIENTS, FEW_CLIENTS = 64, 12
REQUESTS = 1500
SLOTS = 64
MEMORY = 1024
"""Pages of 16 tokens in each scheduler."""
OUTPUT = 24
BEAT = 0.25
STEP_SECONDS, TOKEN_SECONDS = 0.005, 0.00005

Prompt = tuple[int, ...]
Workload = Callable[[random.Random], Iterator[Prompt]]


def shared_prefixes(chance: random.Random) -> Iterator[Prompt]:
    """Yield prompts with one of 48 system prompts of 512 tokens, unequally frequent, and 48 tokens of their own."""
    prefixes = [_words(chance, 512) for _ in range(48)]
    weights = [1 / (1 + rank) ** 0.8 for rank in range(len(prefixes))]
    while True:
        yield chance.choices(prefixes, weights)[0] + _words(chance, 48)


def conversations(chance: random.Random) -> Iterator[Prompt]:
    """Yield prompts of 256 conversations that grow in turns of 64 tokens, up to ten turns."""
    begun = [_words(chance, 64) for _ in range(256)]
    while True:
        place = chance.randrange(len(begun))
        begun[place] = (begun[place] if len(begun[place]) < 640 else ()) + _words(chance, 64)
        yield begun[place]


def agents(chance: random.Random) -> Iterator[Prompt]:
    """Yield prompts of 192 conversations of up to six turns of 64 tokens, with one system prompt of 256 tokens."""
    system, begun = _words(chance, 256), [_words(chance, 64) for _ in range(192)]
    while True:
        place = chance.randrange(len(begun))
        begun[place] = (begun[place] if len(begun[place]) < 384 else ()) + _words(chance, 64)
        yield system + begun[place]


def _words(chance: random.Random, count: int) -> Prompt:
    return tuple(chance.randrange(50_000) for _ in range(count))


@dataclass(frozen=True)
class Asked:
    """A request as a routing policy sees it."""

    prompt_ids: bytes
    prompt_tokens: int
    salt: str = ""
    content: bytes = b""


class Simulated:
    """Scheduler that is busy until `free_at`."""

    def __init__(self, peer: str, pages: int, slots: int) -> None:
        capacity = small_capacity(pages=pages, page_size=16, slots=slots, context_length=1024, vocab_size=50_000)
        self.core = Scheduler(CoreConfig(token_budget=512), capacity)
        self.executor = FakeExecutor(capacity, verify=False)
        limits = ModelLimits(model="m", context_length=1024, vocab_size=50_000, max_total_tokens=16 * pages)
        self.peer = SchedulerPeer(peer, "1", limits=limits)
        self._lengths: dict[str, int] = {}
        self.tell()

    def tell(self) -> None:
        """Send a heartbeat."""
        self.peer.heartbeat = Heartbeat(phase=Phase.STEP, load=self.core.load())
        self.peer.tokens_at_heartbeat = self.peer.own_tokens

    def take(self, message: TokenizedGenerateReqInput, tokens: int) -> None:
        """Accept a request."""
        self._lengths[message.rid] = tokens
        self.peer.own_tokens += tokens
        self.core.handle(Arrival("frontend-0", message))

    def step(self) -> tuple[float, int]:
        """Run one step, and return its seconds, 0 without work, and the number of requests that end with it."""
        plan = self.core.schedule()
        if plan is None:
            return 0.0, 0
        outgoing = self.core.commit(self.executor.submit(plan).result())
        batches = [message for _, message, *_ in outgoing if isinstance(message, BatchTokenIDOutput)]
        ended = [batch.rids[row] for batch in batches for row in batch.finishes]
        self.peer.own_tokens -= sum(self._lengths.pop(rid) for rid in ended)
        return STEP_SECONDS + TOKEN_SECONDS * sum(row.count for row in plan.rows), len(ended)


class Exact(CacheAware):
    """`CacheAware` that knows the caches of schedulers, and remembers the prompts that they were sent last."""

    def __init__(self, schedulers: Sequence[Simulated]) -> None:
        super().__init__()
        self._cores = {each.peer.peer: each.core for each in schedulers}

    def on_dispatched(self, request: Routed, scheduler: SchedulerPeer) -> None:
        self._trees.setdefault(scheduler.peer, PrefixTree(8192))
        super().on_dispatched(request, scheduler)

    def _match(self, peer: str, request: Routed) -> int:
        cached = self._cores[peer].memory.cache.measure(f"/{request.salt}", request.prompt_ids)
        return max(cached, super()._match(peer, request))


@dataclass
class World:
    """Clients, frontends with a policy each, and schedulers in simulated time."""

    policies: Sequence[RoutingPolicy]
    schedulers: list[Simulated]
    prompts: Iterator[Prompt]
    clients: int = CLIENTS
    now: float = 0.0
    asked: int = 0
    _events: list[tuple[float, int, Simulated]] = field(default_factory=list)
    _idle: set[str] = field(default_factory=set)
    _order: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        """Run until every request has ended."""
        self._idle = {each.peer.peer for each in self.schedulers}
        for _ in range(self.clients):
            self._ask()
        beat = 0.0
        while self._events:
            self.now, _, scheduler = heapq.heappop(self._events)
            while beat <= self.now:
                beat += BEAT
                for each in self.schedulers:
                    each.tell()
            seconds, ended = scheduler.step()
            for _ in range(ended):
                self._ask()
            if seconds:
                heapq.heappush(self._events, (self.now + seconds, next(self._order), scheduler))
            else:
                self._idle.add(scheduler.peer.peer)

    def _ask(self) -> None:
        if self.asked == REQUESTS:
            return
        self.asked += 1
        prompt = next(self.prompts)
        asked = Asked(pack_ints(prompt), len(prompt))
        policy = self.policies[self.asked % len(self.policies)]
        chosen = policy.order(asked, [each.peer for each in self.schedulers])[0]
        policy.on_dispatched(asked, chosen)
        scheduler = next(each for each in self.schedulers if each.peer is chosen)
        message = request(f"r{self.asked}", prompt, max_new_tokens=OUTPUT, ignore_eos=True)
        scheduler.take(message, len(prompt))
        if chosen.peer in self._idle:
            self._idle.remove(chosen.peer)
            heapq.heappush(self._events, (self.now, next(self._order), scheduler))


def simulate(
    policy: str, workload: Workload, count: int, frontends: int = 1, clients: int = CLIENTS
) -> tuple[float, float]:
    """Return the percentage of prompt tokens found in caches, and output tokens per second."""
    each, slots = MEMORY * SCHEDULERS // count, SLOTS * SCHEDULERS // count
    schedulers = [Simulated(f"scheduler-{number}", each, slots) for number in range(count)]
    policies = [Exact(schedulers) if policy == "exact" else POLICIES[policy]() for _ in range(frontends)]
    world = World(policies, schedulers, workload(random.Random(7)), clients)
    random.seed(7)
    world.run()
    found = sum(each.core.counters.cached_tokens for each in schedulers)
    prompts = sum(each.core.counters.prompt_tokens for each in schedulers)
    return 100 * found / prompts, sum(each.core.counters.output_tokens for each in schedulers) / world.now


def match_and_insert(rounds: int = 2000) -> float:
    """Return the mean microseconds to match and insert a prompt of 1,024 tokens in a full tree of 262,144."""
    chance, tree = random.Random(0), PrefixTree(1 << 18)
    prefixes = [_words(chance, 768) for _ in range(64)]
    prompts = [pack_ints(chance.choice(prefixes) + _words(chance, 256)) for _ in range(rounds + 2000)]
    for prompt in prompts[rounds:]:
        tree.insert("", prompt)
    start = perf_counter()
    for prompt in prompts[:rounds]:
        tree.match("", prompt)
        tree.insert("", prompt)
    return (perf_counter() - start) / rounds * 1e6


def rows() -> list[Row]:
    """Return all figures."""
    found: list[Row] = []
    for workload in (shared_prefixes, conversations, agents):
        name = workload.__name__.replace("_", " ")
        best, alone = simulate("round_robin", workload, 1)
        found.append((f"{name}: one scheduler with all the memory, hits", best, "%", None))
        found.append((f"{name}: one scheduler with all the memory", alone, "tok/s", None))
        for policy in POLICIES:
            hits, speed = simulate(policy, workload, SCHEDULERS)
            aim = 0.95 * best if policy == "cache_aware" else None
            found.append((f"{name}: {policy}, hits", hits, "%", aim))
            found.append((f"{name}: {policy}", speed, "tok/s", None))
        for policy in ("cache_aware", "exact"):
            hits, speed = simulate(policy, workload, SCHEDULERS, frontends=2)
            found.append((f"{name}: {policy} in two frontends, hits", hits, "%", None))
            found.append((f"{name}: {policy} in two frontends", speed, "tok/s", None))
            hits, speed = simulate(policy, workload, SCHEDULERS, clients=FEW_CLIENTS)
            found.append((f"{name}: {policy}, {FEW_CLIENTS} clients, hits", hits, "%", None))
            found.append((f"{name}: {policy}, {FEW_CLIENTS} clients", speed, "tok/s", None))
    found.append(("prefix tree: match and insert 1,024 tokens", match_and_insert(), "us", 50.0))
    return found


if __name__ == "__main__":
    for title, measured, unit, target in rows():
        print(f"{title:70} {measured:10.1f} {unit:8} target {target}")
