"""Data of a run: documents, tokenizers, the token cache and the loader.

Only the configuration is exported here, because this package is imported when a job is composed, without
torch. Import ``harness.data.tokenizer`` and ``harness.data.loader`` where they are used.
"""

from harness.data.config import DataConfig, TokenizerConfig

__all__ = ["DataConfig", "TokenizerConfig"]
