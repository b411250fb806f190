"""Roles of a run and the least that each may do, as data for a NATS server's configuration.

Who can read the whole log: rollout, fold, reader, keeper and operator. A worker reads what its durables hand out and single messages of
the topics it was given; a gateway reads only the topics it was given. All of them read payloads whose id they know.
Streams and durables are made by the operator; whoever reads the whole log makes short-lived consumers for that, and a
server can't tell those from durables: fold and reader could change the settings of one. Every user has an inbox prefix
of its own, so that nobody overhears answers, and each run an account of its own, so that runs don't see each other. It
must not know how credentials are made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from broker.naming import run_names
from schemas.errors import InvalidIdError
from schemas.ids import check_run_id, is_safe_token

TALK: Final = ("hrm", "hrq")
"""First tokens of a run's reports and requests, beside the port's own talk."""
HOLDS: Final = "hold"
"""First token of the keys by which readers hold the log (pipeline.holds)."""
NODE_KEYS: Final = ("node", "scale", "presence")
"""First tokens of the keys by which a node tells what it runs."""
MARK: Final = "retain"
"""Key of the low-water mark."""


class Role(StrEnum):
    """What a process is for the broker."""

    WORKER = "worker"
    """Runs stages: takes from its durables, publishes its topics, stores and reads payloads."""
    GATEWAY = "gateway"
    """Publishes its topics, reads single messages of them, stores payloads; has no durable."""
    ROLLOUT = "rollout"
    """A node with stages and gateways: reads the whole log, takes from its durables, publishes its topics, tells what it runs.
    It can't purge, touch checkpoints and leases, or speak for folds and trainer."""
    FOLD = "fold"
    """Reads the whole log, publishes its topics, keeps checkpoints."""
    READER = "reader"
    """Reads the whole log and all payloads; writes nothing but its holds on the log."""
    KEEPER = "keeper"
    """Reads the whole log and all last values, purges the log and collects payloads: the one who keeps the run within its
    store."""
    OPERATOR = "operator"
    """May do everything with the run, its streams and durables."""


class Permissions(msgspec.Struct, frozen=True, kw_only=True):
    """Subjects that may be published to and listened to."""

    publish: list[str]
    subscribe: list[str]
    may_answer: bool = True
    """Whether it may answer a request that reached it, wherever the answer goes."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who may come in."""

    name: str
    password: str
    permissions: Permissions
    password_env: str = ""
    """Environment variable of the server that holds the password, instead of it."""


def inbox_prefix(user: str) -> str:
    """The `ConnectSettings.inbox_prefix` of a user."""
    return f"_INBOX.{user}"


def permissions(
    role: Role, run: str, user: str, *, topics: Sequence[str] = (), durables: Sequence[str] = ()
) -> Permissions:
    """What `user` may do in `run`.

    Args:
        role: Its role.
        run: The run.
        user: Its name: answers come to its own inboxes only.
        topics: The topics that it publishes ("episode.ended").
        durables: The durables that it takes from.
    """
    check_run_id(run)
    for name in (user, *durables):
        if not is_safe_token(name):
            raise InvalidIdError(f"expected a name of letters, digits, '_' and '-', found {name!r}")
    names = run_names(run)
    log, state, payloads = names.log_stream, names.state_stream, names.payload_stream
    api = "$JS.API"
    know = [f"{api}.STREAM.INFO.{log}", f"{api}.STREAM.INFO.{payloads}"]
    own = [f"{names.log_prefix}{topic}.>" for topic in topics]
    get_own = [f"{api}.DIRECT.GET.{log}.{subject}" for subject in own]
    read_payloads = [f"{api}.DIRECT.GET.{payloads}.{names.payload_prefix}>"]
    write_payloads = [f"{names.payload_prefix}>"]
    read_log = [
        f"{api}.DIRECT.GET.{log}.>",
        *(f"{api}.CONSUMER.{what}.{log}.*" for what in ("CREATE", "INFO", "MSG.NEXT")),
        f"{api}.CONSUMER.LIST.{log}",
    ]
    keep_state = [f"{names.state_prefix}>", f"{api}.DIRECT.GET.{state}.{names.state_prefix}>"]
    keep_state += [f"{api}.STREAM.INFO.{state}"]
    say_present = [f"{names.state_prefix}presence.>"]
    take = [
        subject
        for durable in durables
        for subject in (
            f"{api}.CONSUMER.INFO.{log}.{durable}",
            f"{api}.CONSUMER.MSG.NEXT.{log}.{durable}",
            f"$JS.ACK.{log}.{durable}.>",
        )
    ]
    places = [f"{names.talk_prefix}>", *(f"{prefix}.{run}.>" for prefix in TALK)]
    talk = places
    elected = [f"$JS.EVENT.ADVISORY.STREAM.LEADER_ELECTED.{stream}" for stream in (log, state, payloads)]
    elected += [f"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.{stream}.*" for stream in (log, state, payloads)]
    hear = [f"{inbox_prefix(user)}.>", *places, *elected]
    know_state = f"{api}.STREAM.INFO.{state}"
    hold = [
        f"{names.state_prefix}{HOLDS}.>",
        f"{api}.DIRECT.GET.{state}.{names.state_prefix}{MARK}",
        know_state,
    ]
    match role:
        case Role.WORKER | Role.GATEWAY:
            publish = [*own, *get_own, *take, *read_payloads, *write_payloads, *say_present, *know, *talk]
        case Role.ROLLOUT:
            tell = [f"{names.state_prefix}{key}.>" for key in NODE_KEYS]
            state_read = [f"{api}.DIRECT.GET.{state}.{names.state_prefix}>", know_state]
            forget = f"{api}.CONSUMER.DELETE.{log}.*"
            publish = [*own, *read_log, forget, *take, *tell, *state_read, *hold]
            publish += [*read_payloads, *write_payloads, *know, *talk]
        case Role.FOLD:
            forget = f"{api}.CONSUMER.DELETE.{log}.*"
            publish = [*own, *read_log, forget, *keep_state, *read_payloads, *write_payloads, *know, *talk]
        case Role.READER:
            publish = [*read_log, *read_payloads, *know, *hold]
        case Role.KEEPER:
            purge = [f"{api}.STREAM.PURGE.{stream}" for stream in (log, state, payloads)]
            forget = f"{api}.CONSUMER.DELETE.{log}.*"
            list_payloads = [f"{api}.CONSUMER.{what}.{payloads}.*" for what in ("CREATE", "INFO", "MSG.NEXT", "DELETE")]
            publish = [*own, *read_log, forget, *keep_state, *purge, *list_payloads]
            publish += [*read_payloads, *write_payloads, *know, *talk]
        case Role.OPERATOR:
            publish = [
                *(f"{prefix}>" for prefix in (names.log_prefix, names.state_prefix, names.payload_prefix)),
                *(f"{api}.*.*.{stream}" for stream in (log, state, payloads)),
                *(f"{api}.*.*.{stream}.>" for stream in (log, state, payloads)),
                *(f"{api}.*.*.*.{stream}.>" for stream in (log, state, payloads)),
                f"{api}.STREAM.NAMES",
                f"$JS.ACK.{log}.>",
                *talk,
            ]
    return Permissions(publish=publish, subscribe=hear, may_answer=role is not Role.READER)


def account_config(run: str, users: Sequence[User]) -> str:
    """The account of a run, for the `accounts` block of a NATS server's configuration.

    It holds passwords (or their bcrypt hashes): write it with mode 0600.
    """
    entries = "\n".join(f"      {_user_config(user)}" for user in users)
    return f"  RUN_{check_run_id(run)} {{\n    jetstream: enabled\n    users: [\n{entries}\n    ]\n  }}\n"


def _user_config(user: User) -> str:
    allowed = user.permissions
    rights = {"publish": {"allow": allowed.publish}, "subscribe": {"allow": allowed.subscribe}}
    text = json.dumps(rights | ({"allow_responses": True} if allowed.may_answer else {}))
    password = f"${user.password_env}" if user.password_env else json.dumps(user.password)
    return f"{{ user: {json.dumps(user.name)}, password: {password}, permissions: {text} }}"
