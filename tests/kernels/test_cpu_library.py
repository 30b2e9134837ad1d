"""The compiled kernels as a library: one OpenMP runtime, instruction sets, structs, and an install without it."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cbgen
from cbgen.kernels.cpu import attention, library, linear

PACKAGE = Path(cbgen.__file__).parent
SOURCES = PACKAGE / "kernels" / "cpu" / "src"
ISAS = library.runnable_isas()
needs_kernels = pytest.mark.skipif(not ISAS, reason="this installation has no compiled kernels")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not there to lay out the structs")
STRUCTS = {
    "attention": attention._Attention,
    "weight": linear._Weight,
    "layer": linear._Layer,
    "workspace": linear._Workspace,
}


def run_python(code: str, *arguments: object) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ONE_RUNTIME = """
import pathlib
import torch
from cbgen.kernels.cpu.library import load_library
from cbgen.kernels.cpu.linear import PackedWeight
runtimes = lambda: {
    line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
    if any(name in line.split("/")[-1] for name in ("libgomp", "libomp", "libiomp"))
}
torch.randn(500, 500) @ torch.randn(500, 500)
before = runtimes()
PackedWeight(load_library(), torch.randn(500, 500), None).multiply(torch.randn(500, 500))
assert runtimes() == before, (before, runtimes())
print(len(before))
"""


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what a process has mapped")
def test_there_is_one_openmp_runtime() -> None:
    """Two would fight for the cores (DESIGN section 10); the kernels run on torch's own."""
    assert run_python(ONE_RUNTIME) == "1"


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_a_lesser_set_can_be_asked_for(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    assert library.load_library.__wrapped__().isa == isa


def layout_of(structure: type[ctypes.Structure]) -> dict[str, int]:
    offsets = {name: getattr(structure, name).offset for name, *_ in structure._fields_}
    return {**offsets, "size": ctypes.sizeof(structure)}


@needs_gcc
@pytest.mark.parametrize("name", STRUCTS)
def test_structs_lie_as_in_c(tmp_path: Path, name: str) -> None:
    """Every field at its offset, none forgotten, and the size."""
    expected = layout_of(STRUCTS[name])
    lines = [f'printf("{field} %zu\\n", offsetof(struct {name}, {field}));' for field in expected if field != "size"]
    lines.append(f'printf("size %zu\\n", sizeof(struct {name}));')
    program = tmp_path / "layout.c"
    includes = "#include <stddef.h>\n#include <stdio.h>\n#include <stdint.h>\n"
    program.write_text(f'{includes}#include "kernels.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
    subprocess.run(["gcc", "-I", SOURCES, program, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    found = {field: int(number) for field, number in (line.split() for line in printed.splitlines())}
    assert found == expected


@needs_gcc
def test_constants_are_those_of_c(tmp_path: Path) -> None:
    """What is written down twice says the same twice."""
    constants = {
        "KV_FLOAT32": attention.KV_KINDS[torch.float32],
        "KV_BFLOAT16": attention.KV_KINDS[torch.bfloat16],
        "KV_INT8": attention.KV_KINDS[torch.int8],
        "SILU": linear.ACTIVATIONS["silu"],
        "GELU_TANH": linear.ACTIVATIONS["gelu_pytorch_tanh"],
        "TILE": attention.TILE,
        "MAX_SPLIT": attention.SPLIT_TOKENS,
        "WEIGHT_FLOAT32": linear.FLOAT32_WEIGHT,
        "WEIGHT_WORDS": linear.WORDS_WEIGHT,
        "WEIGHT_BYTES": linear.BYTES_WEIGHT,
        "WIDE_GAP": linear.WIDE_GAP,
        "GROUP": linear.GROUP,
    }
    checks = "\n".join(f'_Static_assert({name} == {value}, "{name}");' for name, value in constants.items())
    program = tmp_path / "constants.c"
    program.write_text(f'#include "kernels.h"\n{checks}\n')
    subprocess.run(["gcc", "-I", SOURCES, "-fsyntax-only", program], check=True)


WITHOUT = """
import sys
sys.path[:0] = sys.argv[1:]
import cbgen, torch
assert cbgen.__file__.startswith(sys.argv[1]), cbgen.__file__
from engine_harness import CPU, engine_for, greedy_requests, mixed_prompts, run_all
from tiny_models import ModelUnderTest, build
from cbgen.kernels.cpu.library import load_library, runnable_isas
assert load_library() is None and runnable_isas() == []
for name in ("llama", "mistral", "gpt2"):
    under_test = ModelUnderTest.of(name, build(name), frozenset([1]))
    engine = engine_for(under_test, num_blocks=24, max_batch_tokens=48)
    assert engine.kernel == "sdpa", engine.kernel
    prompts = mixed_prompts(6, 300, longest=60, most=10)
    for prompt, served in zip(prompts, run_all(engine, greedy_requests(prompts)), strict=True):
        assert served.error is None
        under_test.assert_parity(prompt.token_ids, prompt.max_tokens, served.generated_ids)
from cbgen.config import ContinuousBatchingConfig
from cbgen.engine.execution import attention_backend
from cbgen.errors import UsageError
config = ContinuousBatchingConfig(kv_cache_dtype="int8").resolve("cpu")
try:
    attention_backend(under_test.shape, torch.float32, config, "cpu")
except UsageError as error:
    print(error)
"""


def test_an_install_without_the_kernels(tmp_path: Path) -> None:
    """Attention runs on torch, rows are the same, and an option that needs the kernels is refused with the reason."""
    shutil.copytree(PACKAGE, tmp_path / "cbgen", ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "src"))
    tests = Path(__file__).parents[1]
    printed = run_python(WITHOUT, tmp_path, tests)
    assert printed == "--kv-cache-dtype int8: cbgen without its compiled kernels holds KV in the model's own dtype"


@needs_kernels
@pytest.mark.parametrize("asked", ["neon", "AVX2", *sorted(set(library.ISAS) - set(ISAS))])
def test_an_instruction_set_that_does_not_run_is_refused(asked: str) -> None:
    """In one line that says which do, with the exit code of a wrong option."""
    environment = os.environ | {library.ISA_VARIABLE: asked}
    done = subprocess.run(
        [sys.executable, "-m", "cbgen", "env"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"cbgen: CBGEN_CPU_ISA={asked}: this processor runs {', '.join(ISAS)}; unset it for the best"
    ]


@needs_kernels
def test_an_empty_instruction_set_is_none_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "")
    assert library.load_library.__wrapped__().isa == ISAS[-1]
