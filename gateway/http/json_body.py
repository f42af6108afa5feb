"""Bytes of an HTTP body as JSON, and its fields one by one: what nobody has taken in the end is refused by name, so nothing is ignored."""

from __future__ import annotations

import difflib
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gateway.http.json_parts import check_parts
from rpc.errors import StatusError, invalid_argument

_MAX_SHOWN_CHARS = 64
MAX_IDS = 1 << 20
"""Of a list: more than any vocabulary has."""
UINT32, UINT64 = (1 << 32) - 1, (1 << 64) - 1


def read_body(raw: bytes) -> Body:
    """Raises StatusError for what is no JSON object, says a name twice, has NaN or Infinity in it, or more parts than any request."""
    check_parts(raw)
    try:
        # Nesting is bounded by the interpreter: the scanner raises RecursionError.
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_int=_integer, parse_float=_fraction, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise invalid_argument("body", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise invalid_argument("body", f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid_argument("body", "must be a JSON object")
    return Body(found)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object says {shown(twice)} twice")
    return found


def _integer(digits: str) -> int:
    # Python, not the type itself: between two numbers other threads may run, and a body may be millions of them.
    return int(digits)


def _fraction(digits: str) -> float:
    return float(digits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def shown(value: object) -> str:
    """A value in an error's words, cut when it is long."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def shown_name(name: str) -> str:
    """A client's name in an error's words: one line that UTF-8 can say, never empty, cut when it is long."""
    name = name[:_MAX_SHOWN_CHARS]
    if not name:
        return '""'
    return name if name.isprintable() else json.dumps(name)[1:-1][:_MAX_SHOWN_CHARS]


class Body:
    """An object's fields. Each is taken once, null is the same as none; `end` refuses the rest. All raise StatusError that names the field in full."""

    def __init__(self, fields: dict[str, Any], prefix: str = "") -> None:
        self._fields = dict(fields)
        self._names = list(fields)
        self._prefix = prefix
        self._known: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def take(self, name: str) -> Any:
        """Whatever is there; None for null and for nothing."""
        self._known.append(name)
        return self._fields.pop(name, None)

    def wrong(self, name: str, description: str) -> StatusError:
        """The error for a field."""
        return invalid_argument(f"{self._prefix}{name}", description)

    def flag(self, name: str) -> bool | None:
        """true or false."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, is {shown(value)}")
        return value

    def integer(self, name: str, low: int = 0, high: int = UINT32) -> int | None:
        """A whole number in a range."""
        value = self.take(name)
        if value is None:
            return None
        return whole(value, f"{self._prefix}{name}", low, high)

    def number(self, name: str) -> float | None:
        """A number; its range is the core's to check."""
        value = self.take(name)
        if value is None:
            return None
        return real(value, f"{self._prefix}{name}")

    def text(self, name: str) -> str | None:
        """A string that UTF-8 can say."""
        value = self.take(name)
        return None if value is None else sound_text(value, f"{self._prefix}{name}")

    def texts(self, name: str) -> list[str]:
        """A string, or a list of strings."""
        value = self.take(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [sound_text(value, f"{self._prefix}{name}")]
        return [sound_text(each, f"{self._prefix}{name}[{index}]") for index, each in enumerate(self._list(name, value, "a string or a list of strings"))]

    def ids(self, name: str) -> list[int]:
        """A list of token ids."""
        value = self.take(name)
        return [] if value is None else token_ids(self._list(name, value, "a list of token ids"), f"{self._prefix}{name}")

    def child(self, name: str) -> Body | None:
        """An object."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be an object, is {shown(value)}")
        return Body(value, f"{self._prefix}{name}.")

    def items(self) -> Iterator[tuple[str, Any]]:
        """All fields of an object whose names are values themselves."""
        yield from self._fields.items()
        self._fields.clear()

    def only(self, name: str, *meaning_nothing: object) -> None:
        """A field that is not served: null and values that change nothing pass."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in meaning_nothing):
            raise self.wrong(name, "is not supported")

    def end(self) -> None:
        """Refuses what was not taken."""
        for name in self._fields:
            # Cut first: what is compared is taken apart into its letters, some hundred bytes for each.
            close = difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], [known for known in self._known if known not in self._names], 1)
            raise self.wrong(shown_name(name), "is no field of this request" + (f"; is {close[0]} meant?" if close else ""))

    def _list(self, name: str, value: object, wanted: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(name, f"must be {wanted}, is {shown(value)}")
        return value


def whole(value: object, field: str, low: int = 0, high: int = UINT32) -> int:
    """A whole number in a range; 3.0 is none, and neither is true."""
    if type(value) is not int:
        raise invalid_argument(field, f"must be a whole number, is {shown(value)}")
    if not low <= value <= high:
        raise invalid_argument(field, f"must be from {low} to {high}, is {shown(value)}")
    return value


def real(value: object, field: str) -> float:
    """A number that a float can say."""
    if type(value) is int or type(value) is float:
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise invalid_argument(field, f"must be a number, is {shown(value)}")


def sound_text(value: object, field: str) -> str:
    """A string without halves of characters, which JSON can say and UTF-8 cannot."""
    if not isinstance(value, str):
        raise invalid_argument(field, f"must be a string, is {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid_argument(field, f"has half a character (a lone surrogate) at {error.start}") from None
    return value


def token_ids(values: list[Any], field: str, most: int = MAX_IDS) -> list[int]:
    """Whole numbers that may be token ids. How many a field may have is the core's to say, unless a message of so many would be a stall in itself."""
    if len(values) > most:
        raise invalid_argument(field, f"must be at most {most} token ids, is {len(values)}")
    if all(type(each) is int and 0 <= each <= UINT32 for each in values):  # one look at each: there may be as many as the context is long
        return values
    return [whole(each, f"{field}[{index}]") for index, each in enumerate(values)]
