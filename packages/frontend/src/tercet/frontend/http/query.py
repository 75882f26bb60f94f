"""Query parameters of a URL. Each function raises BadRequestError for an invalid value."""

from starlette.requests import Request

from tercet.frontend.errors import BadRequestError


def flag(request: Request, name: str) -> bool:
    """Return a boolean parameter; the default is false."""
    value = request.query_params.get(name, "false")
    if value not in {"true", "false"}:
        raise BadRequestError(f"'{name}' is 'true' or 'false'.", param=name, code="invalid_value")
    return value == "true"


def number(request: Request, name: str, default: int, *, lowest: int, highest: int) -> int:
    """Return an integer parameter within bounds."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and lowest <= int(text) <= highest):
        raise BadRequestError(f"'{name}' is a number from {lowest} to {highest}.", param=name, code="invalid_value")
    return int(text)


def order(request: Request, default: str = "desc") -> str:
    """Return the order of a list: `asc` or `desc`."""
    value = request.query_params.get("order", default)
    if value not in {"asc", "desc"}:
        raise BadRequestError("'order' is 'asc' or 'desc'.", param="order", code="invalid_value")
    return value


def pairs(request: Request, name: str, most: int) -> dict[str, str]:
    """Return an object parameter, which is written `name[key]=value` for each of at most `most` keys."""
    found = {
        key[len(name) + 1 : -1]: value
        for key, value in request.query_params.multi_items()
        if key.startswith(f"{name}[") and key.endswith("]")
    }
    if len(found) > most:
        raise BadRequestError(f"'{name}' has at most {most} keys.", param=name, code="invalid_value")
    return found
