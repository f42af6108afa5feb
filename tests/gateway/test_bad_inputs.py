"""Every row of the table of bad input at a gateway whose decode worker would serve anything: refused as the row says, and nothing reaches the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from checks.bad_inputs import BAD_INPUTS, ODD_INPUTS, OddInput
from checks.refusals import BadInput, Code, Facts, in_flight, leaf_paths, raw_channel, send
from gateway.served_model import ServedModel
from tandem.v1 import gateway_pb2, generation_pb2
from tests.gateway.fake_decode import LENGTH, FakeDecode, Request, Response
from tests.gateway.house import House, ask, house

in_module_loop = pytest.mark.asyncio(loop_scope="module")


async def _serves(_: FakeDecode, request: Request, context: Any) -> None:
    """A token every two milliseconds, as many as are asked for."""
    for position in range(request.sampling_params.max_tokens):
        message = Response(token_ids=[5], position=position)
        if position == request.sampling_params.max_tokens - 1:
            message.finish.finish_reason = LENGTH
        await context.write(message)
        await asyncio.sleep(0.002)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(models: dict[str, ServedModel]) -> AsyncIterator[House]:
    async with house(models["smollm2"], _serves) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(home: House) -> AsyncIterator[grpc.aio.Channel]:
    async with raw_channel(f"127.0.0.1:{home.gateway.server.port}") as opened:
        yield opened


@pytest.fixture
def facts(models: dict[str, ServedModel]) -> Facts:
    model = models["smollm2"]
    control = {token.content: number for number, token in model.tokenizer.backend.get_added_tokens_decoder().items() if token.special}
    return Facts("m", model.vocab_size, 512, model.longest_token_chars, control_tokens=control)


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    health: Any = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="tandem.v1.GatewayService"), timeout=5.0)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@in_module_loop
@pytest.mark.parametrize("row", BAD_INPUTS, ids=lambda row: row.name)
async def test_bad_input_is_refused_as_the_table_says(row: BadInput, home: House, channel: grpc.aio.Channel, facts: Facts) -> None:
    async with in_flight(channel, row, facts):
        num_requests = len(home.decodes[0].requests)
        refusal = await send(channel, row, row.make(facts))
        assert refusal.difference(row) == ""
        assert len(home.decodes[0].requests) == num_requests, "reached a worker"
    assert await _is_serving(channel)
    await home.assert_nothing_held()
    messages, _ = await home.generate(ask("x", max_tokens=1))
    assert messages[-1].finish.finish_reason == LENGTH


@in_module_loop
@pytest.mark.parametrize("row", ODD_INPUTS, ids=lambda row: row.name)
async def test_control_tokens_in_what_a_user_says_stay_text(row: OddInput, home: House, facts: Facts) -> None:
    async def num_control_tokens(text: str) -> int:
        messages, _ = await home.generate(row.build(text))
        ids = [token_id for message in messages for token_id in message.prompt_token_ids]
        assert ids
        return sum(token_id in facts.control_tokens.values() for token_id in ids)

    assert facts.control_tokens
    expected = await num_control_tokens("harmless")
    for text in facts.control_tokens:
        assert await num_control_tokens(f"a {text} b") == expected


def test_every_field_of_the_contract_has_a_row() -> None:
    about = {row.about for row in BAD_INPUTS}
    assert about - {""} == set(leaf_paths(gateway_pb2.GenerateRequest.DESCRIPTOR))


def test_every_number_has_a_row_of_its_own_bad_values() -> None:
    floats = [field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields if field.type == field.TYPE_FLOAT]
    names = {row.name for row in BAD_INPUTS}
    assert floats
    assert {f"{name} {value}" for name in floats for value in ("nan", "inf", "-inf")} <= names


def test_no_request_has_an_enum_that_a_client_could_get_wrong() -> None:
    def enums(message: Any) -> list[str]:
        nested = [each.message_type for each in message.fields if each.message_type is not None]
        return [each.name for each in message.fields if each.enum_type is not None] + [name for each in nested for name in enums(each)]

    assert enums(gateway_pb2.GenerateRequest.DESCRIPTOR) == []


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in BAD_INPUTS}) == len(BAD_INPUTS)
    assert {row.code for row in BAD_INPUTS} >= {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.DEADLINE_EXCEEDED}
