"""The closed table of what is wrong with a request before its fields are looked at: bytes on a connection, and the answer."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class BadHttp:
    """A row: what is sent, and the status and words that come back."""

    name: str
    sent: bytes
    code: int
    words: str

    def __str__(self) -> str:
        return self.name


def _post(body: bytes, *headers: bytes, path: bytes = b"/v1/completions", length: bytes | None = None) -> bytes:
    head = [b"POST %s HTTP/1.1" % path, b"Host: x", b"Content-Length: " + (b"%d" % len(body) if length is None else length), *headers]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _line(line: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((line, b"Host: x", *headers)) + b"\r\n\r\n"


_JSON = b"Content-Type: application/json"
_GOOD = b'{"model":"m","prompt":"hi"}'
_CHUNKED = _line(b"POST /v1/completions HTTP/1.1", b"Transfer-Encoding: chunked")

BAD_HTTP = (
    # No HTTP.
    BadHttp("no http at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "Invalid HTTP"),
    BadHttp("no host", b"GET /health HTTP/1.1\r\n\r\n", 400, "Invalid HTTP"),
    BadHttp("a header with a null byte", _line(b"GET /health HTTP/1.1", b"X: a\x00b"), 400, "Invalid HTTP"),
    BadHttp("a header without end", b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * (128 << 10), 400, "Invalid HTTP"),
    BadHttp("two lengths", _post(_GOOD, b"Content-Length: 3"), 400, "Invalid HTTP"),
    BadHttp("a length that is no number", _post(_GOOD, length=b"abc"), 400, "Invalid HTTP"),
    BadHttp("a negative length", _post(_GOOD, length=b"-1"), 400, "Invalid HTTP"),
    BadHttp("a chunk without a size", _CHUNKED + b"zz\r\n", 400, "Invalid HTTP"),
    BadHttp("an unknown transfer encoding", _line(b"POST /v1/completions HTTP/1.1", b"Transfer-Encoding: gzip"), 400, "Invalid HTTP"),
    BadHttp("http 2 by prior knowledge", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 404, "PRI * is not served"),
    # Nobody's path or method.
    BadHttp("an unknown path", _line(b"GET /v1/nothing HTTP/1.1"), 404, "GET /v1/nothing is not served"),
    BadHttp("a slash behind a path", _line(b"GET /v1/models/ HTTP/1.1"), 404, "GET /v1/models/ is not served"),
    BadHttp("another route's endpoint", _post(b"{}", _JSON, path=b"/v1/embeddings"), 404, "POST /v1/embeddings is not served"),
    BadHttp("get where there is post", _line(b"GET /v1/completions HTTP/1.1"), 405, "GET /v1/completions is not served; POST is"),
    BadHttp("post where there is get", _post(b"", path=b"/health"), 405, "POST /health is not served; GET, HEAD is"),
    BadHttp("an unknown method", _line(b"BREW /v1/completions HTTP/1.1"), 405, "BREW /v1/completions is not served; POST is"),
    BadHttp("a path in percent signs", _line(b"GET /%00%ff%2e%2e/etc HTTP/1.1"), 404, "is not served"),
    # A body that is not read.
    BadHttp("a length above the limit", _post(b"", length=b"%d" % (33 * _MIB)), 413, "larger than 65536 bytes"),
    BadHttp("a length of twenty digits", _post(b"", length=b"9" * 20), 413, "larger than 65536 bytes"),
    BadHttp("more than the limit in one chunk", _CHUNKED + b"20000\r\n" + b"a" * 0x20000, 413, "larger than 65536 bytes"),
    BadHttp("compressed", _post(_GOOD, b"Content-Encoding: gzip"), 415, "Content-Encoding 'gzip' is not supported"),
    BadHttp("a form", _post(b"a=b", b"Content-Type: application/x-www-form-urlencoded"), 400, "Content-Type must be application/json, is"),
    BadHttp("another charset", _post(_GOOD, b"Content-Type: application/json; charset=utf-16"), 400, "charset must be utf-8"),
    # A body that is no JSON object.
    BadHttp("no body", _post(b""), 400, "body: is no JSON"),
    BadHttp("half an object", _post(b'{"model":"m"', _JSON), 400, "body: is no JSON"),
    BadHttp("a list", _post(b"[]", _JSON), 400, "body: must be a JSON object"),
    BadHttp("not utf-8", _post(b'{"prompt":"\xff"}', _JSON), 400, "body: is not UTF-8"),
    BadHttp("an endless nesting", _post(b"[" * 60_000, _JSON), 400, "body: is no JSON"),
    BadHttp("a byte order mark", _post(b"\xef\xbb\xbf" + _GOOD, _JSON), 400, "body: is no JSON"),
    BadHttp("NaN", _post(b'{"model":"m","prompt":"hi","temperature":NaN}', _JSON), 400, "NaN is no number of JSON"),
    BadHttp(
        "an unknown field", _post(b'{"model":"m","prompt":"hi","max_token":1}', _JSON), 400, "max_token: is no field of this request; is max_tokens meant?"
    ),
    BadHttp("no prompt", _post(b'{"model":"m"}', _JSON), 400, "prompt: must be given"),
    BadHttp("no messages", _post(b'{"model":"m"}', _JSON, path=b"/v1/chat/completions"), 400, "messages: must be given"),
    BadHttp("tokenize without a prompt", _post(b'{"model":"m"}', _JSON, path=b"/tokenize"), 400, "prompt: must be given"),
    BadHttp("detokenize what is no token", _post(b'{"tokens":[4000000]}', _JSON, path=b"/detokenize"), 400, "tokens: must be below the vocabulary's size"),
)
