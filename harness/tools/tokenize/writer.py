"""Write a corpus: units of the source, then shards, then the manifest.

    TARGET/plan.json                 source, tokenizer and number of shards
    TARGET/.unfinished/units/        tokenized units (``harness/data/units.py``)
    TARGET/.unfinished/shard-00000/  lock of a shard
    TARGET/shard-00000/              complete shards
    TARGET/manifest.json             written last

Everything is written under another name and renamed. Finished units and shards are kept when a process is
killed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.data.build_lock import only_builder
from harness.data.cache_check import SPLITS, files_of, read_meta
from harness.data.corpus import Counts, Manifest, describe_shard
from harness.data.documents import Source
from harness.data.shards.manifest import FORMAT_VERSION, write_manifest
from harness.data.shards.writer import ShardWriter, cut_units
from harness.data.tokenizer import Tokenizer
from harness.data.tokenizing import TokenizedUnits, concatenate, count_documents, tokenize
from harness.data.units import Unit, bytes_of, read_index, remove_unit, token_dtype, units_of
from harness.tools.tokenize.config import TokenizeConfig
from harness.util.errors import DataError

SHARD_BYTES = 16 << 30
_SOURCE_DOCUMENTS = "source_documents"


class CorpusWriter(ShardWriter):
    """Writes the corpus of a source; several processes may write different shards at the same time.

    Args:
        config: target and parts.
        source: the source.
        tokenizer: the tokenizer.
        held_out: fraction of documents for validation.

    Raises:
        DataError: the source cannot be read.
    """

    verb, noun = "tokenize", "corpus"

    def __init__(self, config: TokenizeConfig, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
        assert config.target is not None, "checked by validate"
        self.target, self.held_out, self._config = Path(config.target).expanduser(), held_out, config
        self._source, self._tokenizer = source, tokenizer
        self.source_name = source.name
        self._dtype = token_dtype(tokenizer)
        self._units_folder = self.work / "units"
        self.units = units_of(source, tokenizer, config.unit_bytes)
        wanted = config.shards or -(-bytes_of(self.units) // SHARD_BYTES)
        self.shards = cut_units(self.units, max(1, min(wanted, len(self.units))))

    def folder(self, shard: int) -> Path:
        """Folder of a shard."""
        return self.target / f"shard-{shard:05}"

    @property
    def key(self) -> str:
        """Hash of everything that determines the documents and their ids."""
        return _hash([FORMAT_VERSION, self._source.identity, self._tokenizer.fingerprint, self.held_out])

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "data": [self._source.name, *self._source.reading],
            "tokenizer": self._tokenizer.fingerprint,
            "data.validation_fraction": self.held_out,
            "tokenize.shards": len(self.shards),
            "tokenize.unit_mib": self._config.unit_mib,
        }

    def forget(self, shard: int) -> None:
        shutil.rmtree(self.folder(shard), ignore_errors=True)

    def missing(self, shard: int) -> list[Unit]:
        """Units of a shard that are not tokenized."""
        if self.folder(shard).exists():
            return []
        return [
            unit for unit in self.shards[shard] if read_index(self._units_folder, unit, self._dtype) is None
        ]

    def write(self, shards: Sequence[int], workers: int | None) -> None:
        """Tokenize the units of shards.

        Raises:
            DataError: of the first document that cannot be read.
            OSError: the target is full or not writable.
            MachineError: a process died.
        """
        units = [unit for shard in shards for unit in self.shards[shard] if not self.folder(shard).exists()]
        self._units_folder.mkdir(parents=True, exist_ok=True)
        tokenize(self._units_folder, units, self._source, self._tokenizer, workers=workers)

    def finish(self) -> Manifest | None:
        """Write all shards whose documents can be numbered, and the manifest when all shards are there.

        Returns:
            The manifest; None while units are missing.

        Raises:
            DataError: the source holds no text.
            OSError: the target is full or not writable.
        """
        document = 0
        for shard in range(len(self.shards)):
            if self.missing(shard):
                # Without held-out documents their numbers do not matter.
                if self.held_out > 0:
                    return None
                continue
            self._write_shard(shard, document)
            document += read_meta(self.folder(shard))[_SOURCE_DOCUMENTS]
        if not all(self.folder(shard).exists() for shard in range(len(self.shards))):
            return None
        manifest = self._manifest()
        write_manifest(self.target, manifest)
        return manifest

    def _write_shard(self, shard: int, first_document: int) -> None:
        folder, units = self.folder(shard), self.shards[shard]
        with only_builder(self.work / folder.name, folder.exists) as building:
            if building is None:
                return
            building.is_useless = True  # the lock
            unfinished = self.target / f".{folder.name}-{uuid.uuid4().hex}"
            unfinished.mkdir()
            try:
                tokenized = TokenizedUnits(self._units_folder, units, first_document)
                documents = count_documents(tokenized, self._dtype)
                concatenate(
                    unfinished, tokenized, self._dtype, self.held_out, **{_SOURCE_DOCUMENTS: documents}
                )
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        for unit in units:
            remove_unit(self._units_folder, unit)

    def _manifest(self) -> Manifest:
        folders = [self.folder(shard) for shard in range(len(self.shards))]
        counts = [_counts(folder) for folder in folders]
        total = Counts(
            {split: sum(each.tokens[split] for each in counts) for split in SPLITS},
            {split: sum(each.documents[split] for each in counts) for split in SPLITS},
            sum(each.damaged for each in counts),
        )
        if not any(total.tokens.values()):
            raise DataError(f"{self._source.name} holds no text: every document is empty")
        sizes: Counter[str] = Counter()
        for unit in self.units:
            for span in unit.spans:
                sizes[span.name] += span.nbytes
        tokenizer = self._tokenizer
        assert tokenizer.config is not None, "build_tokenizer sets it"
        return Manifest(
            version=FORMAT_VERSION,
            tokenizer={
                "name": " ".join(filter(None, [tokenizer.config.kind, tokenizer.config.path])),
                **asdict(tokenizer.config),
                "fingerprint": tokenizer.fingerprint,
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
            },
            source={
                "name": self._source.name,
                "files": [{"path": path, "size": size} for path, size in sizes.items()],
            },
            held_out=self.held_out,
            counts=total,
            shards=[describe_shard(folder, each) for folder, each in zip(folders, counts, strict=True)],
            key=self.key,
        )


def _counts(folder: Path) -> Counts:
    meta = read_meta(folder)
    documents = {split: meta["files"][files_of(split)[1]]["size"] // 8 for split in SPLITS}
    return Counts({split: meta["tokens"][split] for split in SPLITS}, documents, meta["damaged"])


def _hash(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
