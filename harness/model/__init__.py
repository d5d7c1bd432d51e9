"""Decoder parts. The modules that need torch are imported by name; this package itself does not."""

from harness.model.config import ModelConfig, RopeConfig

__all__ = ["ModelConfig", "RopeConfig"]
