"""What may be given to a server, by headers alone."""

import pytest
from test_bad_weights import BAD, damaged

from stages.ports import WeightsRefusedError
from stages.weight_files.layout import TensorShape, check_layout, read_layout


@pytest.mark.parametrize("name", BAD)
def test_damage_is_found_without_reading_the_data(versions, tmp_path, name):
    with pytest.raises(WeightsRefusedError, match=BAD[name][1]):
        check_layout(read_layout(damaged(versions[1], tmp_path, name)), read_layout(versions[0]), name)


def test_other_weights_of_the_same_model_fit(versions):
    check_layout(read_layout(versions[1]), read_layout(versions[0]), "v1")


@pytest.mark.parametrize(("found", "fits"), [("BF16", True), ("F16", True), ("F8_E4M3", False), ("I8", False)])
def test_a_server_converts_floating_point_types_and_no_quantised_ones(found, fits):
    expected = {"w": TensorShape("F32", (2, 2))}
    if fits:
        check_layout({"w": TensorShape(found, (2, 2))}, expected, "here")
        return
    with pytest.raises(WeightsRefusedError, match="expected the type F32"):
        check_layout({"w": TensorShape(found, (2, 2))}, expected, "here")
