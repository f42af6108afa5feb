"""A Generate RPC of a decode worker, on its way."""

from __future__ import annotations

import asyncio

from tandem.v1 import decode_pb2
from tests.support.answer import Answer
from tests.support.cluster import Cluster


class Running:
    """Begins at once; `answer` has what has come so far."""

    def __init__(self, cluster: Cluster, request: decode_pb2.DecodeServiceGenerateRequest, timeout_s: float = 20.0) -> None:
        self.call = cluster.decode.stub.Generate(request, timeout=timeout_s)
        self.answer = Answer()
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> Answer:
        async for response in self.call:
            self.answer.take(response)
        return self.answer
