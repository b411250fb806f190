"""`--where EXPR`: a small, safe language over a message's fields. Parsed by Python's own parser, evaluated here: only
fields, constants, comparisons, arithmetic, `and` / `or` / `not`, `in`, and a few functions; nothing can be called or imported.

    score < 0.5 and stream == "math"          len(rows) > 1          group in ["g0000001", "g0000002"]
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from ops.logtools.plain import Plain
from schemas.errors import ConfigError

_COMPARE: Final[Mapping[type[ast.cmpop], Callable[[object, object], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDER: Final[Mapping[type[ast.cmpop], Callable[[float, float], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_TEXT: Final = {"contains", "startswith", "endswith"}
_FUNCTIONS: Final = frozenset({"len", "abs", "lower", *_TEXT})
_LIMIT: Final = 2000

Value = Plain
Evaluate = Callable[[Mapping[str, Value]], Value]


class Expression:
    """A checked expression. `matches` says whether a message's fields satisfy it."""

    def __init__(self, text: str, fields: Iterable[str]) -> None:
        """Check an expression against the fields that messages here can have.

        Raises:
            ConfigError: not an expression of this language, or a field that no message has.
        """
        if len(text) > _LIMIT:
            raise ConfigError(f"--where: expected at most {_LIMIT} characters, found {len(text)}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"--where {text!r}: not an expression: {error}") from error
        self.text: Final = text
        self._fields: Final = sorted(set(fields))
        try:
            self._evaluate: Final = self._compile(tree.body)
        except RecursionError as error:
            raise ConfigError("--where: the expression is nested too deeply") from error

    def matches(self, fields: Mapping[str, Value]) -> bool:
        """Whether it holds. A field that this message has not, and a comparison that makes no sense, is false."""
        try:
            return bool(self._evaluate(fields))
        except RecursionError:
            return False

    def _refuse(self, node: ast.AST, why: str) -> ConfigError:
        column = getattr(node, "col_offset", 0)
        return ConfigError(f"--where {self.text!r}, column {column + 1}: {why}")

    def _compile(self, node: ast.expr) -> Evaluate:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return lambda _: value
            case ast.Name(id=name):
                return self._field(node, name)
            case ast.Attribute(value=inner, attr=name):
                of = self._compile(inner)
                return lambda fields: _get(of(fields), name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=int() | str() as key)):
                of = self._compile(inner)
                return lambda fields: _get(of(fields), key)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self._compile(item) for item in items]
                return lambda fields: [part(fields) for part in parts]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                of = self._compile(inner)
                return lambda fields: not of(fields)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                of = self._compile(inner)
                return lambda fields: -number if (number := _number(of(fields))) is not None else None
            case ast.BoolOp(op=op, values=values):
                parts = [self._compile(value) for value in values]
                every = isinstance(op, ast.And)
                return lambda fields: (all if every else any)(bool(part(fields)) for part in parts)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return _arithmetic(_ARITHMETIC[type(op)], self._compile(left), self._compile(right))
            case ast.Compare():
                return self._comparison(node)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
                return self._function(node, name, [self._compile(argument) for argument in arguments])
            case _:
                raise self._refuse(
                    node,
                    f"{type(node).__name__} is not allowed; expected fields, constants, comparisons, + - * / %, and, or, "
                    f"not, in, or one of {', '.join(sorted(_FUNCTIONS))}",
                )

    def _field(self, node: ast.AST, name: str) -> Evaluate:
        if name not in self._fields:
            close = difflib.get_close_matches(name, self._fields, n=2)
            hint = f"did you mean {' or '.join(close)}?" if close else f"fields: {', '.join(self._fields)}"
            raise self._refuse(node, f"no message here has a field {name!r}; {hint}")
        return lambda fields: fields.get(name)

    def _comparison(self, node: ast.Compare) -> Evaluate:
        terms = [self._compile(term) for term in (node.left, *node.comparators)]
        tests = [self._test(node, op) for op in node.ops]

        def evaluate(fields: Mapping[str, Value]) -> Value:
            values = [term(fields) for term in terms]
            return all(test(a, b) for test, a, b in zip(tests, values, values[1:], strict=False))

        return evaluate

    def _test(self, node: ast.AST, op: ast.cmpop) -> Callable[[Value, Value], bool]:
        kind = type(op)
        if kind in _COMPARE:
            return _COMPARE[kind]
        if kind in _ORDER:
            return _ordered(_ORDER[kind])
        if kind in (ast.In, ast.NotIn):
            wanted = kind is ast.In
            return lambda a, b: _contains(b, a) is wanted
        raise self._refuse(node, f"{kind.__name__} is not allowed; expected ==, !=, <, <=, >, >=, in, not in")

    def _function(self, node: ast.AST, name: str, arguments: list[Evaluate]) -> Evaluate:
        expected = 2 if name in _TEXT else 1
        if len(arguments) != expected:
            raise self._refuse(node, f"{name} takes {expected} argument(s), found {len(arguments)}")
        return lambda fields: _call(name, [argument(fields) for argument in arguments])


def _get(value: Value, key: str | int) -> Value:
    if isinstance(value, dict) and isinstance(key, str):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
        return value[key]
    return None


def _number(value: Value) -> float | None:
    return value if isinstance(value, (int, float)) else None


def _arithmetic(function: Callable[[float, float], float], left: Evaluate, right: Evaluate) -> Evaluate:
    def evaluate(fields: Mapping[str, Value]) -> Value:
        a, b = _number(left(fields)), _number(right(fields))
        if a is None or b is None:
            return None
        try:
            return function(a, b)
        except (ZeroDivisionError, OverflowError):
            return None

    return evaluate


def _ordered(function: Callable[[float, float], bool]) -> Callable[[Value, Value], bool]:
    def test(a: Value, b: Value) -> bool:
        if isinstance(a, str) and isinstance(b, str):
            return function(1.0 if a > b else (-1.0 if a < b else 0.0), 0.0)
        left, right = _number(a), _number(b)
        return left is not None and right is not None and function(left, right)

    return test


def _contains(where: Value, what: Value) -> bool:
    if isinstance(where, str):
        return isinstance(what, str) and what in where
    return isinstance(where, (list, dict)) and what in where


def _call(name: str, values: list[Value]) -> Value:
    first = values[0]
    match name:
        case "len":
            return len(first) if isinstance(first, (str, list, dict)) else None
        case "abs":
            return abs(first) if isinstance(first, (int, float)) else None
        case "lower":
            return first.lower() if isinstance(first, str) else None
        case _:
            second = values[1]
            if not (isinstance(first, str) and isinstance(second, str)):
                return name == "contains" and _contains(first, second)
            return {"contains": first.__contains__, "startswith": first.startswith, "endswith": first.endswith}[name](
                second
            )


def field_names(messages: Iterable[type[msgspec.Struct]]) -> list[str]:
    """The names that expressions over these messages may use: their fields, and those of the log itself."""
    return sorted({name for message in messages for name in message.__struct_fields__} | LOG_FIELDS)


LOG_FIELDS: Final = frozenset({"subject", "topic", "key", "sequence", "time", "size_bytes"})
"""What stands beside a message's own fields."""
