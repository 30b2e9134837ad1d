"""Devices by name, and memory limits of containers read from folders shaped like control groups."""

from pathlib import Path

import psutil
import pytest
import torch

from cbgen.device import (
    container_free_bytes,
    container_limit_bytes,
    free_memory_bytes,
    host_bytes_for,
    peak_memory_bytes,
    pick_device,
    supports_bfloat16,
    total_memory_bytes,
)
from cbgen.errors import UsageError

MIB = 1 << 20
MORE_THAN_ANY_MACHINE = 1 << 60
NO_LIMIT_V1 = 9223372036854771712
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def write_group(folder: Path, version: int, limit: int | str, used: int, inactive: int | None = None) -> None:
    """One control group's memory files; without `inactive` there is no memory.stat."""
    limit_name, used_name, key = NAMES[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    if inactive is not None:
        # In version 1 the same name without "total_" is there too, and leaves out the groups below.
        lines = ["anon 12345", "file 777", "inactive_file 1", "total_inactive_file 2", "inactive_anon 3"]
        lines = [line for line in lines if not line.startswith(f"{key} ")] + [f"{key} {inactive}", "slab 9"]
        (folder / "memory.stat").write_text("\n".join(lines) + "\n")


def own_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "self_cgroup"
    path.write_text(text)
    return path


def limits(root: Path, own: Path) -> tuple[int, int]:
    return container_limit_bytes(root, own), container_free_bytes(root, own)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("version", "place"), [(2, "."), (1, "memory")])
@pytest.mark.parametrize(
    ("used", "inactive", "free"),
    [
        pytest.param(300, 0, 700, id="nothing to drop"),
        pytest.param(300, 100, 800, id="file pages count as free"),
        pytest.param(300, None, 700, id="no memory.stat"),
        pytest.param(300, 400, 1000, id="never more than the limit"),
        pytest.param(1000, 0, 0, id="full"),
        pytest.param(1010, 5, 0, id="above the limit for a moment"),
    ],
)
def test_a_container_has_what_its_limit_leaves(root, tmp_path, version, place, used, inactive, free):
    """Limit and use of a single group, as a container with its own namespace sees it at the root."""
    own = own_file(tmp_path, {2: "0::/\n", 1: "4:memory:/\n0::/\n"}[version])
    write_group(root / place, version, 1000 * MIB, used * MIB, None if inactive is None else inactive * MIB)
    assert limits(root, own) == (1000 * MIB, free * MIB)


@pytest.mark.parametrize(
    ("version", "place", "limit"), [(2, ".", "max"), (1, "memory", NO_LIMIT_V1)], ids=["version 2", "version 1"]
)
def test_a_group_without_a_limit_bounds_nothing(root, tmp_path, version, place, limit):
    """ "max", and the huge number of version 1, are no limits: the machine's own memory then decides."""
    write_group(root / place, version, limit, 300 * MIB, 0)
    assert min(limits(root, own_file(tmp_path, "0::/\n"))) >= MORE_THAN_ANY_MACHINE


@pytest.mark.parametrize("text", ["0::/\n", "0::/a/b\n", "4:memory:/x\n", ""])
def test_no_files_are_no_limit(root, tmp_path, text):
    """A machine without control groups, or a path that is not mounted here, bounds nothing."""
    assert min(limits(root, own_file(tmp_path, text))) >= MORE_THAN_ANY_MACHINE
    assert min(limits(root / "absent", tmp_path / "absent")) >= MORE_THAN_ANY_MACHINE


@pytest.mark.parametrize(
    ("groups", "limit", "free"),
    [
        pytest.param({"a": (800, 100), "a/b": (500, 100)}, 500, 400, id="innermost"),
        pytest.param({"a": (400, 100), "a/b": (500, 100)}, 400, 300, id="outer"),
        pytest.param({"a": (800, 700), "a/b": (500, 100)}, 500, 100, id="fullest is not the smallest"),
        pytest.param({"a": (800, 200), "a/b": ("max", 100)}, 800, 600, id="limit above only"),
        pytest.param({"a": ("max", 0), "a/b": (300, 50)}, 300, 250, id="limit below only"),
        pytest.param({".": (200, 50), "a": (400, 100), "a/b": (300, 100)}, 200, 150, id="root"),
        pytest.param({"a/b": (600, 100), "a/b/c": (10, 1), "b": (10, 1), "c": (10, 1)}, 600, 500, id="others ignored"),
    ],
)
@pytest.mark.parametrize("version", [2, 1])
def test_of_nested_groups_the_tightest_wins(root, tmp_path, groups, limit, free, version):
    """Every group on the way from the root to the process bounds it; its children and neighbours do not."""
    for name, (group_limit, used) in groups.items():
        no_limit = {2: "max", 1: NO_LIMIT_V1}[version]
        size = no_limit if group_limit == "max" else group_limit * MIB
        write_group((root if version == 2 else root / "memory") / name, version, size, used * MIB, 0)
    own = own_file(tmp_path, {2: "0::/a/b\n", 1: "9:name=systemd:/c\n4:cpu,memory:/a/b\n3:cpuset:/c\n"}[version])
    assert limits(root, own) == (limit * MIB, free * MIB)


def test_version_1_counts_where_version_2_is_mounted_beside_it(root, tmp_path):
    """In the hybrid layout the memory limit is version 1's, and the line of version 2 leads nowhere."""
    write_group(root / "memory" / "job", 1, 700 * MIB, 300 * MIB, 50 * MIB)
    own = own_file(tmp_path, "4:memory:/job\n1:name=systemd:/s\n0::/s\n")
    assert limits(root, own) == (700 * MIB, 450 * MIB)


def test_a_path_with_a_colon_is_read_whole(root, tmp_path):
    """Only the first two colons of a line separate."""
    write_group(root / "pod:1" / "run", 2, 100 * MIB, 40 * MIB, 0)
    assert limits(root, own_file(tmp_path, "0::/pod:1/run\n")) == (100 * MIB, 60 * MIB)


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_memory_of_a_device_is_positive_and_within_its_total(name):
    """What is free is a part of what is there, and the process has used some."""
    device = pick_device(name)
    assert 0 < free_memory_bytes(device) <= total_memory_bytes(device)
    assert 0 <= peak_memory_bytes(device) <= total_memory_bytes(device)


def test_cpu_memory_stays_within_the_machine():
    """Whatever the container says, the machine has no more."""
    assert total_memory_bytes(torch.device("cpu")) <= psutil.virtual_memory().total


def test_peak_memory_is_in_bytes_and_at_least_the_memory_held():
    """The peak of the process covers what it holds now; a wrong unit would be a thousand times off."""
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident <= peak_memory_bytes(torch.device("cpu")) <= 100 * resident


def test_cpu_is_always_there():
    """The name of the device is the device, and "auto" finds one that torch can use."""
    assert pick_device("cpu") == torch.device("cpu")
    assert torch.ones(2, device=pick_device("auto")).sum().item() == 2


@pytest.mark.parametrize("name", ["", "banana", "CPU", "cuda:x", "cuda:-1", "meta", "xpu"])
def test_a_name_that_is_no_usable_device_is_refused(name):
    """The message names the option, the value, and what to use."""
    with pytest.raises(UsageError, match=f"^--device {name}: .*use.* cpu"):
        pick_device(name)


def test_a_card_that_is_not_there_is_refused():
    """The first number past the cards of this machine is a usage error, not a crash once the model is loaded."""
    with pytest.raises(UsageError, match=r"^--device cuda:"):
        pick_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.parametrize("name", ["cpu", "mps", "cuda:99"])
def test_bfloat16_on_what_is_no_old_gpu(name):
    """Also on a device that is described and is not here."""
    assert supports_bfloat16(torch.device(name))


@pytest.mark.parametrize(
    ("capability", "expected"), [((6, 1), False), ((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)]
)
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_bfloat16_by_compute_capability(monkeypatch, name, capability, expected):
    """torch speaks for a machine with two such GPUs; of a third one nothing is known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_bfloat16(torch.device(name)) == expected
    assert supports_bfloat16(torch.device("cuda:2"))


@pytest.mark.parametrize(("num_bytes", "pinned"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (40 << 30, 64 << 30)])
def test_pinned_memory_comes_in_powers_of_two(num_bytes: int, pinned: int) -> None:
    """What is asked for is less than what is taken, for a GPU alone."""
    assert host_bytes_for(num_bytes, torch.device("cuda")) == pinned
    assert host_bytes_for(num_bytes, torch.device("cpu")) == num_bytes
