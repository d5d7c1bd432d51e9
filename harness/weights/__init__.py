"""Exchange of models with other projects: families, formats, config.json, tokenizers."""
