"""The settings string, and names of devices."""

import pytest

from gpumem import Device, MemoryInfo
from gpumem.accounting import (
    Accountants,
    AdHocAccountant,
    StatsAccountant,
    accountants_from_setting,
)
from gpumem.errors import ConfigError

CSV = "#name\nrelu_1,1,2,3,4\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "f.csv").write_text(CSV)
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "kind", "threshold"),
    [
        ("1000,", AdHocAccountant, 1000 * 1024),
        ("500,f.csv", StatsAccountant, 512000),
        (" 500 , f.csv ", StatsAccountant, 512000),
        (",f.csv", StatsAccountant, None),
        (",", AdHocAccountant, None),
        ("0,", AdHocAccountant, 0),
    ],
)
def test_setting_makes_one_accountant_per_device(folder, setting, kind, threshold):
    accountants = accountants_from_setting(setting, folder=folder)
    (accountant,) = accountants.values()
    assert type(accountant) is kind
    assert accountant.threshold == threshold


@pytest.mark.parametrize("setting", [None, "", "  "])
def test_no_setting_makes_none(setting):
    assert len(accountants_from_setting(setting)) == 0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("1000", "expecting comma separated fields"),
        ("1,2,3", "expecting comma separated fields"),
        ("-1,", "KiB from 0"),
        ("1.5,", "KiB from 0"),
        ("1e3,", "KiB from 0"),
        (f"{2**54},", "KiB from 0"),
        (",missing.csv", "missing.csv"),
    ],
)
def test_bad_setting_is_an_error_that_says_what_is_accepted(folder, setting, message):
    with pytest.raises(ConfigError, match=message):
        accountants_from_setting(setting, folder=folder)


NAMES_OF_CUDA_0 = [
    "cuda",
    "cuda:0",
    "gpu:0",
    "GPU",
    "CUDAExecutionProvider",
    "CudaPluginExecutionProvider",
    "cudaexecutionprovider:0",
    Device("cuda:0"),
    MemoryInfo.parse("cuda:0/host_accessible"),
    "cuda:0/managed",
]


@pytest.mark.parametrize("key", NAMES_OF_CUDA_0, ids=str)
@pytest.mark.parametrize("name", NAMES_OF_CUDA_0, ids=str)
def test_all_names_of_a_device_share_one_accountant(key, name):
    accountant = AdHocAccountant()
    accountants = Accountants({key: accountant})
    assert accountants[name] is accountant
    assert name in accountants
    assert "cuda:1" not in accountants
    assert accountants.get("host") is None


def test_two_accountants_for_one_device_are_refused():
    with pytest.raises(ConfigError, match="cuda:0 is given two"):
        Accountants({"cuda:0": AdHocAccountant(), "gpu:0": AdHocAccountant()})


def test_unknown_device_name_is_refused_in_settings_and_missing_in_lookups():
    with pytest.raises(ValueError, match="TensorrtExecutionProvider"):
        Accountants({"TensorrtExecutionProvider": AdHocAccountant()})
    with pytest.raises(KeyError):
        Accountants()["TensorrtExecutionProvider"]
    with pytest.raises(TypeError):
        Accountants({"cuda": 5})
