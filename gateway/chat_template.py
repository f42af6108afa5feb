"""A model's own chat template, rendered in a sandbox.

The template comes from the model directory and never from a request: whoever writes it can be trusted with time, so that bounds are on single operations
(rendered text, ranges, repetition, padding), not on everything that many of them could add up to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MAX_RENDERED_CHARS = 64 * 1024 * 1024
"""Longest rendered conversation; far above the longest message that the server accepts."""
MAX_RANGE_ITEMS = 1_000_000
"""Items of all ranges of one rendering together."""
_MAX_PRODUCT = 1_000_000
"""Longest result of a repetition such as `"-" * 40`."""

_PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs")
_WIDE = re.compile(r"\d{5}|\*|\{[^}]*\{")
"""A width of five digits, or one that is a value."""


class ChatTemplateError(Exception):
    """The template refused the conversation, or broke its bounds; the text is for the client. `index` is that of the message at fault, where it is one."""

    def __init__(self, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainDict:
    """`dict(...)` for templates without the type's own attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(jinja2.utils.Namespace):
    """A namespace that keeps no underscore attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # the same trick as jinja's own, so that namespace(self=...) works
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _PlainNamespace._check(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


_range_budget: ContextVar[int] = ContextVar("range_budget", default=MAX_RANGE_ITEMS)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Transformers' environment, with bounds on what one operation can make."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and (abs(left) > 1_000_000 or abs(right) > 64):
            raise ChatTemplateError("the chat template makes a number that is too large")
        if operator == "*" and _product_length(left, right) > _MAX_PRODUCT:
            raise ChatTemplateError("the chat template makes a value that is too long")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDING and any(isinstance(width, int) and width > _MAX_PRODUCT for width in args):
                raise ChatTemplateError("the chat template makes a value that is too long")
            if name in ("format", "format_map"):
                _check_widths(owner)
        return super().call(context, function, *args, **kwargs)


def _check_widths(pattern: str) -> None:
    if _WIDE.search(pattern):
        raise ChatTemplateError("the chat template formats with a width that is too large")


def _product_length(left: Any, right: Any) -> int:
    """Length of `left * right` when one is a sequence, 0 for numbers."""
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(times, int):
            return len(sequence) * max(times, 0)
    return 0


def _bounded_range(*args: int) -> range:
    made = range(*args)
    left = _range_budget.get() - len(made)
    if left < 0:
        raise ChatTemplateError("the chat template loops too often")
    _range_budget.set(left)
    return made


@contextmanager
def _fresh_range_budget() -> Iterator[None]:
    token = _range_budget.set(MAX_RANGE_ITEMS)
    try:
        yield
    finally:
        _range_budget.reset(token)


def _raise_exception(message: object) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    for name in ("center", "format", "indent"):
        del environment.filters[name]  # they pad without a bound, and no chat template needs them
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, range=_bounded_range, dict=_PlainDict(), namespace=_PlainNamespace)
    return environment


class ChatTemplate:
    """One compiled template. Rendering is a pure function but for `strftime_now`, and safe in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, *, max_rendered_chars: int = MAX_RENDERED_CHARS) -> None:
        """`special_tokens` are what templates may name, such as bos_token. Raises ChatTemplateError when `source` does not compile."""
        try:
            self._template = _environment().from_string(source)
            tree = _environment().parse(source)
        except jinja2.exceptions.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        texts = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
        texts |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        self.literal_text = "\0".join(sorted(texts))
        """What the template itself writes, its strings joined by NUL."""
        self._special_tokens = dict(special_tokens or {})
        self._max_rendered_chars = max_rendered_chars

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders a conversation up to the assistant's turn. Raises ChatTemplateError with the template's own words when it refuses."""
        pieces: list[str] = []
        num_chars = 0
        with _fresh_range_budget():
            try:
                variables = {**self._special_tokens, "messages": [dict(message) for message in messages], "tools": None, "documents": None}
                for piece in self._template.generate(**variables, add_generation_prompt=True):
                    num_chars += len(piece)
                    if num_chars > self._max_rendered_chars:
                        raise ChatTemplateError(f"the rendered conversation is longer than {self._max_rendered_chars} characters")
                    pieces.append(piece)
            except jinja2.exceptions.TemplateError as error:
                raise ChatTemplateError(f"the chat template refuses the conversation: {error}") from error
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
                raise ChatTemplateError(f"the chat template fails on the conversation: {type(error).__name__}") from error
        return "".join(pieces)


def read_chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Source of the template: `chat_template.jinja`, else `chat_template` of tokenizer_config.json (of a named list, the one named default)."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None
