"""`VirtualTokenCounters`: what each tenant was given, for those who serve next whoever was given least.

A tenant that begins to wait is lifted to the least counter of those that wait already. Otherwise it could save up what
others were given while it asked for little, and come before them for as long once it asks for much. That holds for one
of which only something runs, too.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """What a tenant was given, and how much of it waits and has begun."""

    served: int = 0
    waiting: int = 0
    begun: int = 0


class VirtualTokenCounters:
    """Of every tenant, but for those that have nothing here and would be lifted when they come again."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, Account] = {}
        self._last = Account()
        """Of the tenant that was the last to wait."""

    def __getitem__(self, tenant: str) -> Account:
        return self.by_tenant[tenant]

    def joined(self, tenant: str) -> None:
        """One more waits. If the tenant has nothing else that does, lift it."""
        account = self.by_tenant.get(tenant)
        if account is None or not account.waiting:
            level = self._level()
            self.by_tenant = {
                name: each for name, each in self.by_tenant.items() if each.waiting or each.begun or each.served > level
            }
            account = self.by_tenant.setdefault(tenant, Account())
            account.served = max(account.served, level)
        account.waiting += 1

    def left(self, tenant: str) -> None:
        """One less waits."""
        account = self.by_tenant[tenant]
        account.waiting -= 1
        if not account.waiting:
            self._last = account

    def _level(self) -> int:
        """Where whoever begins to wait stands at least. It never falls."""
        return min((each.served for each in self.by_tenant.values() if each.waiting), default=self._last.served)
