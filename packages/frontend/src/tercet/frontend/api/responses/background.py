"""Worker for background responses: those of this frontend, and those that dead frontends have left."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from tercet.frontend.api.responses.body import rid_of
from tercet.frontend.api.responses.conversation_store import ConversationSnapshot
from tercet.frontend.api.responses.draft import Draft, InitialItems, Origin, ResponseDrafter
from tercet.frontend.api.responses.event_log import EventLog
from tercet.frontend.api.responses.output_items import Change
from tercet.frontend.api.responses.schema import CreateResponse
from tercet.frontend.api.responses.store import MAX_EVENTS, Job, Lease, LeaseLostError, ResponseStore
from tercet.frontend.api.responses.writer import ResponseObjectWriter
from tercet.frontend.errors import ApiError, RateLimitError, ServerError, UnavailableError
from tercet.frontend.http.auth import set_resumed_caller
from tercet.frontend.http.loop_turns import LoopPlaces
from tercet.frontend.http.sse import named_event
from tercet.frontend.json_number import dump_json, parse_json
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_RENEW_SECONDS = 0.5
_POLLS_PER_TAKEOVER = 2
_FOLLOW_SECONDS = 0.1
"""Maximum age in seconds of a follower's view of a response that another frontend generates."""
_READ_SECONDS = 0.5
"""Seconds for which a read is kept for other followers of the same response."""
MAX_FOLLOWERS = 64
"""Streams of background responses that one API key may have open at a frontend."""
_MAX_RUNS = 3
"""Maximum runs of a response. More would be futile, and the request may be the reason that its frontends died."""


class BackgroundWorker:
    """Background worker of this frontend. All methods run on the event loop's thread."""

    def __init__(self, manager: TokenizerManager, drafter: ResponseDrafter, store: ResponseStore) -> None:
        self._manager = manager
        self._drafter = drafter
        self._store = store
        self._tasks: dict[Lease, asyncio.Task[None]] = {}
        self._new_events: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        """Events that the followers of a response wait for; they live as long as a follower does."""
        self._followers: Counter[str] = Counter()
        self._reads: dict[tuple[str, str, int], asyncio.Future[tuple[list[bytes], bool]]] = {}
        """Pending and recent reads of the store, shared by followers that ask for the same events."""
        self._places = LoopPlaces()
        self._poller: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look for responses that other frontends have left."""
        self._poller = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop. Unfinished responses are left to other frontends."""
        tasks = [*self._tasks.values(), *([self._poller] if self._poller else [])]
        leases = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in leases:
            await self._store.release_lease(lease)

    async def submit(self, owner: str, origin: Origin, draft: Draft) -> dict[str, Any]:
        """Start a response and return its body as queued. Raises ApiError if the request is refused."""
        generation = await self._manager.submit([draft.plan.request], rid_of(origin.id))
        body = {**draft.body, "output": []}
        try:
            request = _resume_data(origin, draft.initial.past)
            lease = await self._store.begin(owner, body, draft.initial.given, request, draft.initial.seen)
        except BaseException:
            self._manager.release(generation)
            raise
        self._spawn(lease, self._work(lease, draft, generation, []))
        return body

    def join(self, owner: str) -> Callable[[], None]:
        """Count a follower of an API key, and return the function that ends it.

        Raises RateLimitError if there are too many.
        """
        if self._followers[owner] >= MAX_FOLLOWERS:
            message = f"Too many streams of background responses are open: a key has {MAX_FOLLOWERS} at the most."
            raise RateLimitError(message, retry_after=1)
        self._followers[owner] += 1

        def leave() -> None:
            self._followers -= Counter({owner: 1})

        return leave

    async def follow(self, owner: str, response: str, after: int) -> AsyncIterator[bytes]:
        """Yield the encoded events with numbers above `after`, to the last one. Raises NotFoundError."""
        more = True
        while more:
            events, more = await self._read(owner, response, after)
            after += len(events)
            if events:
                await self._places.wait(owner)  # an event wakes all followers of a response at once
            for event in events:
                yield event
            if more and len(events) < MAX_EVENTS:
                has_status = self._new_events.setdefault(response, asyncio.Event())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(has_status.wait(), _FOLLOW_SECONDS)

    async def _read(self, owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
        """Return the next events and whether more will come. Readers of the same events share one read."""
        key = (owner, response, after)
        if key not in self._reads:
            self._reads[key] = asyncio.ensure_future(self._read_now(*key))
            self._reads[key].add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(self._reads[key])

    def _keep(self, key: tuple[str, str, int], done: asyncio.Future[tuple[list[bytes], bool]]) -> None:
        """Keep a read for the followers that come to the same events a little later, unless it found none."""
        if done.cancelled() or done.exception() or not done.result()[0]:
            del self._reads[key]
        else:
            asyncio.get_running_loop().call_later(_READ_SECONDS, self._reads.pop, key)

    async def _read_now(self, owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
        events, more = await self._store.events(owner, response, after)
        return [named_event(parse_json(data)["type"], data) for data in events], more

    def stop(self, response: str) -> None:
        """Stop the work on a cancelled or deleted response."""
        for lease, task in self._tasks.items():
            if lease.id == response:
                task.cancel()

    # Generation.

    async def _work(self, lease: Lease, draft: Draft, generation: Generation, earlier: Sequence[Change]) -> None:
        writer = ResponseObjectWriter(draft.body, _call_ids(earlier))
        log = EventLog(earlier)
        try:
            await self._append_events(lease, log, writer, writer.begin())
            async for changes in draft.changes(writer, generation):
                await self._append_events(lease, log, writer, changes)
        except UnavailableError:
            await self._store.release_lease(lease)
        except ApiError as error:
            await self._append_events(lease, log, writer, writer.fail(error))
        finally:
            self._manager.release(generation)

    async def _resume(self, job: Job) -> None:
        """Resume a response that another frontend has left, from the end of its events."""
        set_resumed_caller(job.owner)
        request = job.request
        past = msgspec.convert(request["past"], ConversationSnapshot) if "past" in request else None
        origin = Origin(
            request["id"],
            request["created"],
            request["seed"],
            CreateResponse.model_validate(request["request"]),
            InitialItems(job.given, past),
        )
        earlier = await self._store.all_events(job.lease.id)
        try:
            draft = await self._drafter.draft(job.owner, origin)
            if job.lease.run > _MAX_RUNS:
                raise ServerError("The server failed this response again and again.")
            rid = self._manager.further_id(rid_of(origin.id))
            generation = await self._manager.submit([draft.plan.request], rid)
        except UnavailableError:
            await self._store.release_lease(job.lease)
        except ApiError as error:
            writer = ResponseObjectWriter(await self._store.get(job.owner, job.lease.id))
            await self._append_events(job.lease, EventLog(earlier), writer, writer.fail(error))
        else:
            await self._work(job.lease, draft, generation, earlier)

    async def _append_events(
        self, lease: Lease, log: EventLog, writer: ResponseObjectWriter, changes: Sequence[Change]
    ) -> None:
        first = log.next
        events = [dump_json(event) for event in log.add(changes)]
        has_status = any(change["type"] in _STATUS_EVENTS for change in changes)
        # While it runs, its events hold the output; a half-finished item in the body would stay there until the end.
        body = writer.body if writer.ended else {**writer.body, "output": []}
        if events or has_status:
            await self._store.add(lease, first, events, body if has_status else None)
        if waiters := self._new_events.pop(lease.id, None):
            waiters.set()

    def _spawn(self, lease: Lease, work: Coroutine[None, None, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except LeaseLostError:
                logger.info("background response lost its lease: response=%s run=%d", lease.id, lease.run)
            except Exception:
                # The lease runs out, and the response is resumed, at most `_MAX_RUNS` times.
                logger.exception("background response failed: response=%s run=%d", lease.id, lease.run)

        task = asyncio.create_task(guarded())
        self._tasks[lease] = task
        task.add_done_callback(lambda _: self._tasks.pop(lease, None))

    async def _poll(self) -> None:
        polls = 0
        while True:
            try:
                for lease in await self._store.renew(list(self._tasks)) if self._tasks else ():
                    if task := self._tasks.get(lease):
                        task.cancel()
                if polls % _POLLS_PER_TAKEOVER == 0 and self._manager.ready:
                    for job in await self._store.take_expired(await self._manager.adapters.names()):
                        logger.warning("background response resumed: response=%s run=%d", job.lease.id, job.lease.run)
                        self._spawn(job.lease, self._resume(job))
            except OSError:
                logger.exception("response store failed: retrying, check the disk of --response-store")
            polls += 1
            await asyncio.sleep(_RENEW_SECONDS)


_STATUS_EVENTS = {"response.in_progress", "response.completed", "response.incomplete", "response.failed"}
"""Events that change the status of a response."""


def _resume_data(origin: Origin, past: ConversationSnapshot | None) -> dict[str, Any]:
    request = origin.request.model_dump(mode="json", by_alias=True, exclude_none=True)
    whole = {"id": origin.id, "created": origin.created, "seed": origin.seed, "request": request}
    return whole if past is None else {**whole, "past": msgspec.to_builtins(past)}


def _call_ids(events: Sequence[Change]) -> dict[int, str]:
    return {
        event["output_index"]: event["item"]["call_id"]
        for event in events
        if event["type"] == "response.output_item.added" and "call_id" in event["item"]
    }
