from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.byte_run import MAX_HELD_BYTES
from gateway.detokenizer import Detokenizer
from gateway.served_model import ServedModel
from tests.gateway.conftest import FAMILIES, id_of

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_CHARS = [chr(256 + _HIDDEN.index(byte)) if byte in _HIDDEN else chr(byte) for byte in range(256)]
"""How byte-level vocabularies write each byte."""
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(model: ServedModel, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(model.tokenizer.vocabulary, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@SETTINGS
@given(family=st.sampled_from(FAMILIES), text=st.text(max_size=40), skip=st.booleans())
def test_pieces_of_any_text_join_to_its_decoding(family: str, text: str, skip: bool, models: dict[str, ServedModel]) -> None:
    backend = models[family].tokenizer.backend
    ids = backend.encode(text, add_special_tokens=True).ids
    pieces = stream(models[family], ids, skip_special_tokens=skip)
    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=skip)


@SETTINGS
@given(family=st.sampled_from(["smollm2", "qwen3", "llama3"]), ids=st.lists(st.integers(0, 419), max_size=40), skip=st.booleans())
def test_pieces_of_any_byte_level_tokens_join_to_their_decoding(family: str, ids: list[int], skip: bool, models: dict[str, ServedModel]) -> None:
    assert "".join(stream(models[family], ids, skip_special_tokens=skip)) == models[family].tokenizer.backend.decode(ids, skip_special_tokens=skip)


@SETTINGS
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_fallback_tokens_join_to_their_decoding(data: st.DataObject, skip: bool, models: dict[str, ServedModel]) -> None:
    backend = models["llama2"].tokenizer.backend
    a_byte, any_token = st.integers(3, 258), st.integers(0, backend.get_vocab_size() - 1)
    ids = data.draw(st.lists(st.one_of(a_byte, any_token), max_size=30))
    assert "".join(stream(models["llama2"], ids, skip_special_tokens=skip)) == backend.decode(ids, skip_special_tokens=skip)


@SETTINGS
@given(data=st.data())
def test_pieces_of_long_runs_of_broken_bytes_join_to_their_decoding(data: st.DataObject, models: dict[str, ServedModel]) -> None:
    for family in ("smollm2", "llama2"):
        backend = models[family].tokenizer.backend
        spelt = [id_of(backend, f"<0x{byte:02X}>") for byte in range(256)] if family == "llama2" else [id_of(backend, char) for char in BYTE_CHARS]
        high = data.draw(st.lists(st.one_of(st.integers(128, 255), st.sampled_from([0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x8E, 0x89])), max_size=120))
        ids = [spelt[byte] for byte in high]
        assert "".join(stream(models[family], ids)) == backend.decode(ids)


def test_a_run_of_bytes_that_breaks_is_no_character_from_its_start(models: dict[str, ServedModel]) -> None:
    backend = models["llama2"].tokenizer.backend
    spelt = [id_of(backend, f"<0x{byte:02X}>") for byte in (*"é中".encode(), 0xFF)]
    word = backend.encode("the").ids[-1]
    for ids in (spelt, [*spelt, word], [*spelt[:-1], word], [word, *spelt[:-2]], [*spelt[:1], word], [*spelt, *spelt]):
        assert "".join(stream(models["llama2"], ids)) == backend.decode(ids)
    assert backend.decode(spelt) == "\ufffd" * 6


def test_a_run_of_bytes_without_end_streams_all_the_same(models: dict[str, ServedModel]) -> None:
    backend = models["llama2"].tokenizer.backend
    ids = [id_of(backend, f"<0x{byte:02X}>") for byte in "中é🎉 ".encode() * 200]
    pieces = stream(models["llama2"], ids)
    assert "".join(pieces) == backend.decode(ids)
    assert len([piece for piece in pieces if piece]) >= len(ids) // (MAX_HELD_BYTES + 4)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_skipped_special_token_does_not_part_a_character(models: dict[str, ServedModel]) -> None:
    for family, first, second in (("llama2", "<0xC3>", "<0xA9>"), ("smollm2", "Ã", "©")):
        backend = models[family].tokenizer.backend
        special = next(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
        ids = [id_of(backend, first), special, id_of(backend, second)]
        for skip, text in ((True, "é"), (False, None)):
            assert "".join(stream(models[family], ids, skip_special_tokens=skip)) == (text or backend.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_piece_holds_half_a_character(family: str, models: dict[str, ServedModel]) -> None:
    ids = models[family].tokenizer.backend.encode("a🎉b東京𝔘 é", add_special_tokens=False).ids
    assert len(ids) > 8
    assert not any("\ufffd" in piece for piece in stream(models[family], ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unfinished_character_comes_out_at_the_end_as_replacement(family: str, models: dict[str, ServedModel]) -> None:
    backend = models[family].tokenizer.backend
    ids = backend.encode("ok 𝔘", add_special_tokens=False).ids[:-1]
    pieces = stream(models[family], ids)
    assert "".join(pieces) == backend.decode(ids)
    assert pieces[-1].strip("\ufffd") == "" != pieces[-1]
    assert "\ufffd" not in "".join(pieces[:-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_held_back_is_bounded(family: str, models: dict[str, ServedModel]) -> None:
    backend = models[family].tokenizer.backend
    broken = id_of(backend, "<0xFF>") if family == "llama2" else id_of(backend, "ÿ")
    detokenizer = Detokenizer(models[family].tokenizer.vocabulary, skip_special_tokens=True)
    assert sum(bool(detokenizer.push(broken)) for _ in range(200)) >= 10
    detokenizer = Detokenizer(models[family].tokenizer.vocabulary, skip_special_tokens=True)
    skipped = next(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
    assert not any(detokenizer.push(skipped) for _ in range(500))
    assert len(detokenizer._window) < 200


def test_special_tokens_can_be_shown(models: dict[str, ServedModel]) -> None:
    backend = models["qwen3"].tokenizer.backend
    ids = [*backend.encode("hi").ids, id_of(backend, "<|im_end|>")]
    assert "".join(stream(models["qwen3"], ids, skip_special_tokens=False)) == "hi<|im_end|>"
    assert "".join(stream(models["qwen3"], ids)) == "hi"
