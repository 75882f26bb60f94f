"""Responses that are made while nobody waits for them, and those that frontends now dead have left."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import orjson

from tercet.frontend.api.responses.body import rid_of
from tercet.frontend.api.responses.conversation_store import Past
from tercet.frontend.api.responses.draft import Begun, Draft, Origin, ResponseDrafter
from tercet.frontend.api.responses.event_log import EventLog
from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.api.responses.schema import CreateResponse
from tercet.frontend.api.responses.store import MOST_EVENTS, Job, Lease, LeaseLostError, ResponseStore
from tercet.frontend.api.responses.writer import ResponseWriter
from tercet.frontend.errors import ApiError, RateLimitError, ServerError, UnavailableError
from tercet.frontend.http.auth import resume_for
from tercet.frontend.http.sse import named_event
from tercet.frontend.manager.generation import Generation
from tercet.frontend.manager.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_RENEW_SECONDS = 0.5
_LOOKS_FOR_EACH_TAKING = 2
_FOLLOW_SECONDS = 0.1
"""How long news of a response may be old that another frontend makes."""
MOST_FOLLOWERS = 64
"""Streams of responses made in the background that one API key may have open at a frontend."""
_MOST_RUNS = 3
"""What was begun so often failed each time, and may be what its frontends died of."""


class Background:
    """Works on background responses of this frontend's. All methods run on the event loop's thread."""

    def __init__(self, manager: TokenizerManager, drafter: ResponseDrafter, store: ResponseStore) -> None:
        self._manager = manager
        self._drafter = drafter
        self._store = store
        self._working: dict[Lease, asyncio.Task[None]] = {}
        self._news: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """What the followers of a response wait for, for as long as there is one."""
        self._followers: Counter[str] = Counter()
        self._reads: dict[tuple[str, str, int], asyncio.Future[tuple[list[bytes], bool]]] = {}
        """What is being read of the store, for all followers that ask for the same."""
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look for what others have left."""
        self._looking = asyncio.create_task(self._look_forever())

    async def close(self) -> None:
        """Stop; what is not done is left to whoever comes next."""
        tasks = [*self._working.values(), *([self._looking] if self._looking else [])]
        leases = list(self._working)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in leases:
            await self._store.give_up(lease)

    async def begin(self, owner: str, origin: Origin, draft: Draft) -> dict[str, Any]:
        """Have a response made; returns it as it is queued. Raises ApiError if its request cannot be taken."""
        generation = await self._manager.submit([draft.plan.request], rid_of(origin.id))
        body = {**draft.body, "output": []}
        try:
            request = _kept(origin, draft.begun.past)
            lease = await self._store.begin(owner, body, draft.begun.given, request, draft.begun.seen)
        except BaseException:
            self._manager.release(generation)
            raise
        self._spawn(lease, self._work(lease, draft, generation, []))
        return body

    def join(self, owner: str) -> Callable[[], None]:
        """Count one more follower of an API key, and return what ends that. Raises RateLimitError for one too many."""
        if self._followers[owner] >= MOST_FOLLOWERS:
            message = f"Too many streams of background responses are open: a key has {MOST_FOLLOWERS} at the most."
            raise RateLimitError(message, retry_after=1)
        self._followers[owner] += 1

        def leave() -> None:
            self._followers -= Counter({owner: 1})

        return leave

    async def follow(self, owner: str, response: str, after: int) -> AsyncIterator[bytes]:
        """The events numbered above `after`, as they come, to the last, as a stream has them. Raises NotFoundError."""
        more = True
        while more:
            events, more = await self._read(owner, response, after)
            after += len(events)
            for event in events:
                yield event
            if more and len(events) < MOST_EVENTS:
                news = self._news.setdefault(response, asyncio.Event())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _FOLLOW_SECONDS)

    async def _read(self, owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
        """The next events of a response and whether more will come; read once for all who ask at the same time."""
        key = (owner, response, after)
        if key not in self._reads:
            self._reads[key] = asyncio.ensure_future(self._read_now(*key))
            self._reads[key].add_done_callback(lambda done: done.cancelled() or done.exception())
            self._reads[key].add_done_callback(lambda _: self._reads.pop(key))
        return await asyncio.shield(self._reads[key])

    async def _read_now(self, owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
        events, more = await self._store.events(owner, response, after)
        return [named_event(orjson.loads(data)["type"], data) for data in events], more

    def stop(self, response: str) -> None:
        """Stop working on one that was cancelled or deleted."""
        for lease, task in self._working.items():
            if lease.id == response:
                task.cancel()

    # Work.

    async def _work(self, lease: Lease, draft: Draft, generation: Generation, earlier: Sequence[Change]) -> None:
        writer = ResponseWriter(draft.body, _call_ids(earlier))
        log = EventLog(earlier)
        try:
            await self._tell(lease, log, writer, writer.begin())
            async for changes in draft.changes(writer, generation):
                await self._tell(lease, log, writer, changes)
        except UnavailableError:
            await self._store.give_up(lease)
        except ApiError as error:
            await self._tell(lease, log, writer, writer.fail(error))
        finally:
            self._manager.release(generation)

    async def _again(self, job: Job) -> None:
        """Begin a response again that another frontend has left, and go on where its events end."""
        resume_for(job.owner)
        request = job.request
        past = msgspec.convert(request["past"], Past) if "past" in request else None
        origin = Origin(
            request["id"],
            request["created"],
            request["seed"],
            CreateResponse.model_validate(request["request"]),
            Begun(job.given, past),
        )
        earlier = await self._store.emitted(job.lease.id)
        try:
            draft = await self._drafter.draft(job.owner, origin)
            if job.lease.run > _MOST_RUNS:
                raise ServerError("The server failed this response again and again.")
            rid = self._manager.further_id(rid_of(origin.id))
            generation = await self._manager.submit([draft.plan.request], rid)
        except UnavailableError:
            await self._store.give_up(job.lease)
        except ApiError as error:
            writer = ResponseWriter(await self._store.get(job.owner, job.lease.id))
            await self._tell(job.lease, EventLog(earlier), writer, writer.fail(error))
        else:
            await self._work(job.lease, draft, generation, earlier)

    async def _tell(self, lease: Lease, log: EventLog, writer: ResponseWriter, changes: Sequence[Change]) -> None:
        first = log.next
        events = [orjson.dumps(event) for event in log.add(changes)]
        news = any(change["type"] in _STANDINGS for change in changes)
        # What it has said while it runs its events tell; half an item would stay as it was until the end.
        body = writer.body if writer.ended else {**writer.body, "output": []}
        if events or news:
            await self._store.add(lease, first, events, body if news else None)
        if woken := self._news.pop(lease.id, None):
            woken.set()

    def _spawn(self, lease: Lease, work: Coroutine[None, None, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except LeaseLostError:
                logger.info("%s is no longer this frontend's to make", lease.id)
            except Exception:
                # Its lease runs out, and it is begun again, but not for ever.
                logger.exception("the work on %s failed", lease.id)

        task = asyncio.create_task(guarded())
        self._working[lease] = task
        task.add_done_callback(lambda _: self._working.pop(lease, None))

    async def _look_forever(self) -> None:
        looks = 0
        while True:
            try:
                for lease in await self._store.renew(list(self._working)) if self._working else ():
                    if task := self._working.get(lease):
                        task.cancel()
                if looks % _LOOKS_FOR_EACH_TAKING == 0 and self._manager.ready:
                    for job in await self._store.take_over(await self._manager.adapters.names()):
                        logger.warning("%s is begun again (run %d)", job.lease.id, job.lease.run)
                        self._spawn(job.lease, self._again(job))
            except OSError:
                logger.exception("the store of responses does not answer")
            looks += 1
            await asyncio.sleep(_RENEW_SECONDS)


_STANDINGS = {"response.in_progress", "response.completed", "response.incomplete", "response.failed"}
"""Events after which a response stands otherwise than before."""


def _kept(origin: Origin, past: Past | None) -> dict[str, Any]:
    request = origin.request.model_dump(mode="json", by_alias=True, exclude_none=True)
    whole = {"id": origin.id, "created": origin.created, "seed": origin.seed, "request": request}
    return whole if past is None else {**whole, "past": msgspec.to_builtins(past)}


def _call_ids(events: Sequence[Change]) -> dict[int, str]:
    return {
        event["output_index"]: event["item"]["call_id"]
        for event in events
        if event["type"] == "response.output_item.added" and "call_id" in event["item"]
    }
