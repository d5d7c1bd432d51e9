"""A corpus: the tokens of documents in shards, with a manifest.

``harness tokenize`` writes one, and so does the token cache.

    corpus/web/plan.json                 source, tokenizer and number of shards; written first
    corpus/web/.unfinished/units/        tokenized units (``tokenizing.py``)
    corpus/web/shard-00000/meta.json     dtype, counts, checksums
    corpus/web/shard-00000/train.tokens  documents as [bos] text [eos], concatenated
    corpus/web/shard-00000/train.starts  int64, offset of each document
    corpus/web/shard-00000/validation.*  the held-out documents
    corpus/web/manifest.json             tokenizer, counts, source files, checksums; written last

A shard has a contiguous range of the source's documents. The documents of a split are those of its
shards, one after the other, whatever the number of shards. Units and shards are written under
another name and then renamed, so those that are finished are kept when a process is killed.
"""

import dataclasses
import json
import shutil
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from harness.config.fields import from_dict
from harness.data.documents import Source
from harness.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    ShardWriter,
    cut_units,
    load_manifest,
    write_manifest,
)
from harness.data.tokenizer import Tokenizer
from harness.data.tokenizing import (
    Unit,
    bytes_of,
    is_held_out,
    read_index,
    remove_unit,
    token_dtype,
    tokenize,
    units_of,
)
from harness.data.tokens import map_file
from harness.util.encoding import json_digest, parse_object
from harness.util.errors import ConfigError, DataError
from harness.util.files import is_file_name
from harness.util.store import (
    NO_FILE,
    Damaged,
    check_files,
    check_sizes,
    describe_files,
    only_builder,
)

META = "meta.json"
SPLITS = ("train", "validation")
SHARD_BYTES = 16 << 30
_SOURCE_DOCUMENTS = "source_documents"


@dataclass(frozen=True)
class TokenizedSplit:
    """The tokens of one split, on disk (``tokens.Tokens``).

    Attributes:
        tokens: all documents, concatenated (integers, 1-d memory map).
        starts: offset of each document in ``tokens`` (ascending).
        name: the source and the split, for error messages.
    """

    tokens: np.ndarray
    starts: np.ndarray
    name: str

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.tokens[begin:end].astype(np.int64)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        # The keys have the array's type. For others numpy would convert the whole array.
        first, last = np.searchsorted(self.starts, np.array([begin, end], dtype=self.starts.dtype))
        return self.starts[first:last].astype(np.int64)


def files_of(split: str) -> tuple[str, str]:
    """Names of the two files of a split: its tokens, and the offsets of its documents."""
    return f"{split}.tokens", f"{split}.starts"


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the description of a shard."""
    try:
        meta = parse_object((folder / META).read_bytes())
        if meta["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype {meta['dtype']}")
        for split in SPLITS:
            tokens, starts = files_of(split)
            nbytes = meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize
            known = meta["files"]
            if known[tokens]["size"] != nbytes or known[starts]["size"] % 8:
                raise ValueError(f"the sizes of the {split} files do not match their tokens")
    except (*NO_FILE, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META}: {error}") from None
    return meta


@dataclass(frozen=True)
class Counts:
    """Tokens and documents of each split, without empty documents."""

    tokens: dict[str, int]
    documents: dict[str, int]
    damaged: int = 0
    """Documents that an earlier version has repaired because they were not UTF-8."""


@dataclass(frozen=True)
class Shard:
    """A shard of a corpus.

    Attributes:
        meta_xxh3_64: checksum of its ``meta.json``, which has the checksums of its other files.
    """

    folder: str
    counts: Counts
    meta_xxh3_64: str


@dataclass(frozen=True)
class Manifest:
    """Description of a corpus.

    Attributes:
        tokenizer: name, fingerprint, vocab_size, bos_id and eos_id.
        source: name of the source, and its files with path and size.
        held_out: fraction of documents in the split ``validation``.
        key: hash of everything that determines the content, shards included.
    """

    version: int
    tokenizer: dict[str, Any]
    source: dict[str, Any]
    held_out: float
    counts: Counts
    shards: list[Shard]
    key: str


def read_manifest(folder: Path) -> Manifest:
    """Read a corpus' manifest.

    Raises:
        DataError: there is none, it is damaged, or a later version wrote it.
    """
    plain = load_manifest(folder, "tokenize", "corpus")
    try:
        shards = [from_dict(Shard, shard) for shard in plain["shards"]]
        manifest: Manifest = from_dict(Manifest, {**plain, "shards": []})
        for shard in shards:
            if not is_file_name(shard.folder):
                raise ValueError(f"{shard.folder!r} is no name of a folder in the corpus")
        if manifest.tokenizer["vocab_size"] < 1 or not manifest.tokenizer["fingerprint"]:
            raise ValueError("its tokenizer has no tokens, or no fingerprint")
        for split in SPLITS:
            total = manifest.counts.tokens[split]
            held = sum(shard.counts.tokens[split] for shard in shards)
            if held != total:
                raise ValueError(f"{total} {split} tokens, and its shards have {held}")
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}"
        ) from None
    return dataclasses.replace(manifest, shards=shards)


def open_shard(folder: Path, shard: Shard, split: str, name: str, *, check: bool) -> TokenizedSplit:
    """Map the files of a split of a shard.

    Args:
        check: compare checksums, not only sizes.
    """
    path = folder / shard.folder
    meta = read_meta(path)
    tokens_file, starts_file = files_of(split)
    if check and xxhash.xxh3_64_hexdigest((path / META).read_bytes()) != shard.meta_xxh3_64:
        raise Damaged(f"{META} does not have the checksum in {MANIFEST}")
    expected = {file: meta["files"][file] for file in files_of(split)}
    if check:
        check_files(path, expected)
    else:
        check_sizes(path, expected)

    def mapped(file: str, dtype: str) -> np.ndarray:
        length = meta["files"][file]["size"] // np.dtype(dtype).itemsize
        return map_file(str(path / file), dtype, 0, length)

    return TokenizedSplit(mapped(tokens_file, meta["dtype"]), mapped(starts_file, "int64"), name)


def open_shards(folder: Path, split: str, *, check: bool = True) -> list[TokenizedSplit]:
    """Open the shards of a corpus that have documents of a split, in order.

    Args:
        check: compare checksums, as a token cache does; sizes are always compared. One rank of a
            node is enough.
    """
    manifest = read_manifest(folder)
    if not manifest.counts.tokens[split]:
        advice = ""
        if split == "validation":
            advice = "; would work: harness tokenize with data.validation_fraction=0.01"
        raise DataError(f"{folder} has no {split} documents{advice}")
    opened = []
    for shard in manifest.shards:
        path = folder / shard.folder
        try:
            part = open_shard(folder, shard, split, f"{path}, {split} documents", check=check)
        except Damaged as error:
            raise DataError(
                f"{path} is damaged: {error}; would work: remove {folder / MANIFEST} and {path}, then the "
                "harness tokenize command of this corpus"
            ) from None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        if len(part.tokens) != shard.counts.tokens[split]:
            raise DataError(
                f"{path} has {len(part.tokens)} {split} tokens, and {MANIFEST} says "
                f"{shard.counts.tokens[split]}"
            )
        if len(part.tokens):
            opened.append(part)
    return opened


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, name: str) -> None:
    """Raise ConfigError unless a job's tokenizer is that of the corpus ``name``."""
    found = manifest.tokenizer
    config = tokenizer.config
    if found["fingerprint"] != tokenizer.fingerprint and config and config.kind != "none":
        field = "tokenizer.path" if config.has_file else "tokenizer.kind"
        rule = (
            f"has {tokenizer.vocab_size} tokens, and {name} was tokenized by another tokenizer: "
            f"{found['name']}, {found['vocab_size']} tokens"
        )
        works = "the tokenizer of the corpus, with its file as it was then"
        raise ConfigError(field, config.path or config.kind, rule, works)


def content_key(source: Source, tokenizer: Tokenizer, held_out: float) -> str:
    """Hash of everything that determines the documents and their ids."""
    return json_digest([FORMAT_VERSION, source.identity, tokenizer.fingerprint, held_out])


class CorpusWriter(ShardWriter):
    """Writes the corpus of a source; several processes may write different shards at the same time.

    Args:
        unit_mib: MiB of source that are tokenized at a time.
        shards: number of shards; None: one for each 16 GiB of source.

    Raises:
        DataError: the source cannot be read.
    """

    verb = "tokenize"
    noun = "corpus"

    def __init__(
        self,
        target: Path,
        source: Source,
        tokenizer: Tokenizer,
        held_out: float,
        *,
        unit_mib: float = 16.0,
        shards: int | None = None,
    ) -> None:
        self.target = target
        self.held_out = held_out
        self._unit_mib = unit_mib
        self._source = source
        self.tokenizer = tokenizer
        self.source_name = source.name
        self._dtype = token_dtype(tokenizer)
        self._units_folder = self.work / "units"
        self.units = units_of(source, tokenizer, max(1, int(unit_mib * 2**20)))
        wanted = shards or -(-bytes_of(self.units) // SHARD_BYTES)
        self.shards = cut_units(self.units, max(1, min(wanted, len(self.units))))

    def folder(self, shard: int) -> Path:
        return self.target / f"shard-{shard:05}"

    @property
    def key(self) -> str:
        return content_key(self._source, self.tokenizer, self.held_out)

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "data": [self._source.name, *self._source.reading],
            "tokenizer": self.tokenizer.fingerprint,
            "data.validation_fraction": self.held_out,
            "tokenize.shards": len(self.shards),
            "tokenize.unit_mib": self._unit_mib,
        }

    def forget(self, shard: int) -> None:
        shutil.rmtree(self.folder(shard), ignore_errors=True)

    def missing(self, shard: int) -> list[Unit]:
        if self.folder(shard).exists():
            return []
        return [
            unit
            for unit in self.shards[shard]
            if read_index(self._units_folder, unit, self._dtype) is None
        ]

    def write(self, shards: Sequence[int], workers: int | None) -> None:
        units: list[Unit] = []
        for shard in shards:
            if not self.folder(shard).exists():
                units += self.shards[shard]
        self._units_folder.mkdir(parents=True, exist_ok=True)
        tokenize(self._units_folder, units, self._source, self.tokenizer, workers=workers)

    def finish(self) -> Manifest | None:
        """Write all shards whose documents can be numbered, and the manifest when all shards are there."""
        document = 0
        for shard in range(len(self.shards)):
            if self.missing(shard):
                # The documents after it have no numbers yet. A number only decides whether its
                # document is held out.
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
        folder = self.folder(shard)
        units = self.shards[shard]
        with only_builder(self.work / folder.name, folder.exists) as building:
            if building is None:
                return
            building.is_useless = True  # the folder only locks: the shard is written beside it
            unfinished = self.target / f".{folder.name}-{uuid.uuid4().hex}"
            unfinished.mkdir()
            try:
                self._concatenate(unfinished, units, first_document)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        for unit in units:
            remove_unit(self._units_folder, unit)

    def _concatenate(self, folder: Path, units: Sequence[Unit], first_document: int) -> None:
        counts = dict.fromkeys(SPLITS, 0)
        document = first_document
        with ExitStack() as stack:
            files = {
                split: [stack.enter_context((folder / name).open("wb")) for name in files_of(split)]
                for split in SPLITS
            }
            for unit in units:
                file = self._units_folder / f"{unit.key}.tokens"
                index = read_index(self._units_folder, unit, self._dtype)
                if index is None:
                    raise DataError(f"{file} was removed while it was used")
                tokens = map_file(str(file), self._dtype.name, 0, index.num_tokens)
                numbers = (index.numbers + document).tolist()
                held = np.array(
                    [is_held_out(number, self.held_out) for number in numbers], dtype=bool
                )
                starts = np.append(index.starts, index.num_tokens)
                # Consecutive documents of one split are copied at once, whatever their length. They
                # begin where ``held`` changes, and at the first document.
                firsts = np.flatnonzero(np.diff(held, prepend=~held[:1])).tolist()
                for first, end in pairwise([*firsts, len(held)]):
                    split = "validation" if held[first] else "train"
                    of_tokens, of_starts = files[split]
                    of_tokens.write(tokens[starts[first] : starts[end]].data)
                    of_starts.write((starts[first:end] - starts[first] + counts[split]).tobytes())
                    counts[split] += int(starts[end] - starts[first])
                document += index.num_documents
        meta = {
            "dtype": self._dtype.name,
            "tokens": counts,
            "files": describe_files(folder, [*files_of("train"), *files_of("validation")]),
            _SOURCE_DOCUMENTS: document - first_document,
        }
        (folder / META).write_text(json.dumps(meta))

    def _manifest(self) -> Manifest:
        shards = []
        total = Counts(dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0))
        for number in range(len(self.shards)):
            folder = self.folder(number)
            meta = read_meta(folder)
            # The file of starts has 8 bytes for each document.
            documents = {split: meta["files"][files_of(split)[1]]["size"] // 8 for split in SPLITS}
            held = Counts(meta["tokens"], documents)
            checksum = xxhash.xxh3_64_hexdigest((folder / META).read_bytes())
            shards.append(Shard(folder.name, held, checksum))
            for split in SPLITS:
                total.tokens[split] += held.tokens[split]
                total.documents[split] += held.documents[split]
        if not any(total.tokens.values()):
            raise DataError(f"{self._source.name} {self._source.without_tokens}")
        sizes: Counter[str] = Counter()
        for unit in self.units:
            for span in unit.spans:
                sizes[span.name] += span.nbytes
        tokenizer = self.tokenizer
        # A tokenizer of conversations has no config.
        config = {} if tokenizer.config is None else asdict(tokenizer.config)
        return Manifest(
            version=FORMAT_VERSION,
            tokenizer={
                "name": " ".join(filter(None, [config.get("kind"), config.get("path")])),
                **config,
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
            shards=shards,
            key=self.key,
        )
