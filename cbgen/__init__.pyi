from cbgen.engine.sampling_params import SamplingParams as SamplingParams
from cbgen.llm import LLM as LLM
from cbgen.llm_outputs import CompletionOutput as CompletionOutput
from cbgen.llm_outputs import RequestOutput as RequestOutput

__version__: str
