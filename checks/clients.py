"""`make check-clients`: the field's own clients, unchanged, against three services. Each in an environment of its own, which is installed first."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checks.clients_environment import InstallError, build_wheel, install_wheel
from checks.clients_known import ENVIRONMENTS, KNOWN, TANDEM, Known, Served
from checks.cluster import Cluster, num_held, running_cluster
from checks.verdict import Check, quick
from cli.stack import StackOptions
from tandem.v1 import gateway_pb2

_CLIENT_S = 180.0
_GIVEN_BACK_S, _ASK_S, _ASK_EVERY_S = 5.0, 10.0, 0.02
_LINES, _WIDTH = 40, 150
_OUTPUT = Path("out/check-clients").absolute()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one client."""

    name: str
    version: str
    seconds: float
    passed: tuple[str, ...]
    failure: str
    """Its own words; empty: it was served."""

    def row(self) -> str:
        """Of the table."""
        what = "; ".join(self.passed) if not self.failure else "FAILED"
        head = f"  {self.name:<23} {self.version:<9} {self.seconds:>5.1f} s  "
        return textwrap.fill(what, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))


def _variables(known: Known) -> dict[str, str]:
    """Of the caller's, nothing that would lead the client to Tandem's code or to a server that it was not told."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "OPENAI_", "TANDEM_", "VIRTUAL_ENV"))}
    return {**kept, "PATH": f"{known.environment.path}/bin:{kept.get('PATH', '')}", **known.variables}


async def run_client(known: Known, served: Served) -> Result:
    """To its end, or to the end of its time."""
    folder = _OUTPUT / known.name.replace(",", "").replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, began_s = folder / "output.log", time.monotonic()
    name, *arguments = known.command(served)
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            str(known.environment.path / "bin" / name), *arguments, cwd=folder, env=_variables(known), stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = await asyncio.wait_for(process.wait(), _CLIENT_S)
        except TimeoutError:
            code = None
        finally:
            _end(process)
            await process.wait()
    seconds, output = time.monotonic() - began_s, log.read_text(errors="replace")
    failure, passed = ("" if code == 0 else f"not done after {_CLIENT_S:g} s" if code is None else f"it ended with {code}"), []
    if not failure:
        try:
            passed = known.judge(folder, output)
        except (AssertionError, KeyError, OSError, ValueError, StopIteration) as error:
            failure = f"{type(error).__name__}: {error}"
    if failure:
        failure += "\n" + "\n".join(f"    | {line}" for line in output.splitlines()[-_LINES:])
    return Result(known.name, await _version(known), seconds, tuple(passed), failure)


def _end(process: asyncio.subprocess.Process) -> None:
    """With the processes that it has started: the session is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _version(known: Known) -> str:
    ask = f"from importlib.metadata import version; print(version({known.environment.distribution!r}))"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(str(known.environment.python), "-c", ask, stdout=pipe, cwd="/", env=_variables(known))
    found, _ = await asyncio.wait_for(process.communicate(), _CLIENT_S)
    return found.decode().strip()


async def still_held(cluster: Cluster) -> Mapping[str, int]:
    """What the client has left behind, after a time in which it should have gone; empty: nothing."""
    end_s = time.monotonic() + _GIVEN_BACK_S
    while True:
        status = await cluster.gateway.GetStatus(gateway_pb2.GetStatusRequest(), timeout=_ASK_S)
        held = {"requests": status.num_requests_running + status.num_requests_waiting}
        held |= {name: num_held(report) for name, report in (await cluster.memory()).items()}
        if not any(held.values()) or time.monotonic() > end_s:
            return {name: count for name, count in held.items() if count}
        await asyncio.sleep(_ASK_EVERY_S)


def _batches() -> list[list[Known]]:
    """One client at a time; in QUICK the load tools, which take seconds to be imported, side by side."""
    if not quick():
        return [[known] for known in KNOWN]
    tools = [known for known in KNOWN if known.is_tool and known.in_quick]
    return [[known] for known in KNOWN if not known.is_tool] + [tools]


async def run(check: Check, model: Path) -> list[Result]:
    """All of them."""
    worker = "--max-model-len=2048 --num-threads=1 --kv-cache-memory=300000000"
    few = "--max-active-requests=8 --max-queue-requests=8"
    options = StackOptions(model, http_port=0, prefill_args=worker, decode_args=worker, gateway_args=few)
    results: list[Result] = []
    async with running_cluster(options, Path("out/check-clients.log")) as cluster:
        url = cluster.stack.http_url
        assert url is not None
        served = Served(cluster.stack.gateway_address, url.removesuffix("/v1"), model.name, model)
        for batch in _batches():
            found = await asyncio.gather(*(run_client(known, served) for known in batch))
            held = await still_held(cluster)
            for result in found:
                print(result.row(), flush=True)
                check.goal(not result.failure, f"{result.name}: {result.failure}")
            check.goal(not held, f"{', '.join(known.name for known in batch)} left, and this is still held: {held}")
            results += found
    return results


def install(check: Check) -> None:
    """What is not there yet."""
    missing = [environment for environment in ENVIRONMENTS if not environment.is_there]
    if missing:
        gigabytes = sum(environment.megabytes for environment in missing) / 1000
        print(f"  installs {', '.join(environment.name for environment in missing)}: {gigabytes:.1f} GB in .venv-clients, 1 to 10 minutes", flush=True)
    try:
        for environment in missing:
            environment.install()
        install_wheel(TANDEM, build_wheel(_OUTPUT / "wheel"))
    except InstallError as error:
        check.void(f"a client could not be installed: {error}")


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model.absolute()
    check = Check("check-clients")
    check.begin("real clients, each in its own environment, against three services over HTTP and gRPC", seconds=130, quick_seconds=48)
    install(check)
    results = asyncio.run(run(check, model))
    check.details["clients"] = [
        {"name": each.name, "version": each.version, "seconds": each.seconds, "passed": each.passed, "failure": each.failure} for each in results
    ]
    served = [each for each in results if not each.failure]
    check.end({"clients": len(results), "served": len(served), "uses": sum(len(each.passed) for each in served)})


if __name__ == "__main__":
    main()
