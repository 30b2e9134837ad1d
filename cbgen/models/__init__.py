"""Loading models and tokenizers, and the seam through which a model reaches the paged cache."""
