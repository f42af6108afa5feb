"""The demo over scripted services: what it prints, writes and returns."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cli.demo import DemoOptions, demo
from cli.errors import UserError
from cli.stack import StackOptions

pytestmark = pytest.mark.usefixtures("scripted_stack")


async def _demo(model: Path, output: Path, *, gateway_args: str = "", terminal: bool = False) -> tuple[int, str]:
    out = io.StringIO()
    console = Console(file=out, width=120, height=40, force_terminal=terminal, color_system=None)
    code = await demo(DemoOptions(StackOptions(model, gateway_args=gateway_args), "demo", True, output), console)
    return code, out.getvalue()


async def test_demo_ends_in_an_ok_line_and_writes_the_same_to_a_file(empty_model: Path, tmp_path: Path) -> None:
    code, out = await _demo(empty_model, tmp_path / "out")
    last = out.splitlines()[-1]
    assert code == 0, out
    assert last.startswith("OK demo requests=4 failed=0 handed_over=4 prompt_tokens=120 output_tokens=24 ")
    assert last.endswith("kv_bytes=5898240 transport=inline")
    written = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert all(f"{key}={written[key]}" in last for key in ("output_tokens", "ttft_p50_ms", "itl_p99_ms", "tokens_per_s"))


async def test_demo_shows_one_trace_over_three_services(empty_model: Path, tmp_path: Path) -> None:
    _, out = await _demo(empty_model, tmp_path / "out")
    assert "■ gateway  ■ decode  ■ prefill" in out
    assert "Prefill/Prefill" in out


async def test_demo_on_a_terminal_shows_each_answer_in_a_panel(empty_model: Path, tmp_path: Path) -> None:
    _, out = await _demo(empty_model, tmp_path / "out", terminal=True)
    assert out.count("done, 6 tokens") >= 4


async def test_failed_prompt_is_short_and_exits_1(empty_model: Path, tmp_path: Path) -> None:
    code, out = await _demo(empty_model, tmp_path / "out", gateway_args="--script refuse")
    assert code == 1
    assert out.splitlines()[-1].startswith("SHORT demo requests=4 failed=4 ")
    assert "RESOURCE_EXHAUSTED QUEUE_FULL" in out


async def test_services_that_do_not_start_are_told_with_their_last_words(empty_model: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    options = DemoOptions(StackOptions(empty_model, gateway_args="--script die"), "demo", True, tmp_path / "out")
    with pytest.raises(UserError, match="gateway exited with code 3 before it was ready"):
        await demo(options, Console(file=out, width=120))
    assert "scripted gateway has process id" in out.getvalue()
