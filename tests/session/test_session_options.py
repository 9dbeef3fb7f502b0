"""SessionOptions: every option, every spelling, and what does not go together."""

from __future__ import annotations

import re

import pytest

import gpumem
from gpumem import ConfigError, SessionOptions


def alloc(nbytes):
    return 0


def free(ptr):
    pass


def test_session_option_defaults():
    options = SessionOptions()
    assert options.do_copy_in_default_stream
    assert not options.has_user_compute_stream
    assert not options.unified_stream
    assert (options.external_allocator, options.arena) == (None, None)


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "True", 1, True])
def test_booleans_are_read_in_any_case(text):
    assert SessionOptions.from_mapping({"enable_cuda_graph": text}).enable_cuda_graph


@pytest.mark.parametrize(
    "key", ["use_ep_level_unified_stream", "ep.cuda.use_ep_level_unified_stream"]
)
def test_keys_may_have_a_prefix(key):
    assert SessionOptions.from_mapping({key: "1"}).use_ep_level_unified_stream


@pytest.mark.parametrize(
    ("text", "handle"), [("4096", 4096), ("0x1000", 4096), ("0XFF00", 0xFF00), ("1", 1)]
)
def test_stream_may_be_given_as_text(text, handle):
    options = SessionOptions.from_mapping({"user_compute_stream": text})
    assert options.user_compute_stream == handle
    assert options.has_user_compute_stream
    assert options.use_ep_level_unified_stream


def test_stream_zero_is_legal_with_the_flag():
    options = SessionOptions(user_compute_stream=0, has_user_compute_stream=True)
    assert options.unified_stream
    text = {"user_compute_stream": "0", "has_user_compute_stream": "1"}
    assert SessionOptions.from_mapping(text).user_compute_stream == 0


def test_external_allocator_forces_the_unified_stream():
    assert SessionOptions(external_allocator=(alloc, free)).use_ep_level_unified_stream


def test_callbacks_may_be_given_as_separate_options():
    keys = {"ep.cuda.gpu_external_alloc": "0x1000", "gpu_external_free": "8192"}
    assert SessionOptions.from_mapping(keys).external_allocator == (4096, 8192, None)
    whole = SessionOptions(external_allocator={"alloc": alloc, "free": free})
    assert whole.external_allocator == (alloc, free, None)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"enable_cuda_graph": "yes"}, "enable_cuda_graph = 'yes'"),
        ({"enable_cuda_graph": None}, "enable_cuda_graph = None"),
        ({"has_user_compute_stream": "2"}, "has_user_compute_stream = '2'"),
        ({"user_compute_stream": "0x"}, "user_compute_stream = '0x'"),
        ({"user_compute_stream": "12ab"}, "'12ab'"),
        ({"user_compute_stream": " 1"}, "' 1'"),
        ({"user_compute_stream": "-1"}, "'-1'"),
        ({"user_compute_stream": -1}, "-1"),
        ({"user_compute_stream": 1 << 64}, "2\\*\\*64"),
        ({"user_compute_stream": True}, "True"),
        ({"user_compute_stream": "99999999999999999999"}, "2\\*\\*64"),
        ({"nonsense": 1}, "unknown key 'nonsense'"),
        ({"ep_factory.cuda.enable_cuda_graph": 1}, "unknown key"),
        ({"ep.cuda.gpu_mem_limit": 1}, "did you mean 'arena.max_mem'"),
        ({"enable_cpu_mem_arena": "0"}, "did you mean 'arena.enable'"),
        ({"session.strict_workspace_verification": "1"}, "did you mean 'gpumem.planning.partition"),
        ({"arena_extend_strategy": 1}, "did you mean 'arena.extend_strategy'"),
        ({3: 1}, "unknown key 3"),
        ({"arena.nonsense": 1}, "arena.nonsense"),
        ({"arena.max_mem": "1x"}, "arena.max_mem = '1x'"),
        ({"arena": 3}, "arena = 3"),
        ({"arena": {}, "arena.max_mem": 1}, "arena is given twice"),
        ({"enable_cuda_graph": 1, "ep.cuda.enable_cuda_graph": 0}, "given twice"),
        ({"external_allocator": 3}, "external_allocator = 3"),
        ({"external_allocator": (alloc,)}, "external_allocator"),
        ({"external_allocator": (alloc, 1.5)}, "free = 1.5"),
        ({"external_allocator": {"alloc": alloc, "fre": free}}, "unknown key 'fre'"),
        ({"external_allocator": (alloc, free), "gpu_external_free": 1}, "given twice"),
    ],
)
def test_invalid_value_names_the_key_and_accepted_values(keys, told):
    with pytest.raises(ConfigError, match=told):
        SessionOptions.from_mapping(keys)


@pytest.mark.parametrize(
    "parts",
    [
        {"gpu_external_alloc": "4096"},
        {"gpu_external_free": "4096"},
        {"gpu_external_empty_cache": "4096"},
        {"gpu_external_alloc": "4096", "gpu_external_empty_cache": "4096"},
        {"gpu_external_alloc": "4096", "gpu_external_free": "0"},
        {"external_allocator": (alloc, None)},
        {"external_allocator": (None, free, free)},
    ],
)
def test_incomplete_callbacks_are_refused(parts):
    with pytest.raises(ConfigError, match="alloc and free are given together"):
        SessionOptions.from_mapping(parts)


@pytest.mark.parametrize("bad", [-1, 1 << 64, pytest.param(1 << 20_000, id="2**20000"), True, 1.5])
@pytest.mark.parametrize("place", range(3))
def test_callbacks_by_address_are_within_the_address_space(place, bad):
    parts = [4096, 8192, 12288]
    parts[place] = bad
    with pytest.raises(ConfigError, match=r"external_allocator's .*an address below 2\*\*64"):
        SessionOptions(external_allocator=tuple(parts))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_mem": 1 << 20_000}, "invalid max_mem = of type int and too large to show"),
        ({"nonsense": 1}, "unknown key 'nonsense'"),
    ],
)
def test_settings_of_the_arena_are_checked_when_options_are_made(settings, told):
    with pytest.raises(ConfigError, match=told):
        SessionOptions(arena=settings)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"has_user_compute_stream": True}, "without user_compute_stream"),
        ({"user_compute_stream": 0}, "without has_user_compute_stream"),
        (
            {"user_compute_stream": 7, "has_user_compute_stream": False},
            "expected True, or no stream",
        ),
        (
            {"user_compute_stream": 7, "external_allocator": (alloc, free)},
            "combined with user_compute_stream",
        ),
        ({"external_allocator": (alloc, free), "arena": {}}, "no effect with external_allocator"),
        ({"external_allocator": (alloc, free), "arena.max_mem": 1}, "no effect"),
        ({"external_allocator": (alloc, free), "private_arena": True}, "no effect"),
        (
            {"user_compute_stream": 0, "has_user_compute_stream": True, "enable_cuda_graph": True},
            "cannot be captured",
        ),
        ({"user_compute_stream": 1, "enable_cuda_graph": True}, "cannot be captured"),
        (
            {"do_copy_in_default_stream": False, "use_ep_level_unified_stream": True},
            "do_copy_in_default_stream = False",
        ),
        ({"do_copy_in_default_stream": False, "user_compute_stream": 7}, "forced by user"),
        (
            {"do_copy_in_default_stream": False, "external_allocator": (alloc, free)},
            "forced by external",
        ),
    ],
)
def test_incompatible_options_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        SessionOptions.from_mapping(options)
    with pytest.raises(ConfigError, match=told):
        gpumem.Session("host", options)


def test_user_stream_may_be_captured():
    assert SessionOptions(user_compute_stream=7, enable_cuda_graph=True).unified_stream


def test_keys_with_a_foreign_prefix_are_refused():
    with pytest.raises(ConfigError, match="not for 'host'"):
        SessionOptions.from_mapping({"ep.webgpu.enable_cuda_graph": 1}, "host")


def test_one_mapping_holds_the_options_of_several_devices():
    keys = {
        "ep.host.enable_cuda_graph": "1",
        "ep.cuda.enable_cuda_graph": "0",
        "ep.cuda:1.use_ep_level_unified_stream": "1",
        "ep.cuda:1.arena.max_mem": "2097152",
        "ep.host.arena.max_mem": "1048576",
    }
    for name, expected in {
        "host": (True, False),
        "host:0": (True, False),
        "HOST:1": (True, False),
        "cuda": (False, False),
        "cuda:1": (False, True),
    }.items():
        options = SessionOptions.from_mapping(keys, name)
        assert (options.enable_cuda_graph, options.unified_stream) == expected, name
    options = SessionOptions.from_mapping(keys, "host")
    with gpumem.Session("host", options) as session:
        assert session.allocator().config.max_mem == 1048576
    with pytest.raises(ConfigError, match=r"ep\.cuda\.enable_cuda_graph"):
        SessionOptions.from_mapping({"ep.cuda.enable_cuda_graph": "maybe"}, "host")


@pytest.mark.parametrize("mapping", [None, 3, [("enable_cuda_graph", 1)]])
def test_options_from_a_non_mapping_are_a_type_error(mapping):
    with pytest.raises(TypeError, match="mapping"):
        SessionOptions.from_mapping(mapping)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [], {"alloc": float("nan")}])
def test_external_allocator_that_is_none_is_refused(value):
    with pytest.raises(ConfigError, match="external_allocator"):
        SessionOptions.from_mapping({"external_allocator": value})


# ---- options as keywords -------------------------------------------------------------------------


def test_session_takes_its_options_as_keywords():
    with gpumem.Session("host", private_arena=True, arena={"max_mem": "1MiB"}) as session:
        assert session.options.private_arena
        assert session.allocator().config.max_mem == 1 << 20
    with pytest.raises(TypeError, match=r"Session.* with options takes environment"):
        gpumem.Session("host", {}, private_arena=True)


def test_setting_of_an_arena_given_to_a_session_is_answered_with_its_place():
    with pytest.raises(TypeError, match=re.escape("""did you mean 'arena={"max_mem": ...}'?""")):
        gpumem.Session("host", max_mem="1GiB")
    with pytest.raises(gpumem.ConfigError, match=re.escape("did you mean 'arena.max_mem'?")):
        gpumem.Session("host", {"max_mem": "1GiB"})
    with pytest.raises(TypeError, match="'_arena_keys'"):
        gpumem.Session("host", _arena_keys={})


def test_register_takes_settings_as_keywords_over_those_of_the_environment():
    with gpumem.Environment({"arena.max_mem": "4MiB", "arena.oom_wait_ms": 5}) as environment:
        config = environment.register("host", max_mem="1MiB").config
        assert (config.max_mem, config.oom_wait_ms) == (1 << 20, 5)
        assert environment.register("host", gpumem.ArenaConfig(), max_mem=2).config.max_mem == 2
        kept = environment.shared_allocator("host")
        with pytest.raises(TypeError, match="did you mean 'max_mem'"):
            environment.register("host", max_memory=1)
        own = gpumem.Arena("host")
        with pytest.raises(TypeError, match=r"\['max_mem'\] have no effect"):
            environment.register("host", own, max_mem=1)
        assert environment.shared_allocator("host") is kept
