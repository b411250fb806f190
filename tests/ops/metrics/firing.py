"""Which alert rules would fire on some samples: for the plain rules (one metric, a selector, a threshold), evaluated as Prometheus does.

`increase(metric[5m])` is taken as the value itself: what was counted since the process started, shortly after its start.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

RULES = yaml.safe_load((Path(__file__).parents[3] / "ops/deploy/alerts.yml").read_text(encoding="utf-8"))["groups"][0][
    "rules"
]
PLAIN = re.compile(
    r"^(?:increase\()?(?P<name>headrace_\w+|up)(?:\{(?P<labels>[^}]*)\})?(?:\[\w+\]\))? (?P<op>==|>) (?P<value>[\d.]+)$"
)
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
OPERATORS = {"==": operator.eq, ">": operator.gt}
Series = tuple[str, Mapping[str, str], float]
"""Metric, labels, value."""


def firing(series: Iterable[Series]) -> set[str]:
    """Names of the alerts that hold for at least one of the series."""
    found, known = set(), list(series)
    for rule in RULES:
        plain = PLAIN.match(rule["expr"])
        if plain and any(_holds(plain, *one) for one in known):
            found.add(rule["alert"])
    return found


def _holds(plain: re.Match[str], name: str, labels: Mapping[str, str], value: float) -> bool:
    return (
        name == plain["name"]
        and all(
            _matches(labels.get(key, ""), how, wanted) for key, how, wanted in MATCHER.findall(plain["labels"] or "")
        )
        and OPERATORS[plain["op"]](value, float(plain["value"]))
    )


def _matches(value: str, how: str, wanted: str) -> bool:
    match how:
        case "=":
            return value == wanted
        case "!=":
            return value != wanted
        case "=~":
            return re.fullmatch(wanted, value) is not None
        case _:
            return re.fullmatch(wanted, value) is None
