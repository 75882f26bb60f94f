"""Memory of running choices: slots, pages, locked prefixes, adapters and audio, and when each may be used again.

A plan in flight may still read or write the pages it names. Pages therefore enter the prefix cache or the free list,
and slots are reused, only when the last plan naming them has committed. A choice is released then, and pages that it
gave up before wait in `deferred_free` until that step.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from tercet.scheduler.core.cache.page_pools import PagePools
from tercet.scheduler.core.cache.prefix_cache import ChunkCache, Node, PageLists, PrefixCache, RadixCache
from tercet.scheduler.core.cache.state_cache import StateRadixCache
from tercet.scheduler.core.cache.tree_changes import TreeObserver
from tercet.scheduler.core.cache.window_cache import WindowRadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.places.choice_places import ChoicePlaces
from tercet.scheduler.core.plan import Capacity, PageCopy, PageUpdate, Plan
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.state_snapshots import StateSnapshots
from tercet.scheduler.core.window_pages import WindowPages


class KVMemory:
    """KV cache of one executor."""

    def __init__(self, capacity: Capacity, config: CoreConfig) -> None:
        """Create empty memory. Raises ValueError if the capacity has too few snapshots or window pages."""
        size, snapshots = capacity.page_size, capacity.snapshots
        full = [group for group in capacity.groups if not group.window or snapshots is not None]
        groups = len(full)
        self.page_size = size
        self.pools = PagePools(group.pages for group in full)
        self.states: StateSnapshots | None = None
        """Snapshots of recurrent states; None if the model keeps no recurrent state."""
        self.windows: WindowPages | None = None
        """Pages of the group with a sliding window; None without such a group, and beside recurrent states."""
        if snapshots is not None:
            self.states = StateSnapshots(snapshots, capacity.slots, size)
        if groups < len(capacity.groups):
            self.windows = WindowPages(capacity, config)
        self.cache: PrefixCache = ChunkCache(groups)
        if config.radix_cache and self.states is not None:
            self.cache = self.states.cache = StateRadixCache(size, groups, self.states.give_up)
        elif config.radix_cache and self.windows is not None:
            self.cache = self.windows.cache = WindowRadixCache(size, groups, self.windows.window, self.windows.pool)
        elif config.radix_cache:
            self.cache = RadixCache(size, groups)
        self.free_slots = list(range(capacity.slots - 1, -1, -1))
        self.places = ChoicePlaces(capacity.adapters, capacity.audio, capacity.texts)
        self.updates: list[PageUpdate] = []
        """Page table changes that the next plan must carry."""
        self.deferred_free: deque[tuple[int, PageLists]] = deque()
        """(last step that names them, pages), to be freed when that step has committed."""
        self.evicted = 0

    def observe(self, observer: TreeObserver) -> None:
        """Call `observer` with each change of the radix tree from now on."""
        if isinstance(self.cache, RadixCache):
            self.cache.observer = observer

    @property
    def available(self) -> int:
        """Pages that are free or can be evicted now."""
        return self.pools.free + self.cache.evictable

    @property
    def free_places(self) -> int:
        """Slots that choices with long contexts can take."""
        free = len(self.free_slots)
        return free if self.windows is None else min(free, self.windows.free_windows)

    @property
    def tokens(self) -> int:
        """Tokens that fit into the whole cache."""
        return self.pools.total * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def missing(self, req: Req) -> int:
        """Return the tokens that a waiting choice would have to compute if it were admitted now."""
        cached = req.cached_pages(self.cache) * self.page_size
        return len(req.tokens) - max(cached, self._common_with_leader(req)[1])

    def pages_to_admit(self, req: Req) -> int:
        """Return how many available pages a waiting choice would take: new ones, and cached ones without users."""
        match = self.cache.match(req.salt, req.cache_key(req.reusable))
        pages = self.pages_for(len(req.tokens)) - max(match.count, self._common_with_leader(req)[1] // self.page_size)
        node: Node | None = match.node
        while node is not None and not node.locks:
            pages += len(node.pages[0])
            node = node.parent
        return pages

    def admit(self, req: Req, reserve: int) -> list[PageCopy] | None:
        """Give a waiting choice a slot and pages for its known tokens, unless fewer than `reserve` pages would be left.

        Uses the pages in the prefix cache and its leader's prompt pages: full ones are shared, a partial one is copied.
        Sets `computed` to the tokens that need no computing. Returns the copies to make, or None with nothing changed.
        """
        if not self.free_slots or not self.places.has_room(req):
            return None
        if self.states is not None and not self.states.can_admit(req):
            return None
        if self.windows is not None and not self.windows.can_admit(req):
            return None
        match = self.cache.match(req.salt, req.cache_key(req.reusable))
        self.cache.lock(match.node)
        leader, common = self._common_with_leader(req)
        full = max(match.count, common // self.page_size)
        needed = self.pages_for(len(req.tokens)) - full
        if needed + reserve > self.available or not self._make_room(needed):
            self.cache.unlock(match.node)
            return None
        req.pages = match.pages
        borrowed = [group[match.count : full] for group in leader.pages] if leader else []
        if leader and full > match.count:
            self.pools.hold(borrowed)
            self._append(req, borrowed)
        self._append(req, self.pools.allocate(needed))
        req.node, req.shared = match.node, match.count
        req.slot = self.free_slots.pop()
        self.places.take(req)
        req.room = len(req.pages[0]) * self.page_size
        req.computed = full * self.page_size
        self.updates.append(PageUpdate(req.slot, 0, [list(group) for group in req.pages]))
        copies = []
        if leader and common > req.computed:
            copies = [
                PageCopy(group, leader.pages[group][full], req.pages[group][full]) for group in range(len(req.pages))
            ]
            req.computed = common
        if self.states is not None:
            self.states.admit(req, match)
        if self.windows is not None:
            self.windows.admit(req, match)
        return copies

    def append_page(self, req: Req) -> bool:
        """Append one page to a running choice. Return False if no page is free, even after eviction."""
        if not self._make_room(1):
            return False
        page = self.pools.allocate(1)
        self.updates.append(PageUpdate(req.slot, len(req.pages[0]), page))
        self._append(req, page)
        req.room += self.page_size
        return True

    def publish(self, req: Req, tokens: int) -> None:
        """Put the first `tokens` computed tokens of a running choice into the prefix cache."""
        if req.node is None:
            return
        self._publish_pages(req, tokens // self.page_size)
        if self.states is not None:
            self.states.publish(req, tokens)
        if self.windows is not None:
            self.windows.publish(req, req.node, req.shared)

    def _publish_pages(self, req: Req, count: int) -> None:
        """Put the first pages of a choice into the prefix cache.

        If another choice has inserted them first, this one uses the cached pages, and its own are freed later.
        """
        if req.node is None or count <= req.shared:
            return
        key = req.cache_key(count * self.page_size)
        node, existing = self.cache.insert(req.salt, key, req.pages)
        if node is req.node:
            return
        self.cache.lock(node)
        self.cache.unlock(req.node)
        if existing > req.shared:
            cached = self.cache.pages_of(node)
            first = req.shared
            own = [group[first:existing] for group in req.pages]
            for group, other in zip(req.pages, cached, strict=True):
                group[first:existing] = other[first:existing]
            self.updates.append(PageUpdate(req.slot, first, [group[first:existing] for group in cached]))
            self.deferred_free.append((req.last_step, own))
        req.node, req.shared = node, count

    def release(self, req: Req, *, reuse: bool = True) -> None:
        """Free all memory of a choice that no plan in flight names; `reuse` caches the tokens it computed."""
        if req.node is None:
            return
        valid = min(req.computed, len(req.tokens)) // self.page_size if reuse else req.shared
        existing, node = req.shared, req.node
        if valid > req.shared:
            node, existing = self.cache.insert(req.salt, req.cache_key(valid * self.page_size), req.pages)
        self.pools.release([group[req.shared : existing] for group in req.pages])
        self.pools.release([group[max(valid, existing) :] for group in req.pages])
        if self.states is not None:
            self.states.release(req, valid * self.page_size)
        if self.windows is not None:
            if valid >= req.shared:  # fewer if the last token is to be computed again
                self.windows.publish(req, node, valid)
            self.windows.release(req)
        self.cache.unlock(req.node)
        self.free_slots.append(req.slot)
        self.places.release(req)
        self.updates = [update for update in self.updates if update.slot != req.slot]
        req.reset_kv()

    def on_step_committed(self, plan: Plan, reqs: Sequence[Req]) -> None:
        """Free the pages whose freeing waited for a plan, which has committed."""
        if self.states is not None:
            self.states.on_step_committed(plan, reqs)
        if self.windows is not None:
            for req, tokens in self.windows.on_step_committed(plan, reqs):
                self.publish(req, tokens)  # may add to the pages below
        while self.deferred_free and self.deferred_free[0][0] <= plan.step:
            self.pools.release(self.deferred_free.popleft()[1])

    def flush(self) -> int:
        """Evict every prefix that no running choice uses. Return the number of freed pages."""
        pages = self.cache.evict(self.cache.evictable)
        self.pools.release(pages)
        return len(pages[0])

    def forget(self) -> None:
        """Invalidate all cached prefixes, adapters and audio clips, because the weights change. No choice may run."""
        self.flush()
        self.places.reset()

    def _common_with_leader(self, req: Req) -> tuple[Req | None, int]:
        """Return the leader, if it still runs, and the number of tokens of its pages that a follower can use.

        With a recurrent state or a window, a follower starts from the cache, because the leader's have advanced.
        """
        leader = req.leader
        if self.states is not None or self.windows is not None:
            return None, 0
        if leader is None or leader.slot < 0 or not leader.published or req.reusable <= 0:
            return None, 0
        return leader, min(req.prompt_tokens, req.reusable)

    def _make_room(self, count: int) -> bool:
        short = count - self.pools.free
        if short > 0:
            evicted = self.cache.evict(short)
            self.evicted += len(evicted[0])
            self.pools.release(evicted)
        return count <= self.pools.free

    @staticmethod
    def _append(req: Req, pages: Iterable[list[int]]) -> None:
        for group, more in zip(req.pages, pages, strict=True):
            group.extend(more)
