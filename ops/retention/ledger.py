"""The run's account, kept over purges: saved as a payload before anything that it counted is purged."""

from __future__ import annotations

from typing import Final

import msgspec

from broker.api import Broker
from broker.errors import StoreFullError
from ops.accounts import LEDGER_KEY, Account, read_ledger
from schemas.messages.training import FoldCheckpoint
from schemas.payload import INLINE, inline_ref


class Ledger:
    """Takes each message of the log once, also over restarts."""

    def __init__(self, account: Account, sequence: int) -> None:
        self.account: Final = account
        self.sequence = sequence
        """Everything up to here is in the account."""

    @classmethod
    async def restore(cls, broker: Broker) -> Ledger:
        """Go on where it was saved last."""
        kept = await read_ledger(broker)
        return cls(Account(broker.run, staleness_bound=None, state=kept.state), kept.sequence)

    def take(self, message: msgspec.Struct, sequence: int) -> None:
        """Count a message, unless it is counted already."""
        if sequence > self.sequence:
            self.account.take(message, sequence)
            self.sequence = sequence

    async def save(self, broker: Broker) -> None:
        """Name the account in its last value; the former payload is nobody's any more and is collected. Where the store is full
        the account rides in the last value itself.
        """
        sequence, state = self.sequence, msgspec.msgpack.encode(self.account.state)  # together: more may come meanwhile
        try:
            ref = await broker.payloads.put(state)
        except StoreFullError:  # nothing could ever be purged if this waited for room
            ref = inline_ref(state)
        checkpoint = FoldCheckpoint(fold=LEDGER_KEY, sequence=sequence, state=ref)
        former = await broker.load_state(LEDGER_KEY)
        await broker.save_state(LEDGER_KEY, msgspec.msgpack.encode(checkpoint))
        if former is not None:
            old = msgspec.msgpack.decode(former[0], type=FoldCheckpoint)
            if old.state.store != INLINE and (ref.store == INLINE or old.state.id != ref.id):
                await broker.payloads.delete(old.state.id)
