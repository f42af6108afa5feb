"""Traces are read in their own formats, and what is no trace is refused with file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.trace_files import READERS, Row, TraceFileError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.9799600,374,44\n2023-11-17 00:00:00.0319600,396,109\n"
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 6001, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
)
ARXIV = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n"
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,1,2,ChatGPT,472,18,490,Conversation log\n45,1,2,GPT-4,0,0,0,API log\n60.5,1,2,GPT-4,10,20,30,API log\n"
)


def _write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_has_times_to_a_ten_millionth_of_a_second_and_across_midnight(tmp_path: Path) -> None:
    assert READERS["azure"](_write(tmp_path, AZURE)).rows == (Row(374, 44, 0.0), Row(396, 109, 0.052))
    fine = AZURE.replace("9799600", "9799601")
    assert READERS["azure"](_write(tmp_path, fine)).rows[1].at_s == 0.0519999
    whole = AZURE.replace("59.9799600", "58").replace("00.0319600", "00.5")
    assert READERS["azure"](_write(tmp_path, whole)).rows[1].at_s == 2.5


def test_mooncake_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    assert READERS["mooncake"](_write(tmp_path, MOONCAKE)).rows == (Row(600, 5, 0.0, (0, 7)), Row(512, 6, 3.001, (0,)))


def test_arxiv_has_no_times(tmp_path: Path) -> None:
    assert READERS["arxiv"](_write(tmp_path, ARXIV)).rows == (Row(3772, 54),)


def test_burstgpt_is_read_by_column_name_and_failed_requests_are_counted(tmp_path: Path) -> None:
    trace = READERS["burstgpt"](_write(tmp_path, BURSTGPT))
    assert trace.rows == (Row(472, 18, 0.0), Row(10, 20, 55.5))
    assert trace.num_left_out == 1


BAD = {
    "no such file": ("azure", None, "No such file"),
    "empty": ("azure", "", ":1: has no column TIMESTAMP"),
    "no rows": ("azure", AZURE.splitlines()[0], "has no requests"),
    "another trace": ("azure", ARXIV, ":1: has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
    "no time": ("azure", AZURE.replace("23:59:59", "25:59:59"), ":2: TIMESTAMP: '2023-11-16 25:59:59.9799600' is no time"),
    "no fraction": ("azure", AZURE.replace("59.9799600", "59.97x"), ":2: TIMESTAMP: "),
    "going back": ("azure", AZURE.replace("2023-11-17", "2023-11-15"), ":3: TIMESTAMP: is earlier than in the row before it"),
    "going back behind a failed request": ("burstgpt", BURSTGPT.replace("60.5,", "4,"), ":4: Timestamp: is earlier"),
    "too fine": ("azure", AZURE.replace("9799600", "97996001"), ":2: TIMESTAMP: "),
    "a number without an end": ("burstgpt", BURSTGPT.replace("60.5,", "1e999,"), ":4: Timestamp: '1e999' is no time"),
    "no number": ("azure", AZURE.replace("109", "1e2"), ":3: GeneratedTokens: "),
    "no tokens": ("azure", AZURE.replace("396", "0"), ":3: ContextTokens: must be above 0"),
    "too many tokens": ("azure", AZURE.replace("396", "396000000000"), ":3: ContextTokens: '396000000000' is no number of tokens"),
    "a short row": ("azure", AZURE.replace(",396,109", ",396"), ":3: has fewer columns"),
    "no JSON": ("mooncake", MOONCAKE.replace("[0, 7]", "[0, 7"), ":1: no JSON"),
    "no object": ("mooncake", "[1, 2]\n", ":1: has no timestamp"),
    "too few blocks": ("mooncake", MOONCAKE.replace("[0, 7]", "[0]"), ":1: hash_ids has 1 ids for 600 tokens"),
    "no ids": ("mooncake", MOONCAKE.replace("[0]", "[-1]"), ":2: hash_ids must be a list of whole numbers"),
    "a number that is none": ("mooncake", MOONCAKE.replace("3000", "NaN"), ":1: timestamp: nan is no time"),
    "a length that is true": ("mooncake", MOONCAKE.replace("512", "true"), ":2: input_length: True is no number of tokens"),
    "no text": ("mooncake", "\udcff", "no JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_refused_by_its_place(name: str, tmp_path: Path) -> None:
    form, text, expected = BAD[name]
    path = tmp_path / "trace"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceFileError) as refused:
        READERS[form](path)
    assert str(refused.value).startswith(str(path))
    if name != "no text":
        assert expected in str(refused.value)
