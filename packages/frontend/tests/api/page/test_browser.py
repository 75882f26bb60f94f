"""The page in a real browser: chat, live view, keys and the API's documentation. Skipped where Chromium is missing."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from packages.frontend.tests.api.page.browser import CHROMIUM, Browser, Page, chromium
from packages.frontend.tests.api.page.test_status_stream import row, state
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.internal_state import ChoicePhase
from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]

pytestmark = [
    pytest.mark.slow,  # a browser beside other tests on two cores misses its times
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed: apt-get install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]

MARKDOWN = """# Title

Some **bold** text, `code` and a [link](https://example.org/a).

- one
- two
  1. nested

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(): return "<b>"
```
"""
HOSTILE = """<img src=x onerror="document.title='owned'"> <script>document.title='owned'</script>

[click](javascript:document.title='owned') ![pixel](https://evil.example/?leak)

```"><img src=x onerror=alert(1)>
code
```
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


def spoken(text: str) -> Callable[..., list[Token]]:
    """Return a script whose answer is a text, a few characters a token."""
    return lambda *_: [Token(10, text[at : at + 7]) for at in range(0, len(text), 7)]


@asynccontextmanager
async def opened(
    browser: Browser, engine: FakeEngine, path: str = "/", config: HttpConfig = HttpConfig(), **options: Any
) -> AsyncIterator[tuple[Page, Served]]:
    """Yield a page of a server. It must raise no error, and request nothing from other hosts."""
    async with serving(engine, config, options.pop("serving", ServingConfig())) as served:
        page = await browser.open(served.url + path, **options)
        try:
            yield page, served
        finally:
            await page.close()
        assert [url for url in page.urls if not url.startswith((served.url, "about:"))] == []
        assert [each for each in page.faults if "401" not in each] == []


async def ask(page: Page, text: str = "Hello") -> None:
    await page.until("document.querySelector('#model option')")
    await page.type("#prompt", text)
    await page.press("Enter")


async def until_answered(page: Page) -> None:
    await page.until("document.querySelector('.regenerate')")


async def test_an_answer_is_streamed_and_its_markdown_is_rendered(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of(spoken(MARKDOWN))) as (page, served):
        await page.run("document.querySelector('#system').value = 'Be brief.'")
        await page.run("document.querySelector('[data-number=temperature]').value = '0.5'")
        await ask(page)
        await until_answered(page)
        found = await page.run("[...document.querySelector('.assistant > .md').children].map((each) => each.localName)")
        assert found == ["h3", "p", "ul", "div", "figure"]
        assert await page.text(".assistant strong") == "bold"
        assert await page.run("document.querySelector('.assistant a').rel") == "noopener noreferrer nofollow"
        assert await page.text(".assistant ol li") == "nested"
        assert await page.text(".assistant td.right") == "2"
        assert await page.text(".assistant pre") == 'def f(): return "<b>"'
        [request] = served.engine.requests()
        assert request.sampling.temperature == 0.5


ATTACH = """(async () => {
  const file = async ([url, name]) => {
    const bytes = Uint8Array.from(atob(url.split(",")[1]), (each) => each.charCodeAt(0));
    return new File([bytes], name, { type: name.endsWith("png") ? "image/png" : "text/plain" });
  };
  const chosen = new DataTransfer();
  for (const each of FILES) chosen.items.add(await file(each));
  document.querySelector("#image-files").files = chosen.files;
  document.querySelector("#image-files").dispatchEvent(new Event("change"));
})()"""


async def test_a_message_has_images(
    browser: Browser, engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> None:
    pytest.importorskip("PIL")
    from packages.frontend.tests.media.image_files import data_url, noise, saved
    from packages.frontend.tests.media.seeing import seeing

    engine = seeing(engine_of, files, limits, tokenizer)
    cat, dog = (data_url(saved(noise(20, 30, seed=seed))) for seed in (1, 2))
    attached = [[cat, "cat.png"], [dog, "dog.png"], [dog, "dog.txt"]]
    async with opened(browser, engine) as (page, served):
        await page.until("document.querySelector('#model option')")
        await page.run(ATTACH.replace("FILES", json.dumps(attached)))
        await page.until("document.querySelectorAll('#images li').length === 2")
        assert "dog.txt is no PNG" in await page.text("#image-fault")
        await page.click("#images li:nth-child(2) button")
        await ask(page, "What is it?")
        await until_answered(page)
        assert await page.text(".turn.user .plain") == "[cat.png]\nWhat is it?"
        assert await page.run("document.querySelector('#images').hidden")
        await ask(page, "And now?")
        await page.until("document.querySelectorAll('.turn.assistant footer .actions').length === 2")
        arrays = [[bytes(frame) for frame in frames] for frames in served.engine.frames]
    assert arrays == [[noise(20, 30, seed=1).resize((6, 2), 2).tobytes()]] * 2, "the conversation keeps its images"


async def test_a_regenerated_answer_replaces_the_last_one(browser: Browser, engine_of: EngineOf) -> None:
    answers = iter(["first", "second"])
    async with opened(browser, engine_of(lambda *_: [Token(10, next(answers))])) as (page, served):
        await ask(page)
        await until_answered(page)
        await page.click(".regenerate")
        await page.until("document.querySelector('.assistant > .md').innerText === 'second'")
        assert await page.run("document.querySelectorAll('.turn').length") == 2
        prompts = [bytes(each.input_ids) for each in served.engine.requests()]
        assert prompts[0] == prompts[1]


async def test_an_answer_is_stopped_by_escape(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of(spoken("word " * 100), auto=False)) as (page, served):
        await ask(page)
        while not served.engine.running:  # noqa: ASYNC110 - the engine is a test double
            await asyncio.sleep(0.01)
        for _ in range(3):
            served.engine.step()
        await page.until("document.querySelector('.assistant > .md').innerText")
        assert not await page.run("document.querySelector('#stop').hidden")
        await page.press("Escape")
        await until_answered(page)
        assert (await page.text(".assistant footer")).startswith("stopped")
        assert (await page.text(".assistant > .md")).startswith("word")
        await served.until_idle()
        assert served.engine.aborts()


async def test_a_hostile_answer_is_shown_as_text(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of(spoken(HOSTILE))) as (page, _):
        await ask(page, "<img src=x onerror=alert(1)>")
        await until_answered(page)
        assert await page.run("document.title") == "Tercet"
        assert await page.run("document.querySelectorAll('#messages img, #messages script').length") == 0
        links = await page.run("[...document.querySelectorAll('#messages a')].map((each) => each.href)")
        assert links == ["https://evil.example/?leak"], "an image is a link, which loads nothing by itself"
        assert "<script>" in await page.text(".assistant > .md")
        assert await page.text(".user .plain") == "<img src=x onerror=alert(1)>"


async def test_markdown_of_any_form_ends_quickly(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of()) as (page, _):
        marks = ["*", "_", "`", "[", "](", "![", "> ", "- ", "~~", "|", "**a ", "\\", "# ", "```\n", "[a](", "<"]
        script = f"""(async () => {{
          const {{ render }} = await import('./page/markdown.js');
          const slow = [];
          for (const mark of {json.dumps(marks)}) {{
            const began = performance.now();
            for (const text of [mark.repeat(5000), (mark + '\\n').repeat(2000), ('a' + mark + 'b ').repeat(3000)]) {{
              if (mark !== '|' && render(text).textContent.length > text.length + 2000) slow.push(mark);
            }}
            if (performance.now() - began > 2000) slow.push([mark, performance.now() - began]);
          }}
          return slow;
        }})()"""
        assert await page.run(script) == []


async def test_reasoning_is_folded(browser: Browser, engine_of: EngineOf) -> None:
    engine = engine_of(spoken("<think>secret plan</think>Answer."))
    async with opened(browser, engine, serving=ServingConfig(reasoning_parser="qwen3")) as (page, _):
        await ask(page)
        await until_answered(page)
        assert await page.run("document.querySelector('.reasoning').open") is False
        assert await page.text(".assistant > .md") == "Answer."
        await page.focus(".reasoning summary")
        await page.press("Enter")
        await page.until("document.querySelector('.reasoning').open")
        await page.until("document.querySelector('.reasoning .md').innerText === 'secret plan'")


async def test_tools_are_sent_and_their_results_continue_the_chat(
    browser: Browser, engine_of: EngineOf, limits: ModelLimits
) -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
    answers = iter([call, "Sunny."])
    engine = engine_of(
        lambda *_: [Token(10, next(answers))], limits=msgspec.structs.replace(limits, context_length=4096)
    )
    async with opened(browser, engine, serving=ServingConfig(tool_call_parser="hermes")) as (page, served):
        await page.run("document.querySelector('#tools').value = '{'")
        await ask(page)
        await page.until("document.querySelector('#tools-fault').innerText.startsWith('This is not JSON')")
        assert served.engine.requests() == []
        await page.click("#tools-example")
        assert await page.text("#tools-fault") == ""
        await page.click(".error button")
        await page.until("document.querySelector('.call textarea')")
        assert await page.text(".call strong") == "get_weather"
        await page.type(".call textarea", "22 degrees")
        await page.click(".calls button")
        await page.until("document.querySelectorAll('.assistant').length === 2")
        await until_answered(page)
        assert await page.text(".tool .plain") == "22 degrees"
        assert await page.run("[...document.querySelectorAll('.assistant > .md')].at(-1).innerText") == "Sunny."


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_key_is_asked_for_and_kept_in_memory_only(browser: Browser, engine_of: EngineOf, path: str) -> None:
    config = HttpConfig(api_key=("ann",), admin_key=("boss",))
    async with opened(browser, engine_of(), path, config) as (page, _):
        await page.until("document.querySelector('#key-dialog').open")
        await page.type("#key", "wrong")
        await page.press("Enter")
        await page.until("document.querySelector('#key-fault').innerText.includes('does not know')")
        await page.type("#key", "ann")
        await page.press("Enter")
        await page.until("document.querySelector('#model option, .op')")
        assert await page.run("document.querySelector('#key-dialog').open") is False
        stored = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert "ann" not in await page.run(stored)
        await page.click("#forget-key")
        assert await page.run("document.querySelector('#forget-key').hidden")
        await page.call("Page.reload")
        await page.until("document.querySelector('#key-dialog')?.open")


async def test_the_live_view_shows_choices_prefixes_and_a_death(browser: Browser, engine_of: EngineOf) -> None:
    rows = [
        row("r1", output_tokens=5, max_new_tokens=9, cached_tokens=16),
        row("r2", phase=ChoicePhase.WAITING, attempt=1),
    ]
    engine = engine_of(schedulers=["scheduler-0", "scheduler-1"], state=state(*rows))
    async with opened(browser, engine, "/#live") as (page, _):
        await page.until("document.querySelectorAll('#batch tbody tr').length === 4")
        assert "5 of 9" in await page.text("#batch tbody")
        assert "attempt 2" in await page.text("#batch tbody")
        assert await page.run("document.querySelectorAll('.part[data-state=ready], .part[data-state=loading]').length")
        await page.until("document.querySelectorAll('[role=treeitem]').length === 4")
        await page.focus("[role=treeitem][tabindex='0']")
        await page.press("ArrowDown")
        assert "1 page" in await page.text(".treefoot")
        engine.down("scheduler-1")
        await page.until("document.querySelector('#events .died')?.innerText.includes('scheduler-1')")
        await page.until("!document.querySelector('[data-peer=scheduler-1]')")


async def test_a_request_after_a_forgotten_key_asks_again(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of(), "/#live", HttpConfig(api_key=("ann",))) as (page, _):
        await page.until("document.querySelector('#key-dialog').open")
        await page.type("#key", "ann")
        await page.press("Enter")
        await page.until("document.querySelector('#tiles').children.length")
        await page.click("#forget-key")
        await page.until("document.querySelector('#key-dialog').open")
        await page.click("#key-dialog .quiet")
        await page.until("document.querySelector('#live-note').innerText.includes('needs a key')")


async def test_tabs_are_chosen_by_arrow_keys(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of()) as (page, served):
        await page.focus("#tab-chat")
        await page.press("ArrowRight")
        assert await page.run("document.activeElement.id") == "tab-live"
        assert await page.run("document.querySelector('#chat').hidden")
        await page.until("document.querySelector('#tiles').children.length")
        assert served.manager.status._viewers.total() == 1
        await page.press("ArrowLeft")
        assert await page.run("document.querySelector('#live').hidden")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while served.manager.status._viewers:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert not served.manager.status._viewers


CONTROLS_WITHOUT_NAMES = """[...document.querySelectorAll('input, textarea, select, button')]
  .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()))
  .map((each) => each.id)"""


@pytest.mark.parametrize("path", ["/", "/#live", "/docs"])
async def test_a_page_fits_narrow_windows_in_both_color_schemes(
    browser: Browser, engine_of: EngineOf, path: str
) -> None:
    grounds = set()
    engine = engine_of(state=state(row("r1")))
    for scheme in ("light", "dark"):
        async with opened(browser, engine, path, width=360, height=700, scheme=scheme) as (page, _):
            await page.until("document.querySelector('#model option, .op')")
            assert await page.run("document.documentElement.scrollWidth") <= 360
            grounds.add(await page.run("getComputedStyle(document.body).backgroundColor"))
            assert await page.run(CONTROLS_WITHOUT_NAMES) == []
    assert len(grounds) == 2


async def test_the_documentation_lists_every_route_and_sends_examples(browser: Browser, engine_of: EngineOf) -> None:
    async with opened(browser, engine_of(), "/docs") as (page, served):
        await page.until("document.querySelector('.op')")
        spec = await page.run("fetch('openapi.json').then((each) => each.json())")
        routes = sum(map(len, spec["paths"].values()))
        assert await page.run("document.querySelectorAll('.op').length") == routes
        await page.type("#filter", "v1/completions")
        await page.until("document.querySelectorAll('.op:not([hidden])').length === 1")
        await page.click(".op:not([hidden]) summary")
        await page.until("document.querySelector('.op textarea')")
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3}
        await page.run(f"document.querySelector('.op textarea').value = {json.dumps(json.dumps(body))}")
        await page.click(".op button")
        await page.until("document.querySelector('.op pre').innerText.includes('text_completion')")
        [request] = served.engine.requests()
        assert isinstance(request, TokenizedGenerateReqInput)
