"""`make bench-smoke`: `tandem bench run` as a user has it, with Azure's conversations against three services, and its report."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path

from bench.run_files import read_run
from checks.clients import still_held
from checks.cluster import Cluster, running_cluster
from checks.verdict import Check, quick
from cli.stack import StackOptions

_SPEED, _SCALE = 0.5, 0.1
"""Of Azure's times and lengths: about one request a second, with 70 tokens in and 14 out, leaves two cores room for a 135M model and the generator."""
_LIMITS = ("ttft:2000", "tpot:200")
_BEYOND_S = 120.0
"""Start, warm-up and drain."""
_OUTPUT = Path("out/bench-smoke")
_LABEL = "bench-smoke"
_LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms", "e2e_p50_ms")
_SHOWN = ("requests", "ok", *_LATENCIES, "output_tokens_per_s", "goodput_per_s", "lag_p99_ms", "cpu")


def _command(cluster: Cluster, model: Path, duration_s: float) -> list[str]:
    cores = [f"--cores={name}=1 thread, any core" for name in cluster.stack.addresses if name != "gateway"]
    load = ["--workload=azure-conv", f"--trace={_SPEED}", f"--scale={_SCALE}", f"--duration={duration_s:g}", "--num-warmups=3"]
    judged = ["--goodput", *_LIMITS]
    output = [f"--output={_OUTPUT}", f"--label={_LABEL}", f"--model-dir={model}", *cores, "--quiet"]
    return [str(Path(sys.executable).with_name("tandem")), "bench", "run", f"--target={cluster.stack.gateway_address}", *load, *judged, *output]


async def run(check: Check, model: Path) -> dict[str, str]:
    """What the command's last line says."""
    duration_s = 20.0 if quick() else 60.0
    worker = "--max-model-len=2048 --num-threads=1 --kv-cache-memory=300000000"
    options = StackOptions(model, prefill_args=worker, decode_args=worker)
    async with running_cluster(options, Path("out/bench-smoke.log")) as cluster:
        process = await asyncio.create_subprocess_exec(*_command(cluster, model, duration_s), stdout=asyncio.subprocess.PIPE)
        try:
            output, _ = await asyncio.wait_for(process.communicate(), duration_s + _BEYOND_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        held = await still_held(cluster)
    lines = output.decode().splitlines()
    print("\n".join(f"  {line}" for line in lines), flush=True)
    if not lines or process.returncode not in (0, 2):
        check.goal(False, f"tandem bench run ended with {process.returncode}")
        return {}
    if process.returncode == 2:
        check.void("; ".join(line for line in lines if line.startswith("void: ")))
    check.goal(not held, f"the generator is gone, and this is still held: {held}")
    return dict(pair.split("=", 1) for pair in lines[-1].split()[2:])


def judge_files(check: Check) -> int:
    """Rows that read back, and a page that needs nothing beside it; its size in KB."""
    done = read_run(_OUTPUT / f"{_LABEL}.json")
    counted = [record for record in done.records if not record.warm_up]
    missed = [f"{record.outcome.value}: {record.error}" for record in counted if record.outcome.value != "ok"]
    check.goal(not missed, f"{len(missed)} of {len(counted)} requests did not end well: {missed[:3]}")
    lengths = [(record.num_prompt_tokens, record.max_tokens) for record in counted]
    check.details["lengths"] = lengths
    check.goal(len(set(lengths)) > len(lengths) // 2, "the lengths are no trace's: most are the same")
    page = (_OUTPUT / f"{_LABEL}.html").read_text()
    check.goal(not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page), "the report loads something from elsewhere")
    check.goal(page.count("<svg") + page.count("data:image/") >= 4, "the report has fewer than 4 plots")
    return len(page) // 1000


def main() -> None:
    """Runs the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model directory")
    model = parser.parse_args().model
    check = Check("bench-smoke")
    check.begin(f"Azure's conversations, times and lengths x{_SCALE:g}, against three services over gRPC", seconds=90, quick_seconds=48)
    found = asyncio.run(run(check, model))
    size_kb = judge_files(check) if found else 0
    check.end({**{name: found[name] for name in _SHOWN if name in found}, "report_kb": size_kb})


if __name__ == "__main__":
    main()
