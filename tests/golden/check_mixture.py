"""What `mixture.json` says about weighted stream orders, case by case."""

from collections import Counter
from collections.abc import Callable

import pytest
from golden_case import Case

from stages.sampling.mixture import MixtureStream, epoch_draws, plan_mixture


def _plan(case: Case):
    params = dict(case.params)
    arguments = {"epoch_size": params.pop("epoch_size"), "size_multiple": params.pop("size_multiple")}
    for optional in ("order", "seed"):
        if optional in params:
            arguments[optional] = params.pop(optional)
    assert not params, f"unknown params: {sorted(params)}"
    inputs = dict(case.inputs)
    rows = inputs.pop("streams")
    assert not inputs, f"unknown inputs: {sorted(inputs)}"
    streams = []
    for row in rows:
        assert set(row) == {"name", "rows", "sampling_weight"}
        streams.append(MixtureStream(name=row["name"], num_rows=row["rows"], sampling_weight=row["sampling_weight"]))
    return plan_mixture(streams, **arguments)


def _check_mixture(case: Case) -> None:
    mixture = _plan(case)
    draws = epoch_draws(mixture)
    expected = case.expected
    assert set(expected) == {"order", "counts"}
    assert [f"{drawn.stream}{drawn.row}" for drawn in draws] == expected["order"]
    counted = Counter(drawn.stream for drawn in draws)
    assert {stream.name: counted[stream.name] for stream in mixture.streams} == expected["counts"]


def _check_error(case: Case) -> None:
    assert case.expected["error"]
    with pytest.raises(ValueError, match=r"\d|stream"):
        _plan(case)


CHECKS: dict[str, Callable[[Case], None]] = {"mixture": _check_mixture, "error": _check_error}
