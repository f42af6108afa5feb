"""Text in any script through the demo's own tokenizer, and through one that spells rare characters in bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.cache_dir import models_dir
from gateway.completion import Completion
from gateway.detokenizer import Detokenizer
from gateway.served_model import ServedModel
from gateway.validation import check_request
from tandem.v1 import decode_pb2, generation_pb2
from tests.gateway.house import ask
from tests.gateway.test_validation import LIMITS, resolved

_SMOLLM2 = models_dir() / "smollm2-135m-instruct"
SCRIPTS = {
    "hangul": "안녕하세요, 반갑습니다",
    "hangul in parts": "안녕",
    "devanagari": "नमस्ते दुनिया, क्षत्रिय",
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "thai": "สวัสดีชาวโลก น้ำ",
    "joined emoji": "👨‍👩‍👧‍👦 and 🏳️‍🌈 and 👍🏽 and 🇰🇷",
    "combining marks": "é ñ Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "ancient": "𐎠𐎡𐎢 𓀀𓀁𓀂 𝔘𝔫𝔦",
    "mixed": "東京 is Tokyo, Москва is Moscow, Αθήνα is Athens: ½ ≠ ¼\n\t\u200b\u2028end",
}
SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["real", "llama2"])
def tokenizers_model(request: pytest.FixtureRequest, models: dict[str, ServedModel]) -> Iterator[ServedModel]:
    if request.param == "llama2":
        yield models["llama2"]
        return
    if not (_SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip("the demo's model is not in the cache")
    model = ServedModel.load(_SMOLLM2)
    yield model
    model.tokenizer.close()


def stream(model: ServedModel, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(model.tokenizer.vocabulary, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stream_in_any_script_is_its_decoding_and_never_half_a_character(script: str, tokenizers_model: ServedModel) -> None:
    backend = tokenizers_model.tokenizer.backend
    ids = backend.encode(SCRIPTS[script], add_special_tokens=False).ids
    pieces = stream(tokenizers_model, ids)
    assert "".join(pieces) == backend.decode(ids) == SCRIPTS[script]
    assert not any("\ufffd" in piece for piece in pieces)


@SETTINGS
@given(seed=st.integers(0, 10**6), skip=st.booleans(), kind=st.sampled_from(["any", "bytes", "special", "cut"]))
def test_tokens_at_random_join_to_their_decoding(seed: int, skip: bool, kind: str, tokenizers_model: ServedModel) -> None:
    rng, backend = random.Random(seed), tokenizers_model.tokenizer.backend
    special = sorted(tokenizers_model.tokenizer.vocabulary.special_ids)
    text_ids = backend.encode(rng.choice(list(SCRIPTS.values())), add_special_tokens=False).ids
    short = [token_id for token_id in range(backend.get_vocab_size()) if len(backend.id_to_token(token_id) or "") in (1, 6)][:400]
    ids = {
        "any": lambda: [rng.randrange(tokenizers_model.vocab_size + 3) for _ in range(60)],
        "bytes": lambda: rng.choices(short, k=60),
        "special": lambda: [token for token_id in text_ids for token in ([token_id, rng.choice(special)] if rng.random() < 0.3 else [token_id])],
        "cut": lambda: [token_id for token_id in text_ids * 2 if rng.random() < 0.8],
    }[kind]()
    assert "".join(stream(tokenizers_model, ids, skip=skip)) == backend.decode(ids, skip_special_tokens=skip)


def test_special_token_text_stays_text_in_prompts(tokenizers_model: ServedModel) -> None:
    tokenizer = tokenizers_model.tokenizer
    special = tokenizer.vocabulary.special_ids
    around = tokenizer.encode_text("a b")
    for token_id in special:
        content = tokenizer.backend.id_to_token(token_id)
        for text in (f"a {content} b", f"{content}{content}"):
            ids = tokenizer.encode_text(text)
            assert [each for each in ids if each in special] == [each for each in around if each in special], content
            assert text in tokenizer.backend.decode(ids, skip_special_tokens=False)


def sample(model: ServedModel, ids: list[int], **fields: object) -> tuple[str, int, str]:
    """Text, tokens taken and the stop string, when decode sends one token a message and ends by length."""
    request = ask("x", **fields)
    check_request(request, model, LIMITS)
    completion = Completion(0, resolved(request, model), model)
    text = ""
    for position, token_id in enumerate(ids):
        message = decode_pb2.DecodeServiceGenerateResponse(token_ids=[token_id], position=position)
        if position == len(ids) - 1:
            message.finish.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        response = completion.take(message)
        text += response.text if response is not None else ""
        if completion.finished:
            break
    assert completion.finish is not None
    return text, completion.num_tokens, completion.finish.matched_stop_str


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stop_string_anywhere_cuts_the_text_and_counts_the_tokens_that_complete_it(script: str, include: bool, tokenizers_model: ServedModel) -> None:
    text, backend = SCRIPTS[script], tokenizers_model.tokenizer.backend
    ids = backend.encode(text, add_special_tokens=False).ids
    for start in range(len(text)):
        for length in (1, 2, 5):
            stop = text[start : start + length]
            cut = text.index(stop)
            got, num_tokens, matched = sample(tokenizers_model, ids, stop=[stop], include_stop_str_in_output=include)
            assert (got, matched) == (text[: cut + len(stop)] if include else text[:cut], stop)
            needed = next(count for count in range(1, len(ids) + 1) if stop in backend.decode(ids[:count]))
            assert num_tokens == needed, "the token that completes it, and not one more"


@pytest.mark.parametrize("script", ["joined emoji", "ancient", "hangul"])
def test_stop_strings_that_the_first_tokens_complete_do_not_stop(script: str, tokenizers_model: ServedModel) -> None:
    text, backend = SCRIPTS[script], tokenizers_model.tokenizer.backend
    ids = backend.encode(text, add_special_tokens=False).ids
    for min_tokens in range(0, len(ids) + 1, 3):
        exempt = backend.decode(ids[:min_tokens]).rstrip("\ufffd")
        for stop in (text[0], text[:2], text[len(exempt) : len(exempt) + 1] or text[-1]):
            got, _, matched = sample(tokenizers_model, ids, stop=[stop], min_tokens=min_tokens)
            start = text.find(stop, max(0, len(exempt) - len(stop) + 1))
            assert (got, matched) == ((text[:start], stop) if start >= 0 else (text, ""))


def test_what_a_prompt_begins_does_not_leak_into_the_answer(tokenizers_model: ServedModel) -> None:
    backend = tokenizers_model.tokenizer.backend
    ids = backend.encode("x 🎉", add_special_tokens=False).ids
    rest = ids[-1:]  # the last byte of a character whose first ones are the prompt's
    assert "".join(stream(tokenizers_model, rest)) == backend.decode(rest) == "\ufffd"
