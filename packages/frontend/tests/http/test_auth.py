"""Authentication, including empty keys, which admit no caller."""

import hmac
import sys
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from tercet.frontend import __main__
from tercet.frontend.cli import main as cli
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.http.auth import Keys

BAD = ["", " ", "two words", "tab\there", "line\n", "k\u00e9y", "nul\0"]


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("bad", BAD)
def test_no_key_is_empty_or_has_white_space(bad: str) -> None:
    reason = "must be printable ASCII" if bad else "is given and empty"
    with pytest.raises(ValueError, match=f"--api-key {reason}"):
        HttpConfig(api_key=("fine", bad))
    with pytest.raises(ValueError, match=f"--admin-key {reason}"):
        HttpConfig(admin_key=(bad,))
    for keys in ([[bad], []], [["fine"], [bad]]):
        with pytest.raises(ValueError, match=reason):
            Keys(*keys)


@pytest.mark.parametrize("variable", ["TERCET_API_KEYS", "TERCET_ADMIN_KEYS"])
@pytest.mark.parametrize("blank", ["", "  ", "\n"])
def test_neither_command_starts_open_because_a_variable_is_blank(
    variable: str, blank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, blank)
    monkeypatch.setattr(sys, "argv", ["tercet-frontend", "--port=0"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert cli.main(["serve", "--port=0"]) == 2
    said = capsys.readouterr().err
    assert said.count("is given and empty: give a key, or for a server without keys leave out the option") == 2
    assert said.count("\n") == 2


@pytest.mark.parametrize("option", ["api-key", "api_key", "admin-key"])
@pytest.mark.parametrize("value", ["[]", '""', '[""]', '["fine", ""]'])
def test_a_file_that_gives_a_key_option_and_no_key_starts_nothing(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tercet.toml"
    path.write_text(f"[frontend]\n{option} = {value}\n")
    assert cli.main(["serve", "--port=0", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert "empty: give a key, or " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_refused_where_it_would_mean_every_address(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tercet-frontend", "--port=0", f"--host={host}"])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert cli.main(["serve", "--port=0", f"--host={host}"]) == 2
    assert capsys.readouterr().err.count("--host is given and empty") == 2


@pytest.mark.parametrize("option", ["--api-key", "--admin-key"])
@pytest.mark.parametrize("bad", ["", "s3cret words"])
def test_neither_command_starts_with_a_bad_key_and_neither_shows_it(
    option: str, bad: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tercet-frontend", option, bad])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert cli.main(["serve", option, bad]) == 2
    said = capsys.readouterr().err
    reason = "must be printable ASCII without spaces\n" if bad else "is given and empty: "
    assert said.count(f"{option} {reason}") == 2
    assert said.count("\n") == 2
    assert "s3cret" not in said


def test_a_file_is_held_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("fine\ns3cr\u00e9t\n")
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        HttpConfig(api_key_file=tmp_path / "keys").api_keys()
    assert "s3cr" not in str(refused.value)


@pytest.mark.parametrize(
    "nothing",
    [Headers(), bearer(""), bearer(" "), Headers({"x-api-key": ""}), Headers({"authorization": "Basic boss"})],
)
def test_whoever_shows_nothing_is_nobody(nothing: Headers) -> None:
    assert Keys(["user"], ["boss"]).authenticate(nothing) is None
    caller = Keys([], ["boss"]).authenticate(nothing)
    assert caller is not None
    assert (caller.owner, caller.admin) == ("", False)


def test_an_admin_key_opens_more_than_an_api_key() -> None:
    keys = Keys(["user"], ["boss"])
    user, boss = keys.authenticate(bearer("user")), keys.authenticate(Headers({"x-api-key": "boss"}))
    assert user is not None
    assert boss is not None
    assert (user.admin, boss.admin) == (False, True)
    assert len({user.owner, boss.owner, ""}) == 3


def test_digests_are_compared_in_constant_time_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison uses `hmac.compare_digest` on digests of equal length, for all keys in every case."""
    keys = Keys(["first", "second", "third"], ["boss"])
    compared: list[tuple[bytes, bytes]] = []

    def never(shown: bytes, known: bytes) -> bool:
        compared.append((shown, known))
        return False

    with monkeypatch.context() as patch:
        patch.setattr(hmac, "compare_digest", never)
        assert keys.authenticate(bearer("first")) is None, "something else let the key in"
    assert len({known for _, known in compared}) == 4
    assert {len(each) for pair in compared for each in pair} == {32}
    compared.clear()

    def always(shown: bytes, known: bytes) -> bool:
        never(shown, known)
        return True

    monkeypatch.setattr(hmac, "compare_digest", always)
    assert keys.authenticate(bearer("wrong")) is not None
    assert len(compared) == 4, "it stopped at the first that fitted"
