"""`kill -9` of a serving part, or of the helper that decodes, under transcriptions: every text is the same."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import openai
import psutil
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from packages.frontend.tests.media.audio_files import saved, voice
from packages.scheduler.tests.models.audio.checkpoint import write_whisper
from tests.chaos.conftest import served
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.server_process import Server

HELPER = "tercet.frontend.media.audio_worker"
FILES = [saved(voice(seconds, seed=seconds)) for seconds in (95, 5, 29, 40, 1, 62)]
Texts = list[str]


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each role, for a tiny random Whisper."""
    yield from served(model=str(write_whisper(tmp_path_factory.mktemp("audio") / "hearing", max_target_positions=448)))


@pytest.fixture
async def parts(hearing: Server) -> AsyncIterator[Parts]:
    with watched(hearing) as parts:
        await parts.ready()
        yield parts


class Clients:
    """A stream of the longest file, and all files beside it."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.streams = asyncio.Event()
        """Set when the stream has text."""

    async def texts(self) -> Texts:
        others = (self._text(file) for file in FILES)
        return await asyncio.gather(self._streamed(FILES[0]), *others)

    async def _text(self, file: bytes) -> str:
        answer = await self._client.audio.transcriptions.create(model="hearing", file=("a.wav", file), temperature=0)
        return answer.text

    async def _streamed(self, file: bytes) -> str:
        text = ""
        stream = await self._client.audio.transcriptions.create(model="hearing", file=("a.wav", file), stream=True)
        async for each in stream:
            self.streams.set()
            if each.type == "transcript.text.delta":
                text += each.delta
        return text.rstrip()


@pytest.fixture
async def clients(parts: Parts) -> AsyncIterator[Clients]:
    async with openai.AsyncOpenAI(base_url=f"{parts.server.url}/v1", api_key="none", max_retries=0) as client:
        yield Clients(client)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_transcription_goes_on(parts: Parts, clients: Clients, role: str) -> None:
    before = await parts.resumed()
    expected = await clients.texts()
    assert expected[0] == expected[1]
    assert len(set(expected)) == len(FILES)
    clients.streams.clear()
    running = asyncio.create_task(clients.texts())
    await clients.streams.wait()
    name = parts.busiest(role)
    await parts.replaced(name, parts.signal(name, signal.SIGKILL))
    assert await running == expected
    assert_nothing_is_left(await parts.idle())
    assert await parts.resumed() > before


def helpers(parts: Parts) -> list[psutil.Process]:
    """Return the processes that decode audio."""
    return [each for each in psutil.Process(parts.pids()["frontend-0"]).children() if HELPER in each.cmdline()]


async def test_audio_is_decoded_again_after_the_death_of_a_helper(parts: Parts, clients: Clients) -> None:
    expected = await clients.texts()
    for idle in (found := helpers(parts)):
        idle.kill()
    psutil.wait_procs(found, 10)
    running = asyncio.create_task(clients.texts())
    while not (alive := helpers(parts)):  # noqa: ASYNC110 - nothing reports it
        await asyncio.sleep(0.005)
    alive[0].kill()
    assert await running == expected
    assert any("the work is repeated" in line for line in parts.server.lines)
    assert_nothing_is_left(await parts.idle())
