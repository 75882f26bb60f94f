"""Images are read from allowed hosts, and from nothing else that their URLs lead to."""

import asyncio
import gzip
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("httpcore2")

from packages.frontend.tests.media.hosts import CHUNKED, PUBLIC, Internet, chunk, internet, response
from packages.frontend.tests.media.image_files import FORM, noise, saved
from packages.frontend.tests.polling import until
from tercet.frontend.config import validation
from tercet.frontend.config.config import ServingConfig
from tercet.frontend.config.validation import read_media_hosts
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import Caller, set_current_caller
from tercet.frontend.media.addresses import is_public
from tercet.frontend.media.image_decoder import ImageDecoder, ImageSource
from tercet.frontend.media.image_fetcher import ImageFetcher

URL = "http://images.example.org/a.png"
CAT = saved(noise(40, 30))


def fetcher_of(net: Internet, *hosts: str, **options: Any) -> ImageFetcher:
    return ImageFetcher(read_media_hosts(hosts or ("images.example.org",)), net.resolve, net, **options)


async def fetched(fetcher: ImageFetcher, url: str = URL) -> bytes:
    async with fetcher.file(ImageSource(url=url, param="messages[0].content[1]")) as file:
        return file


async def refusal(fetcher: ImageFetcher, url: str = URL) -> str:
    with pytest.raises(BadRequestError) as error:
        await fetched(fetcher, url)
    assert (error.value.param, error.value.code) == ("messages[0].content[1]", "invalid_image_url")
    return error.value.message


async def test_an_image_comes_from_an_allowed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with internet(response(CAT, "200 OK", "content-type: text/html", "set-cookie: a=b")) as net:
        decoder = ImageDecoder(workers=1, fetcher=fetcher_of(net))
        source = ImageSource(url="HTTP://Images.Example.org/é/a.png?size=1#top", param="")
        images = [await decoder.decode(source, FORM) for _ in range(2)]
        await decoder.close()
    assert images[0].array == noise(40, 30).resize((14, 28), 2).tobytes()
    assert net.connected == [(PUBLIC, 80)] * 2
    line, *headers = net.heads[1].decode().lower().splitlines()
    assert line == "get /%c3%a9/a.png?size=1 http/1.1"
    names = {header.partition(":")[0]: header.partition(": ")[2] for header in headers if header}
    assert names.pop("user-agent").startswith("tercet/")
    assert names == {"host": "images.example.org", "accept": "image/*", "accept-encoding": "identity"}


async def test_a_name_is_resolved_once_and_the_connection_goes_there() -> None:
    async with internet(response(CAT), [PUBLIC], ["127.0.0.1"]) as net:
        fetcher = fetcher_of(net)
        assert await fetched(fetcher) == CAT
        assert (net.lookups, net.connected) == (["images.example.org"], [(PUBLIC, 80)])
        assert "not public" in await refusal(fetcher), "the next lookup finds another address"
    assert net.connected == [(PUBLIC, 80)]


NOT_PUBLIC = (
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("100.100.100.200", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "ff0e::1", "100::1"),
    *("2001:db8::1", "3fff::1", "2001::1", "2001:2::1", "5f00::1", "4000::1", "::127.0.0.1", "::8.8.8.8"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::ffff:0:7f00:1", "64:ff9b::10.0.0.1"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808", "2002:7f00:1::", "2002:a9fe:a9fe::", "2002:a00:1::1"),
)


def test_addresses_of_every_private_kind_are_known() -> None:
    assert [each for each in NOT_PUBLIC if is_public(each)] == []
    public = ("8.8.8.8", PUBLIC, "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1")
    assert [each for each in public if not is_public(each)] == []


@pytest.mark.parametrize("addresses", [["10.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:127.0.0.1", PUBLIC]])
async def test_a_host_with_any_private_address_is_refused(addresses: list[str]) -> None:
    async with internet(response(CAT), addresses) as net:
        assert "not public" in await refusal(fetcher_of(net))
    assert net.connected == []


OTHER_URLS = {
    "http://other.example.org/a.png": "--allowed-media-host",
    "http://images.example.org.evil.org/a.png": "--allowed-media-host",
    "http://evil.org/images.example.org": "--allowed-media-host",
    "http://sub.images.example.org/a.png": "--allowed-media-host",
    "http://images.example.org./a.png": "--allowed-media-host",
    "http://images.example.org:8080/a.png": "--allowed-media-host",
    "http://images.example.org:443/a.png": "--allowed-media-host",
    "http://images.example.org:0/a.png": "--allowed-media-host",
    "http://127.0.0.1/a.png": "--allowed-media-host",
    "http://2130706433/a.png": "--allowed-media-host",
    "http://0x7f.1/a.png": "--allowed-media-host",
    "http://[::1]/a.png": "--allowed-media-host",
    "http:///a.png": "--allowed-media-host",
    "http:images.example.org/a.png": "--allowed-media-host",
    "http://İmages.example.org/a.png": "--allowed-media-host",
    "http://evil.org#images.example.org": "--allowed-media-host",
    "http://user:word@images.example.org/a.png": "user name",
    "http://images.example.org@evil.org/a.png": "user name",
    "http://evil.org\\@images.example.org/a.png": "characters",
    "http://images.example.org\\@evil.org/a.png": "characters",
    "http://images.example.org/a\r\nX: y": "characters",
    "http://images.example.org/a\tb": "characters",
    "http://images.example.org /a": "characters",
    f"http://images.example.org/{'a' * 9000}": "characters",
    "http://images.example.org:99999/": "cannot be read",
    "http://images.example.org:x/": "cannot be read",
    "http://[images.example.org/": "cannot be read",
}


async def test_urls_of_other_hosts_are_refused() -> None:
    async with internet(response(CAT)) as net:
        fetcher = fetcher_of(net)
        assert {url for url, why in OTHER_URLS.items() if why not in await refusal(fetcher, url)} == set()
    assert (net.lookups, net.connected) == ([], [])


@pytest.mark.parametrize("url", ["file:///etc/passwd", "gopher://images.example.org/", "ftp://images.example.org/a"])
async def test_other_schemes_are_refused(url: str) -> None:
    async with internet() as net:
        with pytest.raises(BadRequestError, match="'data:' URLs only") as error:
            await ImageDecoder(fetcher=fetcher_of(net)).decode(ImageSource(url=url, param="a"), FORM)
    assert (error.value.code, net.lookups) == ("invalid_image_url", [])


async def test_a_port_is_allowed_by_name() -> None:
    async with internet(response(CAT)) as net:
        fetcher = fetcher_of(net, "Images.example.org:8080")
        assert await fetched(fetcher, "http://images.example.org:8080/a.png") == CAT
        assert "--allowed-media-host" in await refusal(fetcher)
    assert net.connected == [(PUBLIC, 8080)]
    assert b"host: images.example.org:8080" in net.heads[0].lower()


async def test_tls_is_checked_against_the_name_and_not_the_address() -> None:
    async with internet(response(CAT)) as net:
        assert "cannot be reached" in await refusal(fetcher_of(net), "https://images.example.org/a.png")
    assert (net.connected, net.tls_names) == ([(PUBLIC, 443)], ["images.example.org"])


async def test_an_address_that_does_not_answer_gives_way_to_the_next() -> None:
    async with internet(response(CAT), ["2606:4700::1", PUBLIC]) as net:
        net.dead = frozenset({"2606:4700::1"})
        assert await fetched(fetcher_of(net)) == CAT
        net.dead |= {PUBLIC}
        assert "cannot be reached" in await refusal(fetcher_of(net))
    assert net.connected == [("2606:4700::1", 80), (PUBLIC, 80)] * 2


async def test_an_unknown_name_is_refused() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError(f"{host}:{port}")

    fetcher = ImageFetcher(read_media_hosts(["images.example.org"]), unknown)
    assert "cannot be reached" in await refusal(fetcher)


BAD_RESPONSES = {
    "redirect to a private address": (response(b"", "302 Found", "location: http://127.0.0.1/"), "redirects"),
    "redirect within the host": (response(b"", "308 Permanent Redirect", "location: /b.png"), "redirects"),
    "redirect by a list": (response(b"", "300 Multiple Choices"), "redirects"),
    "no such file": (response(b"no", "404 Not Found"), "status 404"),
    "fault of the host": (response(b"no", "500 Oops"), "status 500"),
    "part of a file": (response(CAT, "206 Partial Content"), "status 206"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "cannot be reached"),
    "no response": (b"", "cannot be reached"),
    "cut off": (response(CAT)[:-5], "cannot be reached"),
    "cut off in chunks": (CHUNKED + chunk(CAT), "cannot be reached"),
    "negative length": (b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n", "cannot be reached"),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 100_000, "cannot be reached"),
    "too large": (response(bytes(100_001)), "more than 100000 bytes"),
    "too large, in chunks": (CHUNKED + chunk(bytes(60_000)) * 2, "more than 100000 bytes"),
    "too large, to the end of the connection": (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(200_000), "more than 100000 bytes"),
}


async def test_what_is_no_file_is_refused() -> None:
    refusals = {}
    async with internet() as net:
        fetcher = fetcher_of(net, max_bytes=100_000)
        for name, (net.respond, _) in BAD_RESPONSES.items():
            refusals[name] = await refusal(fetcher)
    assert {name: refusals[name] for name, (_, why) in BAD_RESPONSES.items() if why not in refusals[name]} == {}
    assert net.connected == [(PUBLIC, 80)] * len(BAD_RESPONSES), "no redirect is followed"


async def test_an_endless_file_is_bounded() -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        while True:
            writer.write(chunk(bytes(65_536)))
            await writer.drain()

    async with internet(endless) as net:
        assert "more than 1000000 bytes" in await refusal(fetcher_of(net, max_bytes=1_000_000))


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED, CHUNKED + b"1\r\na\r\n"])
async def test_a_slow_host_has_a_time_for_the_whole(begin: bytes) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        while begin:
            await asyncio.sleep(0.02)
            writer.write(b"1\r\na\r\n" if begin.startswith(CHUNKED) else b"a: b\r\n")
            await writer.drain()
        await asyncio.sleep(9)

    async with internet(slow) as net:
        assert "takes more than 0.1 s" in await refusal(fetcher_of(net, seconds=0.1))


async def test_a_name_that_is_never_resolved_has_the_same_time() -> None:
    async def never(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return [host, str(port)]

    fetcher = ImageFetcher(read_media_hosts(["images.example.org"]), never, seconds=0.02)
    assert "takes more than 0.02 s" in await refusal(fetcher)


async def test_a_compressed_file_stays_compressed() -> None:
    bomb = gzip.compress(bytes(1_000_000))
    async with internet(response(bomb, "200 OK", "content-encoding: gzip")) as net:
        assert await fetched(fetcher_of(net)) == bomb


async def test_tiny_chunks_leave_turns_to_others() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with internet(CHUNKED + chunk(b"a") * 2000 + chunk(b"")) as net:
        counting = asyncio.create_task(others())
        await fetched(fetcher_of(net))
        counting.cancel()
    assert turns > 2000


async def test_a_slot_is_held_while_its_file_is_used() -> None:
    async with internet(response(CAT)) as net, AsyncExitStack() as stack:
        fetcher = fetcher_of(net, slots=1, max_waiting=1)
        source = ImageSource(url=URL, param="")
        await stack.enter_async_context(fetcher.file(source))
        second = asyncio.create_task(fetched(fetcher))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await fetched(fetcher)
        assert len(net.connected) == 1
        await stack.aclose()
        assert await second == CAT


async def test_the_slow_files_of_one_key_leave_a_slot_to_others() -> None:
    free = asyncio.Event()

    async def held(writer: asyncio.StreamWriter) -> None:
        await free.wait()
        writer.write(response(CAT))

    async def sent(net: Internet, fetcher: ImageFetcher, owner: str, connected: int) -> "asyncio.Task[bytes]":
        set_current_caller(Caller(owner))
        task = asyncio.create_task(fetched(fetcher))
        await until(lambda: len(net.connected) == connected)
        return task

    async with internet(held) as net:
        fetcher = fetcher_of(net, slots=2)
        tasks = [await sent(net, fetcher, "a", 1) for _ in range(5)]
        tasks.append(await sent(net, fetcher, "b", 2))
        free.set()
        assert await asyncio.gather(*tasks) == [CAT] * 6


@pytest.mark.parametrize(
    "host",
    [
        *("", "10.0.0.1", "[::1]", "http://a.org", "a.org/", "*.a.org", "a.org:", "a.org:0", "a.org:70000", "a_b..org"),
        *("a.org:8x", "user@a.org", "é.org", "a.1", "a.org.", "-a.org", "a" * 64 + ".org", "a.org:99999999999"),
    ],
)
def test_an_option_that_names_no_host_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="--allowed-media-host"):
        ServingConfig(allowed_media_host=(host,))


async def test_the_machine_s_own_names_lead_nowhere() -> None:
    assert "not public" in await refusal(ImageFetcher(read_media_hosts(["localhost"])), "http://localhost/a.png")


def test_a_frontend_has_an_http_client_with_the_option_only() -> None:
    code = (
        "import sys; from tercet.frontend.config.config import *; from tercet.frontend.wiring import Frontend\n"
        "for hosts in ((), ('a.org',)):\n"
        "    link, http = LinkConfig(insecure_loopback=True), HttpConfig(port=0)\n"
        "    made = Frontend(FrontendConfig(link=link, http=http, serving=ServingConfig(allowed_media_host=hosts)))\n"
        "    print(made._manager.images._fetcher is not None, 'httpcore2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["False False", "True True"]


def test_an_option_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_is_installed", lambda module: module != "httpcore2")
    with pytest.raises(ValueError, match=r"tercet-frontend\[media\]"):
        ServingConfig(allowed_media_host=("a.org",))
