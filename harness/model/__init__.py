"""Decoder parts. The modules that need torch are imported by name; this package itself does not."""

from harness.model.attention_config import AttentionConfig, Span
from harness.model.config import ModelConfig
from harness.model.moe_config import MoEConfig
from harness.model.rope_config import RopeConfig

__all__ = ["AttentionConfig", "MoEConfig", "ModelConfig", "RopeConfig", "Span"]
