"""Last values with compare-and-set."""

# ruff: noqa: D103 - the name of a check is its sentence
from __future__ import annotations

from typing import Final

import anyio

from broker.conformance.asserting import BrokerFactory, Check, claim, equal, raises
from broker.errors import ConflictError


async def check_a_value_is_what_was_saved_last(make: BrokerFactory) -> None:
    async with make() as broker:
        equal(await broker.load_state("fold.assembly"), None, "before")
        first = await broker.save_state("fold.assembly", b"1")
        second = await broker.save_state("fold.assembly", b"2")
        claim(second > first > 0, f"revisions grow: {first}, {second}")
        equal(await broker.load_state("fold.assembly"), (b"2", second), "value and revision")
        equal(await broker.load_state("fold.sampling"), None, "another key")


async def check_an_expected_revision_guards(make: BrokerFactory) -> None:
    async with make() as broker:
        first = await broker.save_state("k", b"1", expected_revision=0)
        await raises(ConflictError, broker.save_state("k", b"2", expected_revision=0), "creating it again")
        second = await broker.save_state("k", b"2", expected_revision=first)
        await raises(ConflictError, broker.save_state("k", b"3", expected_revision=first), "an old revision")
        equal(await broker.load_state("k"), (b"2", second), "what stands")


async def check_of_many_writers_with_one_revision_one_wins(make: BrokerFactory) -> None:
    async with make() as one, make() as two:
        won: list[int] = []

        async def save(number: int) -> None:
            try:
                await (one, two)[number % 2].save_state("lease", str(number).encode(), expected_revision=0)
            except ConflictError:
                return
            won.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(save, number)
        equal(len(won), 1, "winners")
        stands = await one.load_state("lease")
        claim(stands is not None and stands[0] == str(won[0]).encode(), "the winner's value stands")


async def check_keys_are_listed_by_their_first_tokens_and_forgotten_one_by_one(make: BrokerFactory) -> None:
    async with make() as broker:
        revisions = {
            key: await broker.save_state(key, key.encode()) for key in ("hold.b", "hold.a.1", "holder.c", "hold")
        }
        found = {key: (key.encode(), revisions[key]) for key in ("hold.a.1", "hold.b")}
        equal(dict(await broker.list_state("hold")), found, "keys below hold")
        await broker.delete_state("hold.b")
        await broker.delete_state("hold.unknown")
        equal(list(await broker.list_state("hold")), ["hold.a.1"], "what is left")
        equal(await broker.load_state("hold.b"), None, "the forgotten one")
        claim(await broker.save_state("hold.b", b"again", expected_revision=0) > 0, "it can be made again")


CHECKS: Final[tuple[Check, ...]] = (
    check_a_value_is_what_was_saved_last,
    check_an_expected_revision_guards,
    check_of_many_writers_with_one_revision_one_wins,
    check_keys_are_listed_by_their_first_tokens_and_forgotten_one_by_one,
)
