"""Virtual token counters: the service of each tenant, for policies that serve the tenant with the least first.

A tenant that begins to wait is lifted to the lowest counter of the waiting tenants. Otherwise it could save up service
while it requests little, and come before others for as long once it requests much. The same holds for a tenant with
only running choices.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Account:
    """Service of a tenant, and the number of its waiting and started choices."""

    served: int = 0
    waiting: int = 0
    begun: int = 0


class VirtualTokenCounters:
    """Accounts of all tenants, except those without choices here that would be lifted on their return."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, Account] = {}
        self._last = Account()
        """Account of the tenant that was the last to wait."""

    def __getitem__(self, tenant: str) -> Account:
        return self.by_tenant[tenant]

    def joined(self, tenant: str) -> None:
        """Count one more waiting choice. If it is the tenant's only one, lift the tenant."""
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
        """Count one waiting choice less."""
        account = self.by_tenant[tenant]
        account.waiting -= 1
        if not account.waiting:
            self._last = account

    def _level(self) -> int:
        """Return the minimum counter of a tenant that begins to wait. It never falls."""
        return min((each.served for each in self.by_tenant.values() if each.waiting), default=self._last.served)
