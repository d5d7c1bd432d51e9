"""Exchange of models with other projects: families, formats of weights, config.json, tokenizers, the hub."""
