"""Ids that clients of /generate chose for their requests, and by which they may abort them."""

from weakref import WeakValueDictionary


class ClientId:
    """A client's id of a request, and the id under which it runs. `ClientIds` forgets it when its response ends."""

    def __init__(self, chosen: str, rid: str) -> None:
        self.chosen = chosen
        self.rid = rid


class ClientIds:
    """Ids by caller. Callers do not share ids; of two requests with one id, the later one has it."""

    def __init__(self) -> None:
        self._ids: WeakValueDictionary[tuple[str, str], ClientId] = WeakValueDictionary()

    def add(self, owner: str, chosen: str, rid: str) -> ClientId:
        known = self._ids[owner, chosen] = ClientId(chosen, rid)
        return known

    def find(self, owner: str, chosen: str) -> str | None:
        """Return the id under which a caller's request runs, None for an id that no request has."""
        known = self._ids.get((owner, chosen))
        return None if known is None else known.rid
