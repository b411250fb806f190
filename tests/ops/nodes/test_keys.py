from __future__ import annotations

import json

import pytest

from ops.secrets import CONTROL_KEY_ENV, make_secrets, run_secrets, secrets_digest
from schemas.errors import ConfigError


def test_keys_are_made_once_for_their_owner_only_and_all_nodes_read_the_same(tmp_path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match="expected a copy of the control node's secrets file, found none"):
        run_secrets(tmp_path, file, may_make=False)
    assert make_secrets(file)
    assert not make_secrets(file)
    assert file.stat().st_mode & 0o777 == 0o600
    first, second = run_secrets(tmp_path, file), run_secrets(tmp_path, file, may_make=False)
    assert first == second
    assert len(first.broker_token) > 30
    assert secrets_digest(first) == secrets_digest(second)
    assert first.broker_token not in repr(first)


def test_other_keys_have_another_checksum(tmp_path, monkeypatch) -> None:
    file = tmp_path / "keys.json"
    before = secrets_digest(run_secrets(tmp_path, file))
    monkeypatch.setenv(CONTROL_KEY_ENV, "chosen")
    assert secrets_digest(run_secrets(tmp_path, file)) != before


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"other": 1}))
    with pytest.raises(ConfigError, match="expected the keys that `headrace up` made"):
        make_secrets(file)
    assert json.loads(file.read_text()) == {"other": 1}
