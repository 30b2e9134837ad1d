"""All that differs between devices: which one is used, how much memory is free on it, how much was used at most."""

import ctypes
import gc
import sys
from pathlib import Path

import psutil
import torch

from cbgen.errors import UsageError

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
# What a limit file of cgroup v1 holds when there is no limit: a number near 2**63.
NO_LIMIT_BYTES = 1 << 60
LEAST_BFLOAT16_CAPABILITY = 8  # Ampere's
SMALL_PAGE_BYTES, MADV_HUGEPAGE = 4096, 14  # of linux/mman.h


def pick_device(name: str, must_exist: bool = True) -> torch.device:
    """The torch device for "auto", "cpu", "cuda", "cuda:1" or "mps". Raises UsageError when it is not there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: not a device name; use auto, cpu, cuda, cuda:N or mps") from error
    if not must_exist and device.type in ("cpu", "cuda", "mps"):
        return device
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    beyond = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    if beyond or not present.get(device.type, False):
        raise UsageError(f"--device {name}: this machine or this torch build has none; use --device cpu")
    return device


def supports_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16: CUDA's do from compute capability 8.0 on.

    One that is described and is not here, as plans for other machines have it, counts as one that does.
    """
    is_here = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    if device.type != "cuda" or not is_here:
        return True
    return torch.cuda.get_device_capability(device)[0] >= LEAST_BFLOAT16_CAPABILITY


def empty_in_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized memory of the CPU that is read all over in every forward pass.

    Linux is asked for pages of 2 MiB: with 4 KiB, finding where a page lies takes a third of the time that
    attention over scattered pages of KV does. Where it has none to give, nothing changes.
    """
    tensor = torch.empty(shape, dtype=dtype)
    if sys.platform == "linux":
        first = -(-tensor.data_ptr() // SMALL_PAGE_BYTES)
        last = (tensor.data_ptr() + tensor.nbytes) // SMALL_PAGE_BYTES
        if last > first:
            size = ctypes.c_size_t((last - first) * SMALL_PAGE_BYTES)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first * SMALL_PAGE_BYTES), size, MADV_HUGEPAGE)
    return tensor


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; a CPU has done it when the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the device now; for the CPU, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, container_free_bytes(CGROUP_ROOT, OWN_CGROUP_FILE))


def host_bytes_for(num_bytes: int, device: torch.device) -> int:
    """What a buffer of the CPU takes that is copied to and from the device: torch pins memory in powers of two."""
    return 1 << (num_bytes - 1).bit_length() if device.type == "cuda" and num_bytes else num_bytes


def release_unused_memory(device: torch.device) -> None:
    """What nothing refers to any more counts as free on the device from now on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def total_memory_bytes(device: torch.device) -> int:
    """Bytes of memory of the device; for the CPU, of the machine or of the container, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return min(psutil.virtual_memory().total, container_limit_bytes(CGROUP_ROOT, OWN_CGROUP_FILE))


def container_free_bytes(root: Path, own_file: Path) -> int:
    """Bytes left under the tightest memory limit of this process's control groups; very large without a limit."""
    return min((max(0, limit - used) for limit, used in _cgroup_memory(root, own_file)), default=NO_LIMIT_BYTES)


def container_limit_bytes(root: Path, own_file: Path) -> int:
    """The tightest memory limit of this process's control groups; very large without one."""
    return min((limit for limit, _ in _cgroup_memory(root, own_file)), default=NO_LIMIT_BYTES)


def _cgroup_memory(root: Path, own_file: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of each control group that bounds this process, version 2 and 1, from the root down.

    File pages that the kernel can drop at once are counted as free, as the kernel itself does before it kills.
    """
    found = []
    for folder in _cgroup_folders(root, own_file):
        for limit_name, used_name, droppable_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
            if limit is not None and used is not None and limit < NO_LIMIT_BYTES:
                found.append((limit, max(0, used - _stat_value(folder / "memory.stat", droppable_key))))
    return found


def _cgroup_folders(root: Path, own_file: Path) -> list[Path]:
    folders = [root, root / "memory"]
    lines = own_file.read_text().splitlines() if own_file.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if controllers == "" else root / "memory" if "memory" in controllers.split(",") else None
        parts = Path(path).parts[1:] if base else ()
        folders += [base.joinpath(*parts[: depth + 1]) for depth in range(len(parts)) if base]
    return folders


def _read_int(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def _stat_value(path: Path, key: str) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), 0)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: of the device for CUDA, the resident set of the process otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
