"""A user's functions behind import paths: found, or refused with the setting, what was found and the form of a path."""

import math

import pytest

from pipeline.functions import load_function
from schemas.errors import ConfigError


def test_the_function_behind_a_path_is_found():
    assert load_function("gateway.preprocessors", "math:floor") is math.floor


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere:run", "a.b: can't import 'nowhere:run': No module named 'nowhere'; expected package.module:function"),
        ("math:nothing", "a.b: can't import 'math:nothing': module 'math' has no attribute 'nothing'"),
        ("math", "a.b: can't import 'math'"),
        (":floor", "a.b: can't import ':floor': Empty module name"),
        ("math:pi", "a.b: 'math:pi' is a float, expected a function of a Call"),
    ],
)
def test_what_is_no_function_is_refused_with_the_setting(path, says):
    with pytest.raises(ConfigError) as refused:
        load_function("a.b", path, "a function of a Call")
    assert str(refused.value).startswith(says)
