"""Server-sent events, as far as streams of completions use them."""

from __future__ import annotations

from collections.abc import Iterator

_MAX_EVENT_BYTES = 16 << 20
"""A server that never ends an event must not take all memory."""


class SseError(Exception):
    """The stream is not what it should be; the text says why."""


class SseParser:
    """Bytes in, in whatever pieces they come; the data of whole events out. Lines end in LF or CR LF; comments and other fields than data are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data of each event that this piece completes, its lines joined by LF. Consume it whole. Raises SseError."""
        *lines, self._rest = (self._rest + piece if self._rest else piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield b"\n".join(self._data)
                    self._data.clear()
                    self._size = 0
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
                self._size += len(line)
        if self._size + len(self._rest) > _MAX_EVENT_BYTES:
            raise SseError(f"an event is larger than {_MAX_EVENT_BYTES >> 20} MiB")

    @property
    def is_between_events(self) -> bool:
        """False: what came last is the beginning of an event."""
        return not self._data and not self._rest
