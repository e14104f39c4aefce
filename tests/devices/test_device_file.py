"""A user's own device file: read beside the packaged data, and refused in one sentence."""

import pytest

from rooftile import devices
from rooftile.errors import UsageError

CARD = {
    "title": '"My card"',
    "vendor": '"Mine"',
    "device_class": '"cuda"',
    "nominal_bytes": "24e9",
    "memory_bandwidth": "1e12",
    "peaks": '[{ input = ["bfloat16"], accumulate = "float32", flops_per_s = 100e12 }]',
    "provenance": '{ peaks = "measured here", capacity = "label", bandwidth = "label" }',
}


@pytest.fixture
def card(tmp_path):
    def write(**changes):
        keys = {key: value for key, value in (CARD | changes).items() if value is not None}
        path = tmp_path / "my.toml"
        path.write_text("[my-card]\n" + "\n".join(f"{key} = {value}" for key, value in keys.items()))
        return path

    return write


def test_a_file_is_read_beside_the_packaged_devices(card):
    path = card()
    device = devices.load("my-card", path)
    assert device == devices.load(file=path)
    assert device.peak("bfloat16").flops_per_s == 100e12
    assert device.peak("bfloat16").provenance == "measured here"
    assert device.vector_peak is None
    assert devices.load("h100-sxm", path).name == "h100-sxm"
    assert devices.names(path)[0] == "my-card"
    assert devices.names(path)[1:] == devices.names()


def test_a_file_may_override_a_packaged_device(tmp_path, card):
    path = tmp_path / "other.toml"
    path.write_text(card().read_text().replace("my-card", "h100-sxm"))
    assert devices.load("h100-sxm", path).title == "My card"
    assert devices.names(path).count("h100-sxm") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vendor": None}, "lacks the key 'vendor'; add it"),
        ({"bandwith": "1e12"}, "unknown key 'bandwith'; did you mean"),
        ({"nominal_bytes": "-1"}, "nominal_bytes is -1; it has to be a positive number"),
        ({"nominal_bytes": "0"}, "nominal_bytes is 0; it has to be a positive number"),
        ({"nominal_bytes": "true"}, "nominal_bytes is True; it has to be a positive number"),
        ({"nominal_bytes": "nan"}, "nominal_bytes is nan; it has to be a positive number"),
        ({"nominal_bytes": "inf"}, "nominal_bytes is inf; it has to be a positive number"),
        ({"nominal_bytes": '"24 GB"'}, "nominal_bytes is '24 GB'; it has to be a positive number"),
        ({"nominal_bytes": "24"}, "nominal_bytes is 24, which can't be right in its unit; give bytes"),
        ({"memory_bandwidth": "2039"}, "memory_bandwidth is 2039, which .* give bytes per second"),
        ({"memory_bandwidth": "2.039"}, "memory_bandwidth is 2.039, which .* give bytes per second"),
        (
            {"peaks": '[{ input = "float16", accumulate = "float32", flops_per_s = 312 }]'},
            r"peaks\[0\]: flops_per_s is 312, which .* give FLOP/s",
        ),
        (
            {"peaks": '[{ input = "fp16", accumulate = "float32", flops_per_s = 1e12 }]'},
            "input is 'fp16'; choose from float64",
        ),
        (
            {"peaks": '[{ input = ["float16", "float16"], accumulate = "float32", flops_per_s = 1e12 }]'},
            "repeats float16 with float32 accumulation",
        ),
        ({"peaks": "[]"}, "peaks is empty"),
        ({"peaks": "3"}, "peaks is 3; it has to be a list"),
        ({"peaks": "[3]"}, "has to be a table of keys and values, not 3"),
        ({"device_class": '"npu"'}, "device_class is 'npu'; choose one of cuda, rocm, tpu, cpu"),
        (
            {
                "visible_bytes": "25e9",
                "provenance": '{ peaks = "a", capacity = "b", bandwidth = "c", visible = "d" }',
            },
            "visible_bytes 25000000000 is above nominal_bytes 24000000000",
        ),
        ({"visible_bytes": "23e9"}, "lacks the key 'visible', the source of visible_bytes"),
        ({"sm_count": "10"}, "lacks the key 'chip', the source of sm_count"),
        ({"sm_count": "10.5", "provenance": '{peaks="a",capacity="b",bandwidth="c",chip="d"}'}, "a whole number"),
        ({"links": '["nvlink7"]'}, "unknown link 'nvlink7'; known: nvlink2"),
        ({"title": '""'}, "title is ''; it has to be a non-empty string"),
        ({"notes": "[3]"}, "notes has 3; it has to hold strings"),
    ],
)
def test_a_wrong_table_is_one_sentence_that_names_the_place(card, changes, message):
    path = card(**changes)
    with pytest.raises(UsageError, match=message) as error:
        devices.from_toml(path)
    assert "[my-card]" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[my-card", "is not valid TOML"),
        ("", "is empty; give one table a device"),
        ('title = "x"', "has the key 'title' outside a table"),
    ],
)
def test_a_file_that_holds_no_device_is_refused(tmp_path, text, message):
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        devices.load("my-card", path)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match="can't be read: No such file"):
        devices.load("x", tmp_path / "missing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not valid TOML"):
        devices.load("x", tmp_path / "bytes.toml")


def test_without_a_name_the_file_has_to_hold_one_device(tmp_path, card):
    path = tmp_path / "two.toml"
    path.write_text(card().read_text() + "\n" + card().read_text().replace("my-card", "other-card"))
    with pytest.raises(UsageError, match="no device is named; choose one of my-card, other-card"):
        devices.load(file=path)
