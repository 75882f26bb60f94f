"""Pools of pages, whose holders are counted."""

from collections.abc import Iterable

from tercet.scheduler.core.cache.prefix_cache import PageLists


class PagePool:
    """Pages of one cache group. A page is free exactly if it has no holder."""

    def __init__(self, pages: int) -> None:
        self.size = pages
        self.free_pages = list(range(pages - 1, -1, -1))
        self.holders = [0] * pages

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder. The caller must check that there are enough."""
        if count > len(self.free_pages):
            raise ValueError(f"{count} pages asked for, {len(self.free_pages)} free")
        if count == 0:
            return []
        taken = self.free_pages[-count:]
        del self.free_pages[-count:]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that already have one."""
        for page in pages:
            if not self.holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder of each page."""
        holders, free = self.holders, self.free_pages
        for page in pages:
            left = holders[page] - 1
            if left < 0:
                raise ValueError(f"page {page} is released twice")
            holders[page] = left
            if left == 0:
                free.append(page)


class PagePools:
    """Pools of all cache groups; a token's page is taken in every pool at once."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.groups = [PagePool(size) for size in sizes]
        self._free = [pool.free_pages for pool in self.groups]
        self.total = min(pool.size for pool in self.groups)

    @property
    def free(self) -> int:
        """Pages that can be taken in every group."""
        return min(map(len, self._free))

    def allocate(self, count: int) -> PageLists:
        """Take `count` pages in every group."""
        return [pool.allocate(count) for pool in self.groups]

    def hold(self, pages: PageLists) -> None:
        """Add a holder to each page."""
        for pool, group in zip(self.groups, pages, strict=True):
            pool.hold(group)

    def release(self, pages: PageLists) -> None:
        """Remove a holder of each page."""
        for pool, group in zip(self.groups, pages, strict=True):
            pool.release(group)
