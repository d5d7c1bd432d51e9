"""Data of a run: documents, tokenizers, mixtures, the token store, and the loader of batches."""
