"""`python -m gateway`."""

from __future__ import annotations

import logging

from gateway.gateway import Gateway
from gateway.sampling_checks import check_sampling
from gateway.served_model import ModelDirectoryError, ServedModel
from gateway.settings import GatewaySettings
from rpc.errors import StartupError, StatusError
from rpc.server import RpcServer
from rpc.service import ExitCode, Service, run_service
from rpc.settings import load_settings
from telemetry.metrics import RpcMetrics

_LOG = logging.getLogger(__name__)


async def serve(service: Service) -> None:
    """Runs the gateway until it is asked to stop."""
    settings = service.settings
    assert isinstance(settings, GatewaySettings)
    model = load_model(settings)
    server = RpcServer("gateway", host=settings.host, port=settings.port, reflection=settings.reflection, metrics=RpcMetrics())
    gateway = Gateway(
        model,
        settings.peers(),
        server,
        request_limits=settings.request_limits(),
        admission_limits=settings.admission_limits(),
        max_request_time_s=settings.max_request_time_s,
    )
    if settings.http_port >= 0:
        add_http_door(gateway, settings)
    await gateway.start()
    service.started()
    await service.wait_for_stop()
    await gateway.stop(settings.drain_grace_s)


def add_http_door(gateway: Gateway, settings: GatewaySettings) -> None:
    """Only here is anything of HTTP imported. Raises StartupError without the extra."""
    try:
        from gateway.http.connection import ConnectionLimits
        from gateway.http.door import http_door
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("starlette", "uvicorn", "h11"):
            raise
        raise StartupError(f"--http-port: {missing} is not installed; the HTTP door needs the extra http: pip install 'tandem-serve[http]'") from None
    connections = ConnectionLimits(max_connections=settings.http_max_connections)
    gateway.add_door(http_door(gateway, host=settings.http_host or settings.host, port=settings.http_port, connections=connections))


def load_model(settings: GatewaySettings) -> ServedModel:
    """Reads the model directory and says which sampling defaults it brings along. Raises StartupError."""
    try:
        model = ServedModel.load(
            settings.model,
            name=settings.served_model_name,
            max_model_len=settings.max_model_len,
            num_threads=settings.tokenizer_threads,
            generation_config=settings.generation_config,
        )
        check_sampling(model.defaults.as_params(), model, settings.request_limits())
    except ModelDirectoryError as error:
        raise StartupError(f"--model: {error}") from None
    except StatusError as error:
        text = f"{error.message.removeprefix('sampling_params.')}; --generation-config none leaves the file's defaults out"
        raise StartupError(f"--model: {settings.model / 'generation_config.json'}: {text}") from None
    _LOG.info("defaults of the model: %s", model.defaults)
    return model


def main() -> ExitCode:
    """Reads settings and serves; returns the process's exit code."""
    return run_service(serve, load_settings(GatewaySettings, prog="gateway"), "gateway")


if __name__ == "__main__":
    raise SystemExit(main())
