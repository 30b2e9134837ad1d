"""The model behind the Python API, loaded with every choice made."""

import datetime
import logging
from dataclasses import dataclass

import torch

from cbgen.chat import read_chat_template
from cbgen.device import free_memory_bytes, pick_device
from cbgen.engine.build import Engine, build_engine
from cbgen.engine.grammars import Grammars
from cbgen.engine.sampling_params import SamplingParams
from cbgen.job_sampling import resolve_sampling
from cbgen.jobspec import JobSpec
from cbgen.models.loading import ModelDescription, describe, load
from cbgen.models.quantization import kernels_for, resolve_quantization
from cbgen.prompting import Prompter, PromptSource, resolve_source
from cbgen.reasoning import ReasoningSplitter, parse_tags
from cbgen.resolution import warnings_about_the_model

logger = logging.getLogger("cbgen")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its engine, and what its prompts are read with."""

    model: ModelDescription
    device: torch.device
    engine: Engine
    grammars: Grammars
    defaults: SamplingParams
    reasoning: ReasoningSplitter | None
    chat_template: str | None
    today: datetime.date

    def prompter(self, source: PromptSource) -> Prompter:
        tokenizer, vocab_size = self.model.tokenizer, self.model.vocab_size
        return Prompter(
            tokenizer, source, self.defaults, self.today, vocab_size, row_options=(), grammars=self.grammars
        )


def load_for(spec: JobSpec) -> LoadedModel:
    """Makes every choice, then loads the weights."""
    device = pick_device(spec.device)
    config = spec.engine_config().resolve(device.type)
    parse_tags(spec.reasoning_tags)
    chat_template = None if spec.chat_template is None else read_chat_template(spec.chat_template)
    resolve_source(["messages"], chat_template_kwargs=spec.chat_template_kwargs)
    description = describe(spec.model, spec.revision, spec.dtype, device, spec.max_model_len, logger.warning)
    defaults = resolve_sampling(spec, description)
    grammars = Grammars(description.tokenizer, description.vocab_size, description.eos_token_ids)
    quantization = resolve_quantization(spec.quantization, spec.calibration, kernels_for(device, description.dtype))
    for warning in warnings_about_the_model(spec, description, device, quantization):
        logger.warning(warning)
    model, shape = load(description, device, quantization)
    engine = build_engine(
        model,
        shape,
        description.dtype,
        config,
        description.eos_token_ids,
        device,
        free_memory_bytes(device),
        logger.warning,
        tokenizer=description.tokenizer,
        grammars=grammars,
    )
    reasoning = ReasoningSplitter(spec.reasoning_tags, description.tokenizer) if spec.strip_reasoning else None
    today = datetime.date.today()
    return LoadedModel(description, device, engine, grammars, defaults, reasoning, chat_template, today)
