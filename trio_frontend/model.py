"""Which model a server's texts are of."""

from __future__ import annotations

import dataclasses

from trio_frontend.config import ServerConfig
from trio_frontend.engine.embedded.loading import SHIPPED_MODEL
from trio_frontend.text import ModelFiles

__all__ = ["SHIPPED_MODEL_NAME", "load_model"]

SHIPPED_MODEL_NAME = "trio-frontend-stories"


def load_model(config: ServerConfig) -> ModelFiles:
    """The files of the model that ``config`` names, or of the package's own. Reads files, and the network for a Hugging Face id."""
    elsewhere = {"tokenizer": config.tokenizer, "hf_config_path": config.hf_config_path}
    if config.model is None:
        return dataclasses.replace(ModelFiles.load(SHIPPED_MODEL, **elsewhere), name=SHIPPED_MODEL_NAME)
    return ModelFiles.load(config.model, **elsewhere)
