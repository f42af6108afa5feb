"""GatewayService: thin doors to the one course that all requests take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from gateway.admission import Admission
from gateway.course import Call, Write
from gateway.generation import Generations
from gateway.pools import Pools
from gateway.served_model import ServedModel
from gateway.status import gateway_status
from gateway.whole_answer import WholeAnswer
from rpc.deadline import remaining_s
from rpc.errors import invalid_argument
from tandem.v1 import gateway_pb2, gateway_pb2_grpc

_TENANT = "default"
"""The tenant of requests without a credential."""

Context = grpc.aio.ServicerContext[Any, Any]


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """The gRPC door. Raises StatusError, which the server's interceptor sends."""

    def __init__(
        self,
        model: ServedModel,
        generations: Generations,
        pools: Pools,
        admission: Admission,
        *,
        max_request_time_s: float,
        draining: Callable[[], bool],
    ) -> None:
        self._model = model
        self._generations = generations
        self._pools = pools
        self._admission = admission
        self._max_request_time_s = max_request_time_s
        self._draining = draining

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Context) -> None:
        """Streams a completion."""
        await self._run(request, context, context.write)

    async def GenerateUnary(self, request: gateway_pb2.GenerateUnaryRequest, context: Context) -> gateway_pb2.GenerateUnaryResponse:
        """Returns a completion whole."""
        if not request.HasField("request"):
            raise invalid_argument("request", "must be set")
        whole = WholeAnswer()
        await self._run(request.request, context, whole.add)
        return whole.response()

    async def _run(self, request: gateway_pb2.GenerateRequest, context: Context, write: Write) -> None:
        call = Call(_TENANT, remaining_s(context, self._max_request_time_s), {}, write)
        try:
            await self._generations.run(request, call)
        finally:
            context.set_trailing_metadata(tuple(call.trailers.items()))

    async def ListModels(self, request: gateway_pb2.ListModelsRequest, context: Context) -> gateway_pb2.ListModelsResponse:
        """Lists the one model."""
        model = gateway_pb2.Model(
            id=self._model.name,
            max_model_len=self._pools.max_model_len(),
            vocab_size=self._model.vocab_size,
            eos_token_ids=sorted(self._model.eos_token_ids),
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: Context) -> gateway_pb2.GetStatusResponse:
        """Tells of this gateway and both pools."""
        return gateway_status(self._pools, self._admission, draining=self._draining())
