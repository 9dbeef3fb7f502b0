"""Settings: typed fields, string keys in every spelling, and refusals that name key and value."""

import dataclasses
import inspect
import pickle
import re

import numpy as np
import pytest
from helpers.child import python
from hypothesis import given, settings
from hypothesis import strategies as st

import gpumem
from gpumem import ArenaConfig, ConfigError, PoolConfig

MIB = 1 << 20

DEFAULTS = {
    "extend_strategy": "next_power_of_two",
    "initial_chunk_size_bytes": MIB,
    "max_dead_bytes_per_chunk": 128 * MIB,
    "initial_growth_chunk_size_bytes": 2 * MIB,
    "max_power_of_two_extend_bytes": 1024 * MIB,
    "max_mem": 0,
    "use_cuda_mempool": False,
    "cuda_mempool_release_threshold": 0,
    "cuda_mempool_bytes_to_keep_on_shrink": 0,
    "backing": "auto",
    "split_rule": "tight",
    "stream_reuse": "completed",
    "numa_node": None,
    "peers": "on_use",
    "enable": True,
}


@pytest.mark.parametrize(("field", "value"), DEFAULTS.items())
def test_arena_config_defaults(field, value):
    assert getattr(ArenaConfig(), field) == value


SPELLINGS = ["{}", "arena.{}", "ep.cuda.arena.{}", "ep_factory.CUDA.arena.{}", "ep.Cuda.{}"]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", [None, "cuda", "CUDA"])
def test_key_may_be_bare_or_prefixed_in_any_case(spelling, name):
    config = ArenaConfig.from_mapping({spelling.format("max_mem"): "12345"}, name)
    assert config.max_mem == 12345


def test_key_with_a_foreign_prefix_is_refused():
    with pytest.raises(ConfigError, match="is for 'cuda', not for 'webgpu'"):
        ArenaConfig.from_mapping({"ep.cuda.arena.max_mem": "1"}, "webgpu")


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("cuda", 1), ("cuda:0", 1), ("CUDA:3/device", 1), ("cuda:1/managed", 2), ("host:4", 3),
        ("host/host", 3), ("cuda:0/managed", 0), ("host/managed", 0),
    ],
)  # fmt: skip
def test_one_mapping_holds_the_settings_of_several_devices(name, limit):
    keys = {
        "ep.cuda.arena.max_mem": "1",
        "ep.cuda:1/managed.arena.max_mem": "2",
        "ep.Host.arena.max_mem": "3",
        "arena.oom_wait_ms": "4",
    }
    config = ArenaConfig.from_mapping(keys, name)
    assert (config.max_mem, config.oom_wait_ms) == (limit, 4)
    with pytest.raises(ConfigError, match=r"ep\.cuda:7\.arena\.max_mem"):
        ArenaConfig.from_mapping({"ep.cuda:7.arena.max_mem": "-1"}, name)


@pytest.mark.parametrize(
    "key",
    ["", "arena.", "max_memory", "arena.arena.max_mem", "ep.max_mem", "ep..arena.max_mem",
     "ep.a.b.arena.max_mem", "session.max_mem", "MAX_MEM", "ARENA.max_mem", "EP.cuda.max_mem",
     " max_mem", "max_mem ", "max_mem\n", 5,
     None],
)  # fmt: skip
def test_unknown_key_is_refused_by_name(key):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        ArenaConfig.from_mapping({key: "1"})
    assert repr(key) in str(caught.value)
    assert "max_mem" in str(caught.value)


NUMBERS = [field for field, value in DEFAULTS.items() if type(value) is int]
BAD_NUMBERS = ["", "-1", "+1", "1.0", "1e6", "1 ", " 1", "1k", "0x10", "1_000", "\u0661",
               "9" * 20, "9" * 5000, "1.", "1,", "-0", 1.0, -1, True, None, [],
               1 << 64, 10**5000]  # fmt: skip


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=range(len(BAD_NUMBERS)))
@pytest.mark.parametrize("field", NUMBERS)
def test_malformed_number_is_refused_with_key_value_and_range(field, value):
    if field == "max_mem" and value is None:
        return  # no limit
    told = r"an integer from [01] to|k is ambiguous|bytes are an integer"
    with pytest.raises(ConfigError, match=told) as caught:
        ArenaConfig.from_mapping({f"arena.{field}": value})
    assert f"arena.{field}" in str(caught.value)
    with pytest.raises(ConfigError, match=f"^invalid {field} = "):
        ArenaConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("initial_chunk_size_bytes", 1, (1 << 63) - 1),
        ("max_dead_bytes_per_chunk", 1, (1 << 63) - 1),
        ("initial_growth_chunk_size_bytes", 1, (1 << 63) - 1),
        ("max_power_of_two_extend_bytes", 1, (1 << 63) - 1),
        ("max_mem", 0, (1 << 63) - 1),
        ("cuda_mempool_release_threshold", 0, (1 << 64) - 1),
        ("cuda_mempool_bytes_to_keep_on_shrink", 0, (1 << 64) - 1),
    ],
)
def test_ends_of_a_range_are_accepted_and_values_outside_are_refused(field, low, high):
    for value in (low, high, str(low), str(high), np.int64(low)):
        assert getattr(ArenaConfig.from_mapping({field: value}), field) == int(value)
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError, match=f"from {low} to {high}"):
            ArenaConfig(**{field: value})


SIZES = [field for field in NUMBERS if field != "oom_wait_ms"]


@pytest.mark.parametrize("field", SIZES)
def test_bytes_may_have_a_unit(field):
    assert getattr(ArenaConfig(**{field: "512MiB"}), field) == 512 << 20
    text = ArenaConfig.from_mapping({f"arena.{field}": "1.5 GB"}).to_mapping()
    assert text[f"arena.{field}"] == "1500000000"


@pytest.mark.parametrize("value", ["512MiBs", "MiB", "1.5B", "-1GiB", "9000000TiB", "1 2MiB"])
@pytest.mark.parametrize("field", SIZES)
def test_invalid_size_is_refused_with_key_value_and_range(field, value):
    with pytest.raises(ConfigError, match=f"^invalid {field} = '{value}': expected .*512MiB"):
        ArenaConfig(**{field: value})


def test_number_of_milliseconds_has_no_unit_of_bytes():
    with pytest.raises(ConfigError, match="invalid oom_wait_ms = '1kB'"):
        ArenaConfig(oom_wait_ms="1kB")


@pytest.mark.parametrize(
    ("made", "config"), [(gpumem.Arena, ArenaConfig), (gpumem.DriverPool, gpumem.PoolConfig)]
)
def test_settings_may_be_keywords(made, config):
    name = "max_mem" if config is ArenaConfig else "max_size"
    expected = config(**{name: 64 << 20})
    assert made("host", **{name: "64MiB"}).config == expected
    assert made("host", {name: 64 << 20}, **{name: "64MiB"}).config == expected
    assert made("host", config(**{name: 1 << 30}), **{name: "64MiB"}).config == expected
    with pytest.raises(ConfigError, match=f"{name} is given twice with different values"):
        made("host", {f"arena.{name}": 1 << 30}, **{name: "64MiB"})
    with pytest.raises(TypeError, match=f"unknown keyword 'limit': did you mean '{name}'"):
        made("host", limit=5)
    with pytest.raises(ConfigError, match=f"invalid {name} = 'much'"):
        made("host", **{name: "much"})


@pytest.mark.parametrize(
    ("field", "value", "means"),
    [
        ("extend_strategy", "0", "next_power_of_two"),
        ("extend_strategy", 0, "next_power_of_two"),
        ("extend_strategy", "1", "same_as_requested"),
        ("extend_strategy", "same_as_requested", "same_as_requested"),
        ("stream_reuse", "wait", "wait"),
        ("split_rule", "tight", "tight"),
        ("backing", "regions", "regions"),
        ("use_cuda_mempool", "1", True),
        ("use_cuda_mempool", "false", False),
        ("enable", "0", False),
        ("enable", "FALSE", False),
        ("enable", 0, False),
        ("enable", "true", True),
        ("enable", True, True),
    ],
)
def test_choice_is_given_by_name_or_number(field, value, means):
    assert getattr(ArenaConfig.from_mapping({field: value}), field) == means


@pytest.mark.parametrize("value", ["", "2", 2, "other", None, True, 1.0, " wait", "Wait", "0 "])
@pytest.mark.parametrize("field", ["extend_strategy", "stream_reuse", "split_rule", "backing"])
def test_unknown_choice_is_refused_with_the_accepted_ones(field, value):
    with pytest.raises(ConfigError, match="expected one of") as caught:
        ArenaConfig.from_mapping({field: value})
    assert repr(value) in str(caught.value)
    assert repr(getattr(ArenaConfig(), field)).replace("'", '"') in str(caught.value)


@pytest.mark.parametrize("field", ["enable", "use_cuda_mempool"])
@pytest.mark.parametrize("value", ["", "yes", "on", "1 ", "01", "2", 2, -1, None, 1.0, 0.0])
def test_malformed_bool_is_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field} = .*: expected true or false"):
        ArenaConfig.from_mapping({field: value})


@pytest.mark.parametrize("value", ["", "-0.1", "1e3", "1001", "0.5 ", "nan", "inf", float("nan"),
                                   -1, 1001.0, True, None, "0.1.2", ".5"])  # fmt: skip
def test_malformed_fraction_is_refused(value):
    with pytest.raises(ConfigError, match=r"page_move_threshold = .* a number from 0 to 1000"):
        ArenaConfig.from_mapping({"page_move_threshold": value})


@pytest.mark.parametrize("field", ["max_mem", "extend_strategy", "enable", "page_move_budget"])
@pytest.mark.parametrize(
    "value",
    [10**5000, [10**5000], -(10**5000), "9" * 5000],
    ids=["int", "list", "negative", "text"],
)
def test_value_of_thousands_of_digits_is_refused_in_a_short_line(field, value):
    for read in (ArenaConfig.from_mapping, gpumem.SessionOptions.from_mapping, gpumem.Environment):
        with pytest.raises(ConfigError, match=f"invalid .*{field} = ") as refused:
            read({f"arena.{field}": value})
        assert len(str(refused.value)) < 500


def test_key_with_control_characters_is_shown_escaped():
    for values in (("x", "y"), ("1", "2")):
        keys = ("ep.\x1b[2J.arena.max_mem", "ep.\x7f.arena.max_mem")
        with pytest.raises(ConfigError, match=r"max_mem") as refused:
            ArenaConfig.from_mapping(dict(zip(keys, values, strict=True)))
        assert str(refused.value).isprintable()


def test_key_of_thousands_of_digits_is_refused():
    for config in (ArenaConfig, gpumem.SessionOptions):
        with pytest.raises(ConfigError, match="unknown key of type int and too large to show"):
            config.from_mapping({10**5000: 1})


def test_conflicting_duplicate_option_is_refused_naming_both():
    with pytest.raises(ConfigError, match="given twice") as caught:
        ArenaConfig.from_mapping({"max_mem": 1, "ep.cuda.arena.max_mem": "2"})
    assert "max_mem = 1" in str(caught.value)
    assert "ep.cuda.arena.max_mem = '2'" in str(caught.value)


def test_consistent_duplicate_option_is_accepted():
    config = ArenaConfig.from_mapping({"max_mem": 7, "arena.max_mem": "7", "ep.x.max_mem": "007"})
    assert config.max_mem == 7


def test_conflicting_aliases_of_an_option_are_refused():
    with pytest.raises(ConfigError, match=r"ep\.a\.max_mem = '1' and ep_factory\.b\.max_mem = '2'"):
        ArenaConfig.from_mapping({"ep.a.max_mem": "1", "ep_factory.b.max_mem": "2"})


@pytest.mark.parametrize("mapping", [5, "max_mem=1", [("max_mem", 1)], PoolConfig()])
def test_config_from_a_non_mapping_is_a_type_error(mapping):
    with pytest.raises(
        TypeError, match=f"takes ArenaConfig or a mapping, not {type(mapping).__name__}"
    ):
        ArenaConfig.from_mapping(mapping)
    with pytest.raises(TypeError):
        gpumem.Arena("host", mapping)


configs = st.builds(
    ArenaConfig,
    use_cuda_mempool=st.booleans(),
    cuda_mempool_release_threshold=st.integers(0, (1 << 64) - 1),
    cuda_mempool_bytes_to_keep_on_shrink=st.integers(0, (1 << 64) - 1),
    backing=st.sampled_from(["auto", "regions", "virtual"]),
    page_move_threshold=st.floats(0, 1000),
    extend_strategy=st.sampled_from(["next_power_of_two", "same_as_requested"]),
    initial_chunk_size_bytes=st.integers(1, (1 << 63) - 1),
    max_dead_bytes_per_chunk=st.integers(1, (1 << 63) - 1),
    initial_growth_chunk_size_bytes=st.integers(1, (1 << 63) - 1),
    max_power_of_two_extend_bytes=st.integers(1, (1 << 63) - 1),
    max_mem=st.integers(0, (1 << 63) - 1),
    split_rule=st.sampled_from(["tight", "ort"]),
    stream_reuse=st.sampled_from(["completed", "wait", "never"]),
    enable=st.booleans(),
)


pools = st.builds(
    PoolConfig,
    release_threshold=st.integers(0, (1 << 64) - 1),
    bytes_to_keep_on_shrink=st.integers(0, (1 << 64) - 1),
    max_size=st.integers(0, (1 << 63) - 1),
    shareable=st.booleans(),
    reuse_follow_event_dependencies=st.booleans(),
    reuse_allow_opportunistic=st.booleans(),
    reuse_allow_internal_dependencies=st.booleans(),
)


@settings(max_examples=200)  # of both classes
@given(config=configs | pools)
def test_config_round_trips_through_text(config):
    text = config.to_mapping()
    assert all(isinstance(part, str) for item in text.items() for part in item)
    assert set(text) == {f"arena.{field.name}" for field in dataclasses.fields(config)}
    assert type(config).from_mapping(text) == config
    assert type(config).from_text(config.to_text()) == config


def test_one_string_holds_all_options():
    text = ArenaConfig(max_mem=5, stream_reuse="wait", enable=False).to_text()
    assert {"max_mem=5", "stream_reuse=wait", "enable=0"} <= set(text.split(","))
    assert ArenaConfig.from_text("") == ArenaConfig()
    assert ArenaConfig.from_text("ep.cuda.arena.max_mem=5,arena.enable=0").max_mem == 5


@pytest.mark.parametrize("text", ["max_mem", "max_mem=1,", "max_mem=1,max_mem=2", "max_mem=1 ",
                                  "=", "max_mem=1, enable=0", "max_mem=1=2"])  # fmt: skip
def test_malformed_config_text_is_refused(text):
    with pytest.raises(ConfigError):
        ArenaConfig.from_text(text)


# ---- settings of the driver's pool ---------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["cuda_mempool_release_threshold", "cuda_mempool_bytes_to_keep_on_shrink"]
)
def test_pool_option_without_a_pool_is_refused(field):
    config = ArenaConfig.from_mapping({f"arena.{field}": "4096"})
    assert getattr(config, field) == 4096
    with pytest.raises(ConfigError, match=f"{field} = 4096 has no effect without use_cuda_mempool"):
        gpumem.Arena("host", config)
    gpumem.Arena("host", {field: 0}).close()


def test_arena_with_the_pool_option_is_refused_naming_from_config():
    with pytest.raises(ConfigError, match=r"use_cuda_mempool = True .*from_config"):
        gpumem.Arena("host", {"arena.use_cuda_mempool": "1"})


def test_pool_config_accepts_the_pool_option():
    assert PoolConfig.from_mapping({"ep.cuda.arena.use_cuda_mempool": "1"}) == PoolConfig()
    with pytest.raises(ConfigError, match=r"invalid arena\.use_cuda_mempool = '0'"):
        PoolConfig.from_mapping({"arena.use_cuda_mempool": "0"})


@pytest.mark.parametrize(
    ("reuse", "policies"),
    [
        ("completed", (True, True, False)),
        ("wait", (True, True, True)),
        ("never", (False, False, False)),
    ],
)
def test_arena_config_converts_to_a_pool_config(reuse, policies):
    config = ArenaConfig(
        use_cuda_mempool=True,
        cuda_mempool_release_threshold=1,
        cuda_mempool_bytes_to_keep_on_shrink=2,
        max_mem=3,
        stream_reuse=reuse,
    )
    assert PoolConfig.from_arena(config) == PoolConfig(1, 2, 3, False, *policies)


@pytest.mark.parametrize(("field", "value"), [("enable", False), ("use_cuda_mempool", False)])
def test_options_unsupported_by_pools_are_refused(field, value):
    config = dataclasses.replace(ArenaConfig(use_cuda_mempool=True), **{field: value})
    with pytest.raises(ConfigError, match=f"invalid {field} = False"):
        PoolConfig.from_arena(config)


def test_configs_are_values():
    assert ArenaConfig(max_mem=5) == ArenaConfig(max_mem="5")
    assert hash(ArenaConfig()) == hash(ArenaConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ArenaConfig().max_mem = 5
    assert dataclasses.replace(ArenaConfig(max_mem=5), oom_wait_ms=1) == ArenaConfig(
        max_mem=5, oom_wait_ms=1
    )


def test_split_rule_that_was_not_set_follows_the_backing():
    given = ArenaConfig(backing="regions")
    assert given.split_rule == "ort"
    for backing in ("auto", "virtual"):
        assert dataclasses.replace(given, backing=backing).split_rule == "tight"
        with gpumem.Arena("host", given, backing=backing) as arena:
            assert (arena.backing, arena.config.split_rule) == ("virtual", "tight")
    again = pickle.loads(pickle.dumps(given))
    assert again == given
    assert dataclasses.replace(again, backing="auto").split_rule == "tight"
    kept = dataclasses.replace(ArenaConfig(split_rule="ort"), backing="auto")
    assert kept.split_rule == "ort"


def test_signature_shows_the_settings():
    assert [*inspect.signature(ArenaConfig).parameters][:2] == [*DEFAULTS][:2]
    assert "oom_wait_ms" in inspect.signature(ArenaConfig).parameters


def test_pickle_is_read_where_no_object_was_made_before():
    data = pickle.dumps(ArenaConfig(max_mem=5))
    program = f"import pickle; print(pickle.loads({data!r}).max_mem, pickle.loads({data!r}))"
    assert python("-c", program).stdout.startswith("5 ArenaConfig(")


def test_settings_do_not_depend_on_which_class_was_used_first():
    for first, then in (("ArenaConfig", "PoolConfig"), ("PoolConfig", "ArenaConfig")):
        program = f"import gpumem; gpumem.{first}(); print(gpumem.{then}())"
        assert python("-c", program).stdout.startswith(f"{then}(")


def test_arena_accepts_a_config_or_a_mapping(make_arena):
    config = ArenaConfig(max_mem=MIB)
    assert make_arena(config).config is config
    assert make_arena({"ep_factory.host.arena.max_mem": str(MIB)}).config == config
    assert make_arena().config == ArenaConfig()
    assert make_arena(config).stats().limit == MIB


MAKERS = [gpumem.Arena, gpumem.MemoryResource.from_config]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("prefix", ["ep", "ep_factory"])
def test_keys_of_other_memory_do_not_apply(make, prefix):
    key = f"{prefix}.{{}}.arena.max_mem"
    for other in ("cuda", "cuda:0", "host:1", "host/managed", "host:00/host_accessible"):
        assert make("host", {key.format(other): MIB}).config.max_mem == 0
        both = {key.format(other): MIB, key.format("host:00"): 2 * MIB}
        assert make("host", both).config.max_mem == 2 * MIB
        with pytest.raises(ConfigError, match="max_mem = '-1'"):
            make("host", {key.format(other): "-1"})
    assert make("host/managed", {key.format("host/managed"): MIB}).config.max_mem == MIB
    assert make("host/managed", {key.format("host"): MIB}).config.max_mem == 0


@pytest.mark.parametrize("make", MAKERS)
def test_keys_of_a_memorys_own_name_apply_and_names_of_no_memory_are_refused(make):
    named = gpumem.MemoryInfo("host", name="Mine")
    for name in ("mine", "host", "host:0"):
        assert make(named, {f"ep.{name}.arena.max_mem": MIB}).config.max_mem == MIB
    assert make(named, {"ep.cuda.arena.max_mem": MIB}).config.max_mem == 0
    for memory, names in (("host", "'host:0'"), (named, "'host:0' or 'Mine'")):
        with pytest.raises(ConfigError, match=f"is for 'gpu', not for {names}"):
            make(memory, {"ep.gpu.arena.max_mem": MIB})


def test_pool_takes_the_keys_of_its_memory():
    keys = {"ep.cuda.arena.max_size": 2 * MIB, "ep.host.arena.max_size": 4 * MIB}
    assert gpumem.DriverPool("host", keys).config.max_size == 4 * MIB


def test_without_a_name_two_names_with_two_values_are_refused():
    keys = {"ep.cuda.arena.max_mem": "1", "ep.host.arena.max_mem": "2"}
    with pytest.raises(ConfigError, match="given twice"):
        ArenaConfig.from_mapping(keys)
    assert ArenaConfig.from_mapping(keys, "host").max_mem == 2


@pytest.mark.parametrize("text", ["", " "])
def test_peers_of_an_empty_text_are_refused(text):
    with pytest.raises(ConfigError, match=r'invalid peers = .* "on_use", "none", or devices'):
        ArenaConfig(peers=text)
    assert ArenaConfig(peers=[]).peers == "none"


def test_unknown_key_and_keyword_name_the_setting_that_was_meant():
    meant = "did you mean 'max_mem'\\? "
    for call, error in (
        (lambda: gpumem.Arena("host", {"max_men": 1}), ConfigError),
        (lambda: gpumem.Arena("host", {"ep.cuda.arena.max_men": 1}), ConfigError),
        (lambda: gpumem.Arena("host", {"limit": 1}), ConfigError),
        (lambda: gpumem.Arena("host", {"arena.gpu_mem_limit": 1}), ConfigError),
        (lambda: gpumem.Arena("host", max_men=1), TypeError),
        (lambda: ArenaConfig(max_men=1), TypeError),
        (lambda: ArenaConfig(limit=1), TypeError),
    ):
        with pytest.raises(error, match=f"^unknown key.*: {meant}.* takes .*max_mem"):
            call()
    with pytest.raises(TypeError, match="'nam': did you mean 'name'"):
        gpumem.DriverPool("host", nam="x")
    with pytest.raises(ConfigError, match=r"'colour': an arena takes extend_strategy"):
        gpumem.Arena("host", {"colour": 1})


@pytest.mark.parametrize(
    ("made", "field"), [(gpumem.Arena, "max_mem"), (gpumem.DriverPool, "max_size")]
)
def test_limit_by_position_names_the_keyword(made, field):
    for limit in ("1GiB", 1 << 30):
        with pytest.raises(TypeError, match=f"a mapping, not .*; for a limit: {field}={limit!r}"):
            made("host", limit)
    with pytest.raises(TypeError, match=r"a mapping, not list$"):
        made("host", [])


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("1G", 'G is ambiguous, write "1GiB" or "1GB"'),
        ("20 m", 'm is ambiguous, write "20MiB" or "20MB"'),
        ("1.5k", 'k is ambiguous, write "1.5KiB" or "1.5kB"'),
        (1e9, r'bytes are an integer, write int\(1e9\) or "1GB"'),
        (1.5e9, r'write int\(1.5e9\) or "1500MB"'),
        (2.0**34, r'write int\(17179869184.0\) or "16GiB"'),
    ],
)
def test_size_that_is_nearly_one_is_told_how_to_write_it(size, told):
    for call, error in (
        (lambda: gpumem.Arena("host", max_mem=size), ConfigError),
        (lambda: gpumem.Budget(size), TypeError),
        (lambda: gpumem.Arena("host").allocate(size), TypeError),
    ):
        with pytest.raises(error, match=f"^invalid .* = {re.escape(repr(size))}: .*{told}$"):
            call()


def test_limit_of_none_is_no_limit():
    assert ArenaConfig(max_mem=None) == ArenaConfig(max_mem=0) == ArenaConfig()
    assert ArenaConfig.from_mapping({"max_mem": None}).max_mem == 0
    assert gpumem.Arena("host", max_mem=None).stats().limit is None
    assert gpumem.DriverPool("host", max_size=None).config.max_size == 0


def test_settings_have_the_signature_of_their_fields():
    parameters = list(inspect.signature(ArenaConfig).parameters)
    assert parameters == [each.name for each in dataclasses.fields(ArenaConfig)]


def test_arena_refuses_an_invalid_option():
    with pytest.raises(ConfigError, match="unknown key 'max_memory'") as caught:
        gpumem.Arena("host", {"max_memory": 1})
    assert isinstance(caught.value, ValueError)


# ---- settings without effect ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"max_dead_bytes_per_chunk": 4096}, "split_rule"),
        ({"max_dead_bytes_per_chunk": 4096, "backing": "regions", "split_rule": "tight"}, "ort"),
        ({"extend_strategy": "same_as_requested", "backing": "virtual"}, "regions"),
        ({"initial_chunk_size_bytes": 4096, "backing": "virtual"}, "regions"),
        ({"initial_growth_chunk_size_bytes": 4096, "backing": "virtual"}, "regions"),
        ({"max_power_of_two_extend_bytes": 4096, "backing": "virtual"}, "regions"),
        ({"initial_chunk_size_bytes": 4096, "extend_strategy": "1"}, "next_power_of_two"),
        ({"page_move_threshold": 0, "backing": "regions"}, "pages"),
        ({"page_move_budget": 1, "backing": "regions"}, "pages"),
        ({"page_move_budget": 1, "max_mem": MIB}, "pages"),
        ({"stream_reuse": "wait", "enable": False}, "enable = False"),
        ({"split_rule": "ort", "enable": False}, "enable = False"),
    ],
)
def test_setting_without_effect_gives_a_warning(config, why):
    name = next(iter(config))
    with pytest.warns(gpumem.errors.ConfigWarning, match=f"{name} = .*no effect.*{why}") as given:
        gpumem.Arena("host", config).close()
    assert len(given) == 1
    assert given[0].filename == __file__


@pytest.mark.parametrize(
    "config",
    [
        {"max_dead_bytes_per_chunk": 4096, "split_rule": "ort"},
        {"max_dead_bytes_per_chunk": 4096, "backing": "regions"},
        {"extend_strategy": "same_as_requested"},
        {"initial_growth_chunk_size_bytes": 4096, "max_power_of_two_extend_bytes": 1 << 20},
        {"page_move_threshold": 0, "page_move_budget": 1, "backing": "virtual"},
        {"page_move_threshold": 0},
        {"oom_wait_ms": 0, "stream_reuse": "wait"},
        {"enable": False, "max_mem": MIB},
    ],
)
def test_setting_with_effect_gives_no_warning(config):
    gpumem.Arena("host", config).close()  # a warning is an error in tests


def test_defaults_written_out_give_no_warning():
    for backing in ("auto", "regions", "virtual"):
        config = dataclasses.asdict(ArenaConfig(backing=backing))
        gpumem.Arena("host", ArenaConfig(**config)).close()


# ---- shares of a device's memory ----------------------------------------------------------------


def test_limit_is_a_share_of_the_devices_memory_wherever_a_memory_is_known():
    total = gpumem.Device("host").total_bytes
    with gpumem.Environment({"ep_factory.host.arena.max_mem": "50%"}) as environment:
        limits = {
            environment.register("host").limit,
            environment.register("host", max_mem="50%").limit,
            gpumem.Arena("host", max_mem=" 50 %").limit,
            gpumem.Arena("host", {"arena.max_mem": "50.0%"}).limit,
            gpumem.Arena("host", ArenaConfig(max_mem=1), max_mem="50%").limit,
            gpumem.DriverPool("host", max_size="50%").config.max_size,
        }
    assert limits == {total // 2}
    arena = gpumem.Arena("host")
    arena.limit = "25%"
    assert arena.limit == total // 4
    arena.set_limit("100%")
    assert arena.limit == total
    assert gpumem.Arena("host/host_accessible", max_mem="50%").limit == total // 2


@pytest.mark.parametrize("share", ["0%", "0.0%", "100.1%", "101%", "-1%", "%", "all%", "1e1%"])
def test_other_shares_are_refused_with_the_accepted_ones(share):
    arena = gpumem.Arena("host", max_mem="1MiB")
    for call in (
        lambda: gpumem.Arena("host", max_mem=share),
        lambda: gpumem.Arena("host", {"max_mem": share}),
        lambda: gpumem.DriverPool("host", max_size=share),
        lambda: gpumem.Environment({"arena.max_mem": share}),
        lambda: arena.set_limit(share),
    ):
        with pytest.raises(ConfigError, match="above 0% and at most 100%"):
            call()
    assert arena.limit == 1 << 20


def test_share_without_a_memory_is_refused():
    budget = gpumem.Budget("1MiB")
    for call in (
        lambda: gpumem.Budget("80%"),
        lambda: gpumem.Budget("80%", node="gpu0"),
        lambda: setattr(budget, "limit", "80%"),
    ):
        with pytest.raises(ConfigError, match="limit = '80%': expected bytes; a percentage"):
            call()
    assert budget.limit == 1 << 20
    with pytest.raises(ConfigError, match="Arena and DriverPool, which have a memory"):
        ArenaConfig(max_mem="80%")
    with pytest.raises(ConfigError, match="expected an integer from 0"):
        gpumem.Arena("host", oom_wait_ms="50%")
