"""The options of the commands: how each is spelt, what its help says, and the panel it stands in."""

from typing import Annotated

import typer

INPUT, SAMPLING, ENGINE, OUTPUT, JOB = "Input", "Sampling", "Engine", "Output", "Job"
WORKLOAD = "Workload"

Input = Annotated[
    list[str] | None,
    typer.Argument(
        help="Parquet or JSONL files (.jsonl.gz, .jsonl.zst), globs, folders, URLs such as s3://..., or - for standard "
        "input; or one job spec (.yaml).",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="A model folder, hub id or .gguf file; smollm2; or tiny-random, a test model made in memory."),
]
Out = Annotated[
    str | None,
    typer.Option(
        help="The output file, .parquet or .jsonl, or a folder/ of Parquet files; {shard} in it becomes the shard's "
        "number.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on CPUs, else 16 bits), float32, bfloat16 or float16.")]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Context in tokens, if less than the model's.", show_default="the model's")
]
Dataset = Annotated[
    str | None,
    typer.Option(help="Instead of INPUT: a dataset of the Hugging Face hub, or its folder.", rich_help_panel=INPUT),
]
DatasetConfig = Annotated[str | None, typer.Option(help="Configuration of the dataset.", rich_help_panel=INPUT)]
Split = Annotated[str | None, typer.Option(help="Split of the dataset.", rich_help_panel=INPUT, show_default="train")]
Format = Annotated[
    str,
    typer.Option(
        help="auto: by the extension; openai-batch: lines of custom_id, method, url and body.", rich_help_panel=INPUT
    ),
]
IdColumn = Annotated[
    str | None,
    typer.Option(help="Column that names each row; it must not repeat.", rich_help_panel=INPUT),
]
ShardIndex = Annotated[
    int | None,
    typer.Option(
        help="Which of --shard-count shards of the rows, from 0.",
        rich_help_panel=INPUT,
        show_default="that of a Slurm job array",
    ),
]
ShardCount = Annotated[
    int | None,
    typer.Option(
        help="Shards that the rows are dealt to; see cbgen merge.",
        rich_help_panel=INPUT,
        show_default="that of a Slurm job array, or 1",
    ),
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
    typer.Option(
        "--chat/--no-chat", help="Send each prompt as a user message through the chat template.", rich_help_panel=INPUT
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(help="File with the chat template to use instead of the model's.", rich_help_panel=INPUT),
]
ContinueFinalMessage = Annotated[
    bool,
    typer.Option(
        "--continue-final-message/--no-continue-final-message",
        help="Continue conversations that end with the assistant's message; without, they are error rows.",
        rich_help_panel=INPUT,
    ),
]
TruncatePrompt = Annotated[
    str,
    typer.Option(
        help="Where a prompt that leaves max_tokens no room is cut: left, right, middle; none: it is an error row.",
        rich_help_panel=INPUT,
    ),
]
ChatTemplateKwargs = Annotated[
    str | None, typer.Option(help="JSON object of variables for the chat template.", rich_help_panel=INPUT)
]
Date = Annotated[
    str | None,
    typer.Option(
        help="YYYY-MM-DD, for chat templates that print the date.",
        rich_help_panel=INPUT,
        show_default="the day the job began",
    ),
]
Limit = Annotated[int | None, typer.Option(help="Only the first N rows.", rich_help_panel=INPUT)]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens to generate at most.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 512",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="Divides the logits before tokens are drawn: less is more predictable, 0 is greedy.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 0",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Draw from the smallest set of tokens that together have this probability.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 1",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Draw from the k most probable tokens; 0 is off.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 0",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Draw from tokens at least so probable, as a share of the most probable one's.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 0",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Divides the logits of tokens in prompt or output; above 1 they get rarer.",
        rich_help_panel=SAMPLING,
        show_default="the model's generation config, or 1",
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        help="Taken from the logits of tokens in the output, -2 to 2.", rich_help_panel=SAMPLING, show_default="0"
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(help="The same for each time they occur there.", rich_help_panel=SAMPLING, show_default="0"),
]
LogitBias = Annotated[
    str | None,
    typer.Option(help="JSON object from token ids to numbers, -100 to 100, added to logits.", rich_help_panel=SAMPLING),
]
BadWords = Annotated[
    list[str] | None, typer.Option(help="Text that is not generated. May be repeated.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        help="Text that ends the generation; the output is cut before it. May be repeated.", rich_help_panel=SAMPLING
    ),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        help="Token that ends the generation, beside the model's own. May be repeated.", rich_help_panel=SAMPLING
    ),
]
IncludeStop = Annotated[
    bool,
    typer.Option(
        "--include-stop/--no-include-stop", help="Keep the stop text in the output.", rich_help_panel=SAMPLING
    ),
]
MinTokens = Annotated[int, typer.Option(help="Tokens before which nothing ends.", rich_help_panel=SAMPLING)]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos/--no-ignore-eos", help="Generate on past end-of-sequence tokens.", rich_help_panel=SAMPLING
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the job's draws.", rich_help_panel=SAMPLING)]
N = Annotated[int, typer.Option("--n", "-n", help="Samples per row.", rich_help_panel=SAMPLING)]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="Log-probabilities of the output's tokens, and of so many alternatives.", rich_help_panel=SAMPLING
    ),
]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same of the prompt's tokens.", rich_help_panel=SAMPLING)]
JsonSchema = Annotated[
    str | None,
    typer.Option(help="File, or JSON itself: the output is JSON of this schema.", rich_help_panel=SAMPLING),
]
Regex = Annotated[
    str | None, typer.Option(help="The output matches this regular expression.", rich_help_panel=SAMPLING)
]
Choice = Annotated[
    list[str] | None, typer.Option(help="The output is one of these. To be repeated.", rich_help_panel=SAMPLING)
]
Grammar = Annotated[
    str | None,
    typer.Option(help="File: the output is a sentence of this Lark or GBNF grammar.", rich_help_panel=SAMPLING),
]
SkipSpecialTokens = Annotated[
    bool,
    typer.Option(
        "--skip-special-tokens/--no-skip-special-tokens",
        help="Leave special tokens out of the text.",
        rich_help_panel=SAMPLING,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="auto: what is not given is as the model's generation config has it; none: it is passed over.",
        rich_help_panel=SAMPLING,
    ),
]
RowOptions = Annotated[
    str,
    typer.Option(
        help="Columns that are a row's own parameters: auto, all that bear such a name; none; or names with commas.",
        rich_help_panel=SAMPLING,
    ),
]
Order = Annotated[
    str,
    typer.Option(
        help="What is generated first: longest-first, prefix (common prefixes together), arrival, or auto: longest "
        "first, common prefixes together.",
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
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="The same bits for a row whatever the batch; needs cbgen's kernels on CPUs, varlen_attn on GPUs.",
        rich_help_panel=ENGINE,
    ),
]
OutputTokenIds = Annotated[
    bool,
    typer.Option(
        "--output-token-ids/--no-output-token-ids", help="Add a column completion_ids.", rich_help_panel=OUTPUT
    ),
]
StripReasoning = Annotated[
    bool,
    typer.Option(
        "--strip-reasoning/--no-strip-reasoning",
        help="Move what the model thinks before it answers to a column reasoning.",
        rich_help_panel=OUTPUT,
    ),
]
ReasoningTags = Annotated[
    str, typer.Option(help="What thinking begins and ends with, parted by a space.", rich_help_panel=OUTPUT)
]
OutputPrefix = Annotated[str, typer.Option(help="Prefix of the output columns' names.", rich_help_panel=OUTPUT)]
Summary = Annotated[str | None, typer.Option(help="Write the run's figures to this JSON file.", rich_help_panel=OUTPUT)]
Report = Annotated[
    str | None,
    typer.Option(help="Write an HTML page about the run here when it ends; see cbgen report.", rich_help_panel=OUTPUT),
]
Resume = Annotated[
    str,
    typer.Option(
        help="if-possible: continue a matching job or start; always: only continue; never: start anew.",
        rich_help_panel=JOB,
    ),
]
ErrorFile = Annotated[
    str | None,
    typer.Option(
        help="Where the failed rows of an openai-batch job go.",
        rich_help_panel=OUTPUT,
        show_default="beside --out: *.errors.jsonl",
    ),
]
RowsPerShard = Annotated[int, typer.Option(help="Rows of each file, where --out is a folder.", rich_help_panel=OUTPUT)]
Retry = Annotated[
    str | None,
    typer.Option(
        help="Generate again what failed, truncated, or failed,truncated; the rest stays.", rich_help_panel=JOB
    ),
]
MaxErrors = Annotated[
    str | None,
    typer.Option(
        help="Stop when more rows than this have failed: a number, or a share such as 5%.", rich_help_panel=JOB
    ),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(help="Stop, resumable, so as to end within this time, such as 7h30m.", rich_help_panel=JOB),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds in which a stopped job ends; what has begun is finished as far as they suffice.",
        rich_help_panel=JOB,
    ),
]
PublishTimeout = Annotated[
    float,
    typer.Option(help="Seconds that a full or read-only disk is waited for; 0: none.", rich_help_panel=JOB),
]
PartRows = Annotated[int, typer.Option(help="Publish finished rows at the latest after so many.", rich_help_panel=JOB)]
PartInterval = Annotated[
    float, typer.Option(help="Publish finished rows at the latest after so many seconds.", rich_help_panel=JOB)
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
UseCudaGraph = Annotated[
    bool | None,
    typer.Option(
        "--use-cuda-graph/--no-use-cuda-graph",
        " /--enforce-eager",
        help="Record forward passes on the GPU and replay them (--enforce-eager: do not).",
        rich_help_panel=ENGINE,
        show_default="by hardware",
    ),
]
UseAsyncBatching = Annotated[
    bool | None,
    typer.Option(
        "--use-async-batching/--no-use-async-batching",
        "--async-scheduling/--no-async-scheduling",
        help="Prepare a batch while the one before it runs; needs CUDA graphs (also --async-scheduling).",
        rich_help_panel=ENGINE,
        show_default="by hardware",
    ),
]
QPaddingIntervalSize = Annotated[
    int | None,
    typer.Option(
        help="Query tokens of a recorded pass are a multiple of this.", rich_help_panel=ENGINE, show_default="64"
    ),
]
KvPaddingIntervalSize = Annotated[
    int | None,
    typer.Option(
        help="KV tokens of a recorded pass's longest request are a multiple of this.",
        rich_help_panel=ENGINE,
        show_default="2048",
    ),
]
MaxCachedGraphs = Annotated[
    int | None,
    typer.Option(help="Recorded passes to keep at most.", rich_help_panel=ENGINE, show_default="64"),
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
DatasetName = Annotated[
    str,
    typer.Option(
        help="random, prefix-repetition, sharegpt, or custom: a JSONL file whose lines have prompt or prompt_ids, and "
        "max_tokens.",
        rich_help_panel=WORKLOAD,
    ),
]
DatasetPath = Annotated[str | None, typer.Option(help="File of sharegpt or custom.", rich_help_panel=WORKLOAD)]
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
RandomRangeRatio = Annotated[
    float | None,
    typer.Option(
        help="Share of their length by which prompts and outputs of random differ, to either side.",
        rich_help_panel=WORKLOAD,
        show_default="0",
    ),
]
PrefixLen = Annotated[
    int | None,
    typer.Option(
        help="Random tokens that prompts begin with.",
        rich_help_panel=WORKLOAD,
        show_default="0 for random, 256 for prefix-repetition",
    ),
]
NumPrefixes = Annotated[
    int | None,
    typer.Option(help="Different prefixes of prefix-repetition.", rich_help_panel=WORKLOAD, show_default="10"),
]
BenchN = Annotated[int, typer.Option("--n", help="Samples of each request.", rich_help_panel=WORKLOAD)]
BenchSeed = Annotated[int, typer.Option("--seed", help="Seed of what is random.", rich_help_panel=WORKLOAD)]
Backend = Annotated[
    str | None,
    typer.Option(
        help="cbgen; hf: transformers' generate in batches of 32; hf-cb: its continuous batching; vllm; openvino.",
        show_default="cbgen",
    ),
]
Compare = Annotated[
    str | None,
    typer.Option(help="Several backends with commas, such as cbgen,hf: they take turns, the first against each other."),
]
Runs = Annotated[int, typer.Option(help="Timed runs of each backend.")]
Profile = Annotated[
    bool,
    typer.Option("--profile/--no-profile", help="Run cbgen once more, untimed, to see where its time goes."),
]
Python = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=PATH of the Python that has a backend installed; PATH alone where just one is vllm or openvino. "
        "May be repeated.",
        show_default="this one",
    ),
]
PeerModel = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=FOLDER of the model as a backend loads it; openvino needs one. May be repeated.",
        show_default="--model",
    ),
]
Slo = Annotated[
    str | None,
    typer.Option(
        help="What a request must keep to count as goodput, such as ttft=2s,tpot=100ms,e2e=30s.",
        rich_help_panel=OUTPUT,
    ),
]
Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print a table of backends in markdown.", rich_help_panel=OUTPUT)
]
OutputJson = Annotated[str | None, typer.Option(help="Write all figures to this JSON file.", rich_help_panel=OUTPUT)]
Baseline = Annotated[
    str | None,
    typer.Option(help="An earlier --output-json of the same work to compare with.", rich_help_panel=OUTPUT),
]
MaxRegression = Annotated[
    str | None,
    typer.Option(
        help="How much slower than --baseline the first backend may be.", rich_help_panel=OUTPUT, show_default="10%"
    ),
]
Text = Annotated[str, typer.Argument(help="JSONL file whose lines have prompt or prompt_ids.", metavar="TEXT")]
Rows = Annotated[int, typer.Option(help="Rows of the text that are used.")]
RowTokens = Annotated[int, typer.Option(help="Tokens of each row that are used, from its beginning.")]
PromptTokens = Annotated[int, typer.Option(help="Tokens of each row that generation starts from.")]
QualityOutputLen = Annotated[int, typer.Option("--output-len", help="Tokens to generate for each row.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Preview = Annotated[int, typer.Option(min=0, help="Show the N rows that finished last.")]
JobOutput = Annotated[str, typer.Argument(help="The --out of the job.", metavar="OUT")]
Shards = Annotated[list[str], typer.Argument(help="The outputs of all shards.", metavar="SHARD...")]
CheckRows = Annotated[int, typer.Option("--rows", help="Rows of the input that are rendered and tokenized.")]
PlanRows = Annotated[int, typer.Option("--rows", help="Rows of the input that are read, the first ones.")]
Calibrate = Annotated[
    bool, typer.Option("--calibrate/--no-calibrate", help="Load the model and predict how long the job takes.")
]
ExpectedTokens = Annotated[
    float | None,
    typer.Option(help="Tokens that rows generate on average.", show_default="all of their max_tokens"),
]
ReportFile = Annotated[
    str | None, typer.Option("--out", help="The page to write.", show_default="OUT with .report.html behind its name")
]
