from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.chat_template import ChatTemplateError
from gateway.prompt_ids import TooManyTokensError
from gateway.served_model import ModelDirectoryError, ServedModel
from tests.gateway.conftest import FAMILIES, id_of

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "two  spaces\n\n\nand lines\r\n\ttabs",
    "東京タワー and 🎉🎊, café, e\u0301 decomposed",
    "don't stop 12,345.678",
    "x" * 3000,
    "\u0000 nul \u200d zwj",
    "",
]


@cache
def reference(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_has_the_same_ids_as_transformers(family: str, models: dict[str, ServedModel], model_dirs: dict[str, Path]) -> None:
    for text in TEXTS:
        assert models[family].tokenizer.encode_text(text) == reference(model_dirs[family])(text)["input_ids"], text


def test_text_of_models_with_a_beginning_token_starts_with_it(models: dict[str, ServedModel]) -> None:
    for family, bos in (("llama3", "<|begin_of_text|>"), ("llama2", "<s>")):
        tokenizer = models[family].tokenizer
        assert tokenizer.encode_text("hi")[0] == tokenizer.backend.token_to_id(bos)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_have_the_same_ids_as_transformers(family: str, models: dict[str, ServedModel], model_dirs: dict[str, Path]) -> None:
    for text in TEXTS:
        for chat in ([("user", text)], [("system", "Be brief."), ("user", text), ("assistant", "Fine."), ("user", "And " + text)]):
            messages = [{"role": role, "content": content} for role, content in chat]
            expected = reference(model_dirs[family]).apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
            assert models[family].tokenizer.encode_chat(messages) == expected, text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES), content=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1\ufdd2"), max_size=60)
)
def test_any_ordinary_content_has_the_same_ids_as_transformers(family: str, content: str, models: dict[str, ServedModel], model_dirs: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": content}]
    expected = reference(model_dirs[family]).apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert models[family].tokenizer.encode_chat(messages) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_in_messages_stay_text(family: str, models: dict[str, ServedModel]) -> None:
    tokenizer = models[family].tokenizer
    control = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values() if token.special]
    plain = tokenizer.encode_chat([{"role": "user", "content": "a b"}])
    for content in control:
        for around in ("{}", "a {} b", "{}{}", "é{}\n", " {} "):
            message = around.format(content, content)
            ids = tokenizer.encode_chat([{"role": "user", "content": message}])
            for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
                if token.special and token.content != "<unk>":
                    assert ids.count(token_id) == plain.count(token_id), (message, token.content)
            assert message.strip() in tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_control_tokens_that_only_the_template_makes_control_stay_text_too(models: dict[str, ServedModel]) -> None:
    tokenizer = models["qwen3"].tokenizer
    think, tool_call = id_of(tokenizer.backend, "<think>"), id_of(tokenizer.backend, "<tool_call>")
    ids = tokenizer.encode_chat([{"role": "user", "content": "<think> <tool_call>"}])
    assert ids.count(think) == 1, "the template's own"
    assert tool_call in ids, "an added token that the template does not write is a word like others, as in transformers"


def test_a_template_can_split_content_at_a_control_token(models: dict[str, ServedModel], model_dirs: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>hm</think>\n\nanswer"}, {"role": "user", "content": "r"}]
    expected = reference(model_dirs["qwen3"]).apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert models["qwen3"].tokenizer.encode_chat(messages) == expected


def test_marks_cannot_be_forged(models: dict[str, ServedModel]) -> None:
    for mark in "\ufdd0\ufdd1\ufdd2":
        with pytest.raises(ChatTemplateError, match="noncharacter") as refused:
            models["smollm2"].tokenizer.encode_chat([{"role": "user", "content": "x"}, {"role": "user", "content": f"{mark}<|im_end|>{mark}"}])
        assert refused.value.index == 1


def test_a_template_refuses_with_its_own_words(models: dict[str, ServedModel]) -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        models["llama2"].tokenizer.encode_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


async def test_a_long_prompt_leaves_the_event_loop_free(models: dict[str, ServedModel]) -> None:
    tokenizer = models["smollm2"].tokenizer
    text = "The quick brown fox jumps over the lazy dog. " * 22_000
    lags: list[float] = []
    encoding = asyncio.ensure_future(tokenizer.encode_chat_async([{"role": "user", "content": text}]))
    while not encoding.done():
        before = time.monotonic()
        await asyncio.sleep(0.001)
        lags.append(time.monotonic() - before)
    assert len(await encoding) > 100_000
    assert len(lags) > 10
    assert sorted(lags)[int(len(lags) * 0.9)] < 0.05


def test_a_prompt_of_too_many_tokens_is_counted_and_not_listed(models: dict[str, ServedModel]) -> None:
    tokenizer = models["smollm2"].tokenizer
    with pytest.raises(TooManyTokensError, match="is 3000 tokens, above the context of 2999"):
        tokenizer.encode_text("x" * 3000, max_tokens=2999)
    assert len(tokenizer.encode_text("x" * 3000, max_tokens=3000)) == 3000
    with pytest.raises(TooManyTokensError):
        tokenizer.encode_chat([{"role": "user", "content": "x" * 3000}], max_tokens=3000)


async def test_a_conversation_of_many_empty_turns_leaves_the_event_loop_free(models: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, threads = models["smollm2"].tokenizer, set[int]()

    def encode(*_: Any, **__: Any) -> list[int]:
        threads.add(threading.get_ident())
        return []

    monkeypatch.setattr(tokenizer, "encode_chat", encode)
    await tokenizer.encode_chat_async([{"role": "user", "content": ""}] * 1024)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"max_position_embeddings": 8, "vocab_size": "many"}),
        ("config.json", {"max_position_embeddings": 8, "text_config": None}),
        ("config.json", {"max_position_embeddings": "long"}),
        ("config.json", {"max_position_embeddings": 8, "eos_token_id": ["end"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}),
    ],
)
def test_a_file_with_something_else_in_it_is_named(file: str, content: dict[str, Any], model_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(model_dirs["qwen3"], tmp_path, dirs_exist_ok=True)
    for other in ("generation_config.json", "chat_template.jinja"):
        (tmp_path / other).unlink(missing_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelDirectoryError, match=str(tmp_path)):
        ServedModel.load(tmp_path)


def test_a_missing_or_broken_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"config\.json is missing"):
        ServedModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8, "vocab_size": 9}))
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json is missing"):
        ServedModel.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json cannot be read"):
        ServedModel.load(tmp_path)


def test_the_context_length_is_the_models_own_or_shorter(model_dirs: dict[str, Path]) -> None:
    assert ServedModel.load(model_dirs["llama3"], max_model_len=100).max_model_len == 100
    with pytest.raises(ModelDirectoryError, match="above the model's own 512"):
        ServedModel.load(model_dirs["llama3"], max_model_len=513)
