"""Invariants of the core between any two calls. An idle scheduler reports violations; tests check after every step."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from tercet.scheduler.core.cache.prefix_cache import Node, RadixCache
from tercet.scheduler.core.places.choice_places import held_audio, held_text
from tercet.scheduler.core.places.places import KeyT, Places
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.core.waiting.fair_share import Account, FairShare


def violations(core: Scheduler) -> list[str]:
    """Return a description of every broken invariant."""
    holdings = [*_slots(core), *_places_of(core), *_requests(core), *_pages(core), *_in_flight(core), *_tree(core)]
    return [*holdings, *_snapshots(core), *_windows(core), *_accounts(core)]


def _places_of(core: Scheduler) -> list[str]:
    """Check that each running choice has the places that it needs and counts among their users."""
    places, running, capacity = core.memory.places, core.planner.running, core.capacity
    adapters = [(f"{req.rid}/{req.index}", req.adapter, req.adapter_slot) for req in running]
    audio = [(f"{req.rid}/{req.index}", held_audio(req), req.audio_place) for req in running]
    texts = [(f"{req.rid}/{req.index}", held_text(req), req.text_place) for req in running]
    lost = capacity.texts is not None and capacity.texts.pages - len(places.texts.free_pages) != sum(
        map(len, places.texts.pages.values())
    )
    return [
        *(["pages of encoded texts are lost or shared"] if lost else []),
        *_places("text", places.texts, texts, 0 if capacity.texts is None else capacity.texts.places),
        *_places("adapter", places.adapters, adapters, capacity.adapters),
        *_places("audio clip", places.audio, audio, 0 if capacity.audio is None else capacity.audio.places),
    ]


def _places(kind: str, places: Places[KeyT], running: Sequence[tuple[str, KeyT | None, int]], count: int) -> list[str]:
    found = []
    if places.users != Counter(key for _, key, _ in running if key is not None):
        found.append(f"the users of {kind}s are miscounted")
    if places.count != count:
        found.append(f"{places.count} places for {kind}s of {count}")
    wrong = [name for name, key, place in running if place != (-1 if key is None else places.place_of(key))]
    return found + [f"{name} is not at the place of its {kind}" for name in wrong]


def _accounts(core: Scheduler) -> list[str]:
    """Check that waiting and started choices are on their tenant's account, and their known tokens charged."""
    policy = core.policy
    if not isinstance(policy, FairShare):
        return []
    found = []
    begun = [req for req in core.roster if req.charged >= 0 and req.finish is None]
    waiting = Counter(req.tenant for req in core.waiting)
    running = Counter(req.tenant for req in begun)
    accounts = policy.accounts.by_tenant
    for name in {*accounts, *waiting, *running}:
        account = accounts.get(name, Account())
        if (account.waiting, account.begun) != (waiting[name], running[name]):
            found.append(f"the account of {name!r} is {account}, not of {waiting[name]} and {running[name]} choices")
    if any(req.charged != len(req.tokens) for req in begun):
        found.append("tokens have not been charged for")
    return found


def _slots(core: Scheduler) -> list[str]:
    taken = [req.slot for req in core.planner.running] + core.memory.free_slots
    if sorted(taken) != list(range(core.capacity.slots)):
        return [f"slots are lost or shared: {sorted(taken)}"]
    return []


def _requests(core: Scheduler) -> list[str]:
    found = []
    held = set(core.roster)
    places = len(core.waiting) + sum(len(req.followers) for req in {*held, *core.planner.running})
    if core.roster.queued != places:
        found.append(f"{core.roster.queued} choices are counted as queued, not {places}")
    if core.waiting.tenants != Counter(req.tenant for req in core.waiting):
        found.append("the choices that wait are miscounted by tenant")
    for req in core.planner.running:
        if req.slot < 0 or req in core.waiting:
            found.append(f"{req.rid}/{req.index} runs without a slot or waits as well")
        if req.length > req.end or req.computed > req.length or len(req.tokens) > req.length:
            found.append(f"{req.rid}/{req.index}: tokens {len(req.tokens)}, {req.computed}/{req.length}/{req.end}")
        if req.finish is None and req not in held:
            found.append(f"{req.rid}/{req.index} runs but is not held")
        if req.finish is not None and req.in_flight == 0:
            found.append(f"{req.rid}/{req.index} ended and was not freed")
        if req.fast_path and not _may_use_fast_path(req):
            found.append(f"{req.rid}/{req.index} is wrongly on the fast path")
    for req in held:
        follows = req.leader is not None and req in req.leader.followers
        if (req in core.planner.running) + (req in core.waiting) + follows != 1:
            found.append(f"{req.rid}/{req.index} is not in exactly one place")
        if req.leader is not None and req.leader.finish is not None and follows and not req.leader.in_flight:
            found.append(f"{req.rid}/{req.index} follows a choice that is gone")
        if req.slot < 0 and (req.pages or req.node is not None or req.in_flight):
            found.append(f"{req.rid}/{req.index} holds memory without a slot")
    return found


def _may_use_fast_path(req: Req) -> bool:
    goes_on = req.finish is None and req.published and req.opened
    return goes_on and req.logprobs is None and req.sent == req.output_tokens


def _pages(core: Scheduler) -> list[str]:
    """Check that each page has exactly the holders that can be found, and is free if there are none."""
    found = []
    for group, pool in enumerate(core.memory.pools.groups):
        holders: Counter[int] = Counter()
        for req in core.planner.running:
            holders.update(req.pages[group][req.shared :])
        for _, pages in core.memory.deferred_free:
            holders.update(pages[group])
        for node in _nodes(core):
            holders.update(node.pages[group])
        if [*map(holders.get, range(len(pool.holders)), repeat(0))] != pool.holders:
            found.append(f"group {group}: pages whose holders are not found, or more than counted")
        if sorted(pool.free_pages) != [page for page, count in enumerate(pool.holders) if count == 0]:
            found.append(f"group {group}: the free list and the holders disagree")
    return found


def _windows(core: Scheduler) -> list[str]:
    """Check that each window page has exactly the holders that can be found, and that each choice has its window."""
    windows = core.memory.windows
    if windows is None:
        return []
    found = []
    if set(windows.holdings) != set(core.planner.running):
        found.append("the choices that hold window pages are not those that run")
    holders = Counter(page for holding in windows.holdings.values() for page in holding.pages)
    with_window = [node for node in _nodes(core) if node.window]
    for node in with_window:
        holders.update(node.window)
        if len(node.window) > len(node.pages[0]):
            found.append("a node has more window pages than tokens")
    if any(holders[page] != count for page, count in enumerate(windows.pool.holders)):
        found.append("window pages whose holders are not found, or more than counted")
    if sorted(windows.pool.free_pages) != [page for page, count in enumerate(windows.pool.holders) if count == 0]:
        found.append("the free list of window pages and their holders disagree")
    if windows.reserved != sum(holding.reserved for holding in windows.holdings.values()):
        found.append("the window pages that are reserved are miscounted")
    found += [
        f"{req.rid}/{req.index} lost pages of its window"
        for req, holding in windows.holdings.items()
        if holding.first * core.memory.page_size > max(0, holding.oldest - windows.window + 1)
    ]
    if windows.cache is not None and set(windows.cache.with_window) != set(with_window):
        found.append("the list of nodes with window pages is wrong")
    return found


def _snapshots(core: Scheduler) -> list[str]:
    """Check that each snapshot has exactly the holders that can be found, and that cached ones end their tokens."""
    states = core.memory.states
    if states is None:
        return []
    found = []
    if set(states.holdings) != set(core.planner.running):
        found.append("the choices that hold snapshots are not those that run")
    holders = Counter(states.read)
    for holding in states.holdings.values():
        holders.update([snapshot for _, snapshot in (*holding.taken, *holding.drafts)])
        holders.update([holding.checkpoint] if holding.checkpoint >= 0 else [])
        if any(tokens % core.memory.page_size for tokens, _ in holding.taken):
            found.append("a snapshot is not at the end of a page")
    cached = [node.snapshot for node in _nodes(core) if node.snapshot >= 0]
    holders.update(cached)
    if any(holders[each] != count for each, count in enumerate(states.pool.holders)):
        found.append("snapshots whose holders are not found, or more than counted")
    if states.cache is not None and len(cached) != states.cache.snapshot_count:
        found.append("the count of cached snapshots is wrong")
    return found


def _in_flight(core: Scheduler) -> list[str]:
    """Check that each slot and page that a plan in flight names still belongs to the choice it named."""
    found = []
    named: Counter[int] = Counter()
    for plan, reqs in core.in_flight:
        for row, req in zip(plan.rows, reqs, strict=True):
            named[id(req)] += 1
            if row.count < 1:
                found.append(f"plan {plan.step} has a row that computes nothing")
            if req.slot != row.slot or req.room < row.start + row.count:
                found.append(f"{req.rid}/{req.index} lost slot or pages to plan {plan.step} in flight")
    for step, encoded in core.planner.encodings.named.items():
        named.update(map(id, encoded))
        if step not in {plan.step for plan, _ in core.in_flight}:
            found.append(f"step {step} encodes, and is not in flight")
    found += [
        f"{req.rid}/{req.index} counts {req.in_flight} plans" for req in core.roster if req.in_flight != named[id(req)]
    ]
    return found


def _tree(core: Scheduler) -> list[str]:
    cache = core.memory.cache
    if not isinstance(cache, RadixCache):
        return []
    found = []
    used: Counter[int] = Counter()
    for req in core.planner.running:
        at = req.node
        while at is not None:
            used[id(at)] += 1
            at = at.parent
    order = {id(node): place for place, node in enumerate(cache.unlocked)}
    nodes = _nodes(core)
    for node in nodes:
        count = len(node.pages[0])
        if node.locks != used[id(node)]:
            found.append(f"a node has {node.locks} locks and {used[id(node)]} users")
        if (id(node) in order) != (node.locks == 0):
            found.append("a node is both used and evictable, or neither")
        if len(node.key) != count * 4 * core.memory.page_size or count == 0:
            found.append("a node's key and pages disagree")
        if any(order.get(id(child), -1) > order.get(id(node), len(order)) for child in node.children.values()):
            found.append("a node would be evicted before its child")
    if sum(len(node.pages[0]) for node in nodes) != cache.cached:
        found.append("the count of cached pages is wrong")
    if sum(len(node.pages[0]) for node in nodes if not node.locks) != cache.evictable:
        found.append("the count of evictable pages is wrong")
    return found


def _nodes(core: Scheduler) -> list[Node]:
    cache = core.memory.cache
    stack = list(cache.roots.values()) if isinstance(cache, RadixCache) else []
    nodes = []
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        if node.parent is not None:
            nodes.append(node)
    return nodes
