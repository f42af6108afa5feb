"""`python -m gateway`."""

from __future__ import annotations

from gateway.gateway import Gateway
from gateway.served_model import ModelDirectoryError, ServedModel
from gateway.settings import GatewaySettings
from rpc.errors import StartupError
from rpc.server import RpcServer
from rpc.service import ExitCode, Service, run_service
from rpc.settings import load_settings
from telemetry.metrics import RpcMetrics


async def serve(service: Service) -> None:
    """Runs the gateway until it is asked to stop."""
    settings = service.settings
    assert isinstance(settings, GatewaySettings)
    try:
        model = ServedModel.load(settings.model, name=settings.served_model_name, max_model_len=settings.max_model_len, num_threads=settings.tokenizer_threads)
    except ModelDirectoryError as error:
        raise StartupError(f"--model: {error}") from None
    server = RpcServer("gateway", host=settings.host, port=settings.port, reflection=settings.reflection, metrics=RpcMetrics())
    gateway = Gateway(
        model,
        settings.peers(),
        server,
        request_limits=settings.request_limits(),
        admission_limits=settings.admission_limits(),
        max_request_time_s=settings.max_request_time_s,
    )
    await gateway.start()
    service.started()
    await service.wait_for_stop()
    await gateway.stop(settings.drain_grace_s)


def main() -> ExitCode:
    """Reads settings and serves; returns the process's exit code."""
    return run_service(serve, load_settings(GatewaySettings, prog="gateway"), "gateway")


if __name__ == "__main__":
    raise SystemExit(main())
