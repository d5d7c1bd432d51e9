"""Data of a run: documents, tokenizers, the token store and the loader."""
