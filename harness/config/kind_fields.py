"""The formats that each kind of data reads, and the fields that only some kinds read."""

from __future__ import annotations

WITHOUT_TEXT = ("tokens", "chat", "synthetic")
TEXT_FORMATS = ("auto", "text", "jsonl", "parquet")
TOKEN_FORMATS = ("auto", "corpus", "megatron", "memmap", "llmc", "datatrove", "arrow", "parquet")
FORMATS = tuple(dict.fromkeys((*TEXT_FORMATS, *TOKEN_FORMATS)))
FORMATS_OF = {
    "local": (TEXT_FORMATS, "my_corpus/**/*.txt"),
    "tokens": (TOKEN_FORMATS, "corpus/web"),
    "chat": (("auto", "jsonl", "parquet"), "conversations.jsonl"),
}
"""Formats of the kinds that read files, and an example of a path."""

# Fields that only some kinds of source read. For another kind a value would have no effect, so it is refused.
READ_ONLY_BY = {
    ("local", "tokens", "chat"): ("format", "validation_paths", "paths"),
    ("local", "chat"): ("exclude", "encoding_errors"),
    ("tokens",): ("tokens_field", "dtype", "boundaries"),
    ("hub",): (
        "dataset",
        "subset",
        "split",
        "validation_split",
        "streaming",
        "data_files",
    ),
    ("chat",): (
        "messages_field",
        "chat_template",
        "chat_template_options",
        "chat_date",
        "train_on",
        "long_conversations",
    ),
    ("synthetic",): ("mask_fraction",),
    ("mixture",): ("sources", "weights", "epochs", "weight_changes"),
}
# Fields that only streams read.
READ_ONLY_BY_STREAMS = ("workers", "shuffle_buffer")
