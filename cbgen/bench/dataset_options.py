"""What the requests of a benchmark are asked to be, by the names that `vllm bench throughput` has for it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cbgen.errors import UsageError

RANDOM, PREFIX_REPETITION, SHAREGPT, CUSTOM = "random", "prefix-repetition", "sharegpt", "custom"
DATASETS = (RANDOM, PREFIX_REPETITION, SHAREGPT, CUSTOM)
DEFAULT_NUM_PROMPTS, DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 64, 128, 64
DEFAULT_NUM_PREFIXES, DEFAULT_PREFIX_LEN = 10, {RANDOM: 0, PREFIX_REPETITION: 256}
# What each option has to be at least.
_LEAST = {"num_prompts": 1, "input_len": 1, "output_len": 1, "prefix_len": 0, "num_prefixes": 1, "n": 1, "seed": 0}
_WITHOUT_EFFECT = {
    RANDOM: ("dataset_path", "num_prefixes"),
    PREFIX_REPETITION: ("dataset_path", "random_range_ratio"),
    SHAREGPT: ("input_len", "prefix_len", "num_prefixes", "random_range_ratio"),
    CUSTOM: ("input_len", "prefix_len", "num_prefixes", "random_range_ratio", "seed"),
}


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and how many tokens each of its n samples gets: exactly so many, whatever they are."""

    prompt_ids: list[int]
    max_tokens: int
    n: int = 1


@dataclass(frozen=True)
class DatasetOptions:
    """What the user asked for; None where nothing was said. Lengths are in tokens.

    random_range_ratio: r draws lengths from [length * (1 - r), length * (1 + r)]. n: samples of every request.
    """

    dataset_name: str = RANDOM
    dataset_path: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    num_prefixes: int | None = None
    num_prompts: int | None = None
    random_range_ratio: float | None = None
    n: int = 1
    seed: int = 0

    @property
    def kind(self) -> str:
        """The name as it is written here; vLLM's has an underscore."""
        return self.dataset_name.replace("_", "-")

    def check(self) -> None:
        """Raises UsageError for an option that is wrong by itself or beside another."""
        if self.kind not in DATASETS:
            raise UsageError(
                f"--dataset-name {self.dataset_name}: not one of {', '.join(DATASETS)}; a file is read with "
                f"--dataset-name {CUSTOM} or {SHAREGPT}, and --dataset-path"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{_option(name)} {value}: at least {least} is expected")
        ratio = self.random_range_ratio
        if ratio is not None and not 0 <= ratio < 1:
            raise UsageError(f"--random-range-ratio {ratio:g}: at least 0 and below 1 is expected")
        if self.is_of_file:
            self._check_path()
        num_prompts = self.num_prompts or DEFAULT_NUM_PROMPTS
        if self.kind == PREFIX_REPETITION and (self.num_prefixes or 0) > num_prompts:
            raise UsageError(f"--num-prefixes {self.num_prefixes}: more than the {num_prompts} prompts")

    def _check_path(self) -> None:
        if self.dataset_path is None:
            raise UsageError(f"--dataset-name {self.kind}: --dataset-path is missing, the file to read")
        if not self.path.is_file():
            raise UsageError(f"--dataset-path {self.dataset_path}: no such file")

    @property
    def is_of_file(self) -> bool:
        return self.kind in (SHAREGPT, CUSTOM)

    @property
    def path(self) -> Path:
        return Path(self.dataset_path or "").expanduser()

    @property
    def ignored(self) -> Iterator[str]:
        """A line for each option that was given and says nothing to this dataset."""
        for name in _WITHOUT_EFFECT[self.kind]:
            if getattr(self, name) != getattr(DatasetOptions, name):
                yield f"{_option(name)} has no effect on --dataset-name {self.kind}"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
