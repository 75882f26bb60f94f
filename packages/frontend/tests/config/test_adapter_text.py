import pytest

from tercet.frontend.config.validation import check_name, check_path, read_adapters


def test_options_name_adapters() -> None:
    assert read_adapters(["haiku=/a/b", "org/sonnet=org/repo=1"]) == {"haiku": "/a/b", "org/sonnet": "org/repo=1"}


@pytest.mark.parametrize(
    "given",
    [["haiku"], ["=/a"], ["haiku="], ["a=/1", "a=/2"], ["a\nb=/1"], [f"{'n' * 257}=/1"], ["a= \0"], ["a=\udc80"]],
)
def test_what_names_no_adapter_is_refused_by_option(given: list[str]) -> None:
    with pytest.raises(ValueError, match="--lora"):
        read_adapters(given)


def test_options_are_bounded_in_number() -> None:
    assert len(read_adapters(f"{number}=/a" for number in range(1024))) == 1024
    with pytest.raises(ValueError, match="1024"):
        read_adapters(f"{number}=/a" for number in range(1025))


@pytest.mark.parametrize("name", ["haiku", "ein Haiku", "俳句", "a/b:c", "n" * 256])
def test_names(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", " a", "a ", "a\x1b[31m", "a\u2028b", "a\u202eb", "a=b", "n" * 257])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        check_name(name)


def test_paths_are_bounded() -> None:
    check_path("p" * 4096)
    with pytest.raises(ValueError, match="4096"):
        check_path("p" * 4097)
