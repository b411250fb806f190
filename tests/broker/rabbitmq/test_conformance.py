"""The conformance suite on a real RabbitMQ, at its level."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.api import Capability
from broker.conformance import Check, checks_at

pytestmark = pytest.mark.resources


def named(check) -> str:
    return check.__name__.removeprefix("check_")


@pytest.mark.parametrize("check", checks_at(()), ids=named)
async def test_rabbitmq(check: Check, make):
    await check(make)


async def test_the_level_is_told(make):
    async with make() as broker:
        assert broker.capabilities == frozenset()


def test_every_capability_is_told_in_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "rabbitmq.md").read_text()
    assert [one.value for one in Capability if f"| `{one.value}`: " not in page] == []
