"""Translation of a command line of SGLang's launch_server to that of `tercet serve`."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from importlib import resources
from itertools import chain
from typing import NamedTuple

from tercet.frontend.cli.launch_server.aliases import ALIASES, GROUPS, IGNORED, INSTEAD, MODEL, Alias
from tercet.frontend.supervisor.options import ConfigError, FrontendOptions, SchedulerOptions, ServeOptions

_SAME = {
    f"--{option.name.replace('_', '-')}"
    for options in (ServeOptions, FrontendOptions, SchedulerOptions)
    for option in fields(options)
} | {"--config"}
"""Options of `tercet serve`. One that SGLang has, too, means the same, unless an alias says how its values differ."""


class ServerArg(NamedTuple):
    """Option of SGLang's server, a line of server_args.tsv."""

    group: str
    names: tuple[str, ...]
    takes: str
    """flag, value, values, or optional: none or one value."""
    default: str

    @property
    def alias(self) -> Alias | None:
        """Return the equal of `tercet serve`, if it has one."""
        for alias in ALIASES:
            if alias.name in self.names:
                return alias
        return next((Alias(name, name) for name in self.names if name in _SAME), None)

    @property
    def ours(self) -> str:
        """Return the name of the equal, empty without one."""
        return self.alias.ours if self.alias else ""

    @property
    def ignored(self) -> str:
        """Return the reason for which the option has no effect, empty if it has one or is refused."""
        return next((IGNORED[name] for name in self.names if name in IGNORED), "")

    @property
    def instead(self) -> str:
        """Return what to use instead of the option, if it is refused."""
        return next((INSTEAD[name] for name in self.names if name in INSTEAD), GROUPS[self.group])


@cache
def server_args() -> tuple[ServerArg, ...]:
    """Return the options of SGLang's server. `python -m tools.sglang_names` renews them."""
    text = resources.files(__package__).joinpath("server_args.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return tuple(ServerArg(group, tuple(names.split(",")), takes, default) for group, names, takes, default in rows)


class Translation(NamedTuple):
    """Command line of `tercet serve`, and a line about each option without effect."""

    arguments: list[str]
    notes: list[str]


class _Given(NamedTuple):
    """Option of a command line: the name as it was written, and its values."""

    arg: ServerArg
    name: str
    values: list[str]


def translate(tokens: Sequence[str]) -> Translation:
    """Translate a command line. Options that SGLang does not have stay as they are.

    Raises ConfigError, naming it, for an option of SGLang that has no equal here, unless its value is SGLang's default.
    """
    rest: list[str] = []
    given = list(_parse(tokens, rest))
    model = next((each.values for each in reversed(given) if each.arg.ours == MODEL), [])
    options: dict[str, list[str]] = {}
    fallbacks: dict[str, list[str]] = {}
    notes = []
    for arg, name, values in given:
        alias = arg.alias
        if alias is not None:
            options_or_fallbacks = fallbacks if alias.fallback else options
            options_or_fallbacks[alias.ours.partition("=")[0]] = _arguments(alias, values)
        elif _equal(values, arg.default):
            continue  # as if it were left out
        elif arg.ignored:
            notes.append(f"{name} has no effect: {arg.ignored}")
        elif not ("--tokenizer-path" in arg.names and values == model):
            raise ConfigError(f"{name} is an option of SGLang that Tercet does not have: {arg.instead}")
    positional = options.pop(MODEL, [])
    return Translation([*positional, *chain.from_iterable((fallbacks | options).values()), *rest], notes)


def _arguments(alias: Alias, values: list[str]) -> list[str]:
    """Return an option in our notation."""
    mapped = values if alias.value is None else [each for value in values if (each := alias.value(value)) is not None]
    if alias.ours == MODEL:
        return mapped
    return [f"{alias.ours}={value}" for value in mapped] if values else [alias.ours]


def _equal(values: list[str], default: str) -> bool:
    """Return whether the values are the default. Numbers may be written in several ways."""
    if len(values) != 1 or not default:
        return False
    try:
        return float(values[0]) == float(default)
    except ValueError:
        return values[0] == default


def _parse(tokens: Sequence[str], rest: list[str]) -> Iterator[_Given]:
    """Yield SGLang's options of a command line, and append all else to `rest`. Raises ConfigError."""
    left = deque(tokens)
    while left:
        token = left.popleft()
        name, equals, value = token.partition("=")
        arg = _find(name) if name.startswith("--") else None
        if arg is None:
            rest.append(token)
            continue
        if equals and arg.takes == "flag":
            raise ConfigError(f"{name} takes no value")
        values = [value] if equals else list(_following(arg.takes, left))
        if arg.takes == "value" and not values:
            raise ConfigError(f"{name} needs a value")
        yield _Given(arg, name, values)


def _following(takes: str, left: deque[str]) -> Iterator[str]:
    """Take the values that follow an option. One that begins with two hyphens is the next option."""
    most = {"flag": 0, "value": 1, "optional": 1}.get(takes, len(left))
    while most and left and not left[0].startswith("--"):
        most -= 1
        yield left.popleft()


def _find(name: str) -> ServerArg | None:
    """Return SGLang's option with this name. As in SGLang, a beginning is enough where only one option has it."""
    found = [arg for arg in server_args() if name in arg.names]
    if not found and name not in _SAME:
        found = [arg for arg in server_args() if any(each.startswith(name) for each in arg.names)]
    return found[0] if len(found) == 1 else None
