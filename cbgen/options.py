"""The options of the commands: how each is spelt, what its help says, and the panel it stands in."""

from typing import Annotated

import typer

INPUT, SAMPLING, ENGINE, OUTPUT = "Input", "Sampling", "Engine", "Output"
WORKLOAD = "Workload"

Input = Annotated[
    list[str],
    typer.Argument(help="Parquet or JSONL files, globs or folders; or one job spec (.yaml).", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(help="A model folder, hub id or .gguf file; smollm2; or tiny-random, a test model made in memory."),
]
Out = Annotated[str | None, typer.Option(help="The output file, .parquet or .jsonl.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Context in tokens, if less than the model's.", show_default="the model's")
]
PromptColumn = Annotated[
    str | None, typer.Option(help="Column of prompt texts.", rich_help_panel=INPUT, show_default="prompt")
]
MessagesColumn = Annotated[
    str | None,
    typer.Option(help="Column of chat messages (role, content).", rich_help_panel=INPUT, show_default="messages"),
]
Template = Annotated[
    str | None, typer.Option(help="Jinja2 template over the columns that makes the prompt.", rich_help_panel=INPUT)
]
SystemPrompt = Annotated[
    str | None,
    typer.Option(help="System message for rows without one; implies --chat.", rich_help_panel=INPUT),
]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Send each prompt as a user message through the chat template.", rich_help_panel=INPUT),
]
ChatTemplateKwargs = Annotated[
    str | None, typer.Option(help="JSON object of variables for the chat template.", rich_help_panel=INPUT)
]
Limit = Annotated[int | None, typer.Option(help="Only the first N rows.", rich_help_panel=INPUT)]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.", rich_help_panel=SAMPLING)]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING, show_default="the model's generation config, or 0"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Smallest set of tokens with this probability.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 1",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="The k most probable tokens; 0 is off.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 0",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the job's draws.", rich_help_panel=SAMPLING)]
N = Annotated[int, typer.Option("--n", "-n", help="Samples per row.", rich_help_panel=SAMPLING)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Generate on past end-of-sequence tokens.", rich_help_panel=SAMPLING)
]
Order = Annotated[
    str,
    typer.Option(
        help="Rows within a window of them: prefix (common prefixes together), longest-first, arrival, or auto, both.",
        rich_help_panel=ENGINE,
    ),
]
Deduplicate = Annotated[
    bool,
    typer.Option(
        "--deduplicate/--no-deduplicate",
        help="Generate identical greedy prompts once, and give every such row the result.",
        rich_help_panel=ENGINE,
    ),
]
OutputTokenIds = Annotated[
    bool, typer.Option("--output-token-ids", help="Add a column completion_ids.", rich_help_panel=OUTPUT)
]
OutputPrefix = Annotated[str, typer.Option(help="Prefix of the output columns' names.", rich_help_panel=OUTPUT)]
Summary = Annotated[str | None, typer.Option(help="Write the run's figures to this JSON file.", rich_help_panel=OUTPUT)]
Resume = Annotated[
    str,
    typer.Option(
        help="if-possible: continue a matching job or start; always: only continue; never: start anew.",
        rich_help_panel=OUTPUT,
    ),
]
PartRows = Annotated[
    int, typer.Option(help="Publish finished rows at the latest after so many.", rich_help_panel=OUTPUT)
]
PartInterval = Annotated[
    float, typer.Option(help="Publish finished rows at the latest after so many seconds.", rich_help_panel=OUTPUT)
]
PageSize = Annotated[
    int | None, typer.Option(help="Tokens of KV in a page.", rich_help_panel=ENGINE, show_default="by hardware")
]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        help="Cache capacity in blocks of page_size tokens.",
        rich_help_panel=ENGINE,
        show_default="from free memory",
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        "--max-batch-tokens",
        "--max-num-batched-tokens",
        help="Query tokens in a forward pass (also --max-num-batched-tokens).",
        rich_help_panel=ENGINE,
        show_default="by hardware",
    ),
]
MaxRequestsPerBatch = Annotated[
    int | None,
    typer.Option(
        "--max-requests-per-batch",
        "--max-num-seqs",
        help="Requests in a forward pass (also --max-num-seqs).",
        rich_help_panel=ENGINE,
        show_default="by hardware",
    ),
]
MaxMemoryPercent = Annotated[
    float | None,
    typer.Option(help="Share of free memory to use, 0 to 1.", rich_help_panel=ENGINE, show_default="by hardware"),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(help="Instead: share of all device memory, 0 to 1, weights included.", rich_help_panel=ENGINE),
]
SchedulerType = Annotated[
    str, typer.Option(help="fifo, or prefill_first: prompts begun come first.", rich_help_panel=ENGINE)
]
SafetyMargin = Annotated[
    float | None,
    typer.Option(
        help="Free share of the cache below which only decodes go on; 0 is off.",
        rich_help_panel=ENGINE,
        show_default="0.15 for fifo, 0 for prefill_first",
    ),
]
AllowBlockSharing = Annotated[
    bool,
    typer.Option(
        "--allow-block-sharing/--no-allow-block-sharing",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Compute a common prefix of prompts once (also --enable-prefix-caching).",
        rich_help_panel=ENGINE,
    ),
]
CpuOffloadSpace = Annotated[
    float,
    typer.Option(
        help="GiB of CPU memory for requests that must leave the cache; 0: they are computed again.",
        rich_help_panel=ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(help="auto (the model's own), float32, bfloat16 or int8.", rich_help_panel=ENGINE),
]
BalanceTail = Annotated[
    bool,
    typer.Option(
        "--balance-tail/--no-balance-tail",
        help="Start the last requests so that the batch stays evenly filled to the end.",
        rich_help_panel=ENGINE,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8: weights of 8 bits and the activations that are fastest here; or w8a8, w8a16.",
        show_default="none",
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(help="Text file that w8a8 is calibrated on.", show_default="a text of its own"),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Plan for so much memory, weights included, such as 24GiB.", show_default="what is free now"),
]
Tokens = Annotated[
    list[int] | None,
    typer.Option(help="Length of a request, prompt and output; may be repeated.", show_default="256, 1024, 4096, ..."),
]
Workload = Annotated[
    str,
    typer.Option(
        help="random, shared-prefix, or a JSONL file whose lines have prompt or prompt_ids, and max_tokens.",
        rich_help_panel=WORKLOAD,
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(
        help="Requests; of a file, the first ones.", rich_help_panel=WORKLOAD, show_default="64; all of a file"
    ),
]
InputLen = Annotated[
    int | None,
    typer.Option(help="Random tokens of each prompt, after the prefix.", rich_help_panel=WORKLOAD, show_default="128"),
]
OutputLen = Annotated[
    int | None,
    typer.Option(help="Tokens to generate for each request.", rich_help_panel=WORKLOAD, show_default="64"),
]
PrefixLen = Annotated[
    int | None,
    typer.Option(
        help="Random tokens that all prompts begin with.",
        rich_help_panel=WORKLOAD,
        show_default="0 for random, 512 for shared-prefix",
    ),
]
Backend = Annotated[
    list[str] | None,
    typer.Option(
        help="cbgen; hf: transformers' generate in batches of 32; hf-cb: its continuous batching. May be repeated.",
        show_default="cbgen",
    ),
]
Runs = Annotated[int, typer.Option(help="Timed runs of each backend, taking turns.")]
Profile = Annotated[
    bool,
    typer.Option("--profile/--no-profile", help="Run cbgen once more, untimed, to see where its time goes."),
]
OutputJson = Annotated[str | None, typer.Option(help="Write all figures to this JSON file.", rich_help_panel=OUTPUT)]
Text = Annotated[str, typer.Argument(help="JSONL file whose lines have prompt or prompt_ids.", metavar="TEXT")]
Rows = Annotated[int, typer.Option(help="Rows of the text that are used.")]
RowTokens = Annotated[int, typer.Option(help="Tokens of each row that are used, from its beginning.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each row that generation starts from.")]
QualityOutputLen = Annotated[int, typer.Option("--output-len", help="Tokens to generate for each row.")]
