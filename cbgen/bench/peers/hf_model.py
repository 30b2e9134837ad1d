"""What the two peers of transformers share."""

from typing import Any

PADDING_ID = 0


def plain_model(options: dict[str, Any]) -> Any:
    """The model as transformers runs it, with torch's own attention (sdpa) if it has that, and nothing but defaults."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        options["model"], revision=options["revision"], dtype=getattr(torch, options["dtype"])
    )
    model.generation_config = GenerationConfig()  # its penalties, end tokens and sampling would be other work
    return model.to(options["device"]).eval()
