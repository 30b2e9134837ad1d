"""Options as written and as resolved: defaults of each device, and values that are refused."""

from dataclasses import FrozenInstanceError, asdict

import pytest

from cbgen.config import ContinuousBatchingConfig
from cbgen.errors import EXIT_USAGE, UsageError

NAN = float("nan")
DEVICES = ["cpu", "cuda", "mps"]
OUT_OF_RANGE = {
    "page_size": [0, -1],
    "num_blocks": [0, -5],
    "max_batch_tokens": [0, -512],
    "max_requests_per_batch": [0, -1],
    "max_memory_percent": [0.0, -0.1, 1.0001, 90, NAN, float("inf")],
    "safety_margin": [-0.01, 1.0, 15, NAN, float("inf")],
    "scheduler_type": ["", "FIFO", "lifo"],
    "allow_block_sharing": [],
    "cpu_offload_space": [-0.1, NAN, float("inf")],
    "kv_cache_dtype": ["", "int4", "Float32"],
    "balance_tail": [],
    "deterministic": [],
    "use_cuda_graph": [],
    "use_async_batching": [],
    "q_padding_interval_size": [0, -64],
    "kv_padding_interval_size": [0, -1],
    "max_cached_graphs": [0, -1],
}
AT_THE_EDGE = {
    "page_size": [1, 4096],
    "num_blocks": [1, 10**9],
    "max_batch_tokens": [1, 10**6],
    "max_requests_per_batch": [1, 10**5],
    "max_memory_percent": [1e-9, 1.0],
    "safety_margin": [0.0, 0.999],
    "scheduler_type": ["fifo"],
    "allow_block_sharing": [True, False],
    "cpu_offload_space": [0.0, 0.001, 512.0],
    "kv_cache_dtype": ["auto", "float32", "bfloat16", "int8"],
    "balance_tail": [True, False],
    "deterministic": [True, False],
    "use_cuda_graph": [False],
    "use_async_batching": [False],
    "q_padding_interval_size": [1, 4096],
    "kv_padding_interval_size": [1, 10**6],
    "max_cached_graphs": [1, 10**4],
}


def pairs(values: dict[str, list]) -> list[tuple[str, object]]:
    return [(option, value) for option, candidates in values.items() for value in candidates]


@pytest.mark.parametrize(
    ("device_type", "page_size", "max_batch_tokens", "max_requests_per_batch", "max_memory_percent"),
    [("cpu", 32, 512, 128, 0.5), ("cuda", 256, 4096, 256, 0.9), ("mps", 32, 512, 64, 0.4)],
)
def test_defaults_come_from_the_device(
    device_type, page_size, max_batch_tokens, max_requests_per_batch, max_memory_percent
):
    """Without options everything but the size of the cache is settled, and the margin is that of FIFO."""
    assert asdict(ContinuousBatchingConfig().resolve(device_type)) == {
        "page_size": page_size,
        "num_blocks": None,
        "max_batch_tokens": max_batch_tokens,
        "max_requests_per_batch": max_requests_per_batch,
        "max_memory_percent": max_memory_percent,
        "scheduler_type": "fifo",
        "safety_margin": 0.15,
        "allow_block_sharing": True,
        "cpu_offload_space": 0.0,
        "kv_cache_dtype": "auto",
        "balance_tail": True,
        "deterministic": False,
        "use_cuda_graph": None,
        "use_async_batching": None,
        "q_padding_interval_size": 64,
        "kv_padding_interval_size": 2048,
        "max_cached_graphs": 64,
    }


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize(("option", "value"), pairs(AT_THE_EDGE))
def test_a_value_given_is_kept_and_changes_nothing_else(option, value, device_type):
    """The ends of each range are in it, and an option moves no other; a margin of 0 is not a missing one."""
    resolved = asdict(ContinuousBatchingConfig(**{option: value}).resolve(device_type))
    assert resolved == {**asdict(ContinuousBatchingConfig().resolve(device_type)), option: value}


@pytest.mark.parametrize(("given", "margin"), [(None, 0.0), (0.3, 0.3)])
def test_prefill_first_has_a_margin_of_its_own(given, margin):
    """Its default keeps nothing back; a margin that is given holds for it too."""
    config = ContinuousBatchingConfig(scheduler_type="prefill_first", safety_margin=given)
    assert config.resolve("cpu").safety_margin == margin


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize(("option", "value"), pairs(OUT_OF_RANGE))
def test_a_value_out_of_range_is_refused_by_name(option, value, device_type):
    """The message names the option and the value, and the command ends as for any usage error."""
    with pytest.raises(UsageError) as refused:
        ContinuousBatchingConfig(**{option: value}).resolve(device_type)
    assert str(refused.value).startswith(f"{option}: ")
    assert str(value) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == EXIT_USAGE == 2


@pytest.mark.parametrize(
    "options",
    [
        {"use_cuda_graph": True},
        {"use_async_batching": True},
        {"use_cuda_graph": True, "use_async_batching": True},
        {"use_cuda_graph": True, "use_async_batching": False},
    ],
    ids=str,
)
def test_graphs_can_be_asked_for_on_cuda_alone(options):
    """What is asked for there is kept, whatever the engine would have chosen; elsewhere it is refused."""
    resolved = asdict(ContinuousBatchingConfig(**options).resolve("cuda"))
    assert resolved == {**asdict(ContinuousBatchingConfig().resolve("cuda")), **options}
    for device_type in ("cpu", "mps"):
        with pytest.raises(UsageError, match=f"^{next(iter(options))}: .* CUDA devices.* this is {device_type}; "):
            ContinuousBatchingConfig(**options).resolve(device_type)


@pytest.mark.parametrize(("device_type", "why"), [("cuda", "use_cuda_graph is off"), ("cpu", "this is cpu")])
def test_batches_cannot_overlap_without_graphs(device_type, why):
    """The message is about the device where that has none at all."""
    config = ContinuousBatchingConfig(use_async_batching=True, use_cuda_graph=False)
    with pytest.raises(UsageError, match=f"^use_async_batching: .*{why}"):
        config.resolve(device_type)


@pytest.mark.parametrize(
    ("options", "device_type", "warning"),
    [
        ({}, "cpu", None),
        ({"use_cuda_graph": False, "use_async_batching": False}, "cpu", None),
        ({"use_cuda_graph": False}, "cuda", None),
        ({"q_padding_interval_size": 64, "max_cached_graphs": 1}, "cuda", None),
        ({"q_padding_interval_size": 64, "use_cuda_graph": True}, "cuda", None),
        ({"q_padding_interval_size": 64}, "mps", "--q-padding-interval-size has no effect on mps: "),
        (
            {"kv_padding_interval_size": 8, "max_cached_graphs": 4},
            "cpu",
            "--kv-padding-interval-size and --max-cached-graphs have no effect on cpu: ",
        ),
        (
            {"max_cached_graphs": 4, "use_cuda_graph": False},
            "cuda",
            "--max-cached-graphs has no effect with --no-use-cuda-graph",
        ),
    ],
)
def test_what_is_said_of_graphs_in_vain_warns(options, device_type, warning):
    """In one line, and only where there will be none."""
    warnings = list(ContinuousBatchingConfig(**options).warnings_about_graphs(device_type))
    assert len(warnings) == (warning is not None)
    assert all(line.startswith(warning) for line in warnings)


def test_every_option_has_its_range_tested():
    """A new option must come with its range here."""
    assert set(OUT_OF_RANGE) == set(AT_THE_EDGE) == set(asdict(ContinuousBatchingConfig()))


@pytest.mark.parametrize("config", [ContinuousBatchingConfig(), ContinuousBatchingConfig().resolve("cpu")])
def test_a_config_cannot_be_changed(config):
    """Resolved once, then the same for everyone who reads it."""
    with pytest.raises(FrozenInstanceError):
        config.page_size = 8
