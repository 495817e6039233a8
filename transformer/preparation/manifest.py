"""The manifest wmt14.yaml, which lists the files that make up WMT14."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from common.config.base import Strict
from common.downloads import fetch

MANIFEST = Path(__file__).with_name("wmt14.yaml")
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]+$")]


class Archive(Strict):
    """A file to download; sizes and checksums are null where they are not known."""

    url: str
    bytes: PositiveInt | None
    sha256: Hex | None
    md5: Hex | None

    @property
    def file(self) -> str:
        """The file's name in the folder of archives."""
        return self.url.rpartition("/")[2]

    def fetch(self, folder: Path) -> dict[str, Any]:
        """Download the archive unless it is in the folder; return its name and checksums. Raises UsageError."""
        seen = fetch(self.url, folder / self.file, bytes=self.bytes, sha256=self.sha256, md5=self.md5)
        known = self.sha256 is not None or self.md5 is not None
        checked = "as in the manifest" if known else "no checksum is known for this file"
        return {"file": self.file, "url": self.url} | seen | {"checked": checked}


class CorpusSource(Strict):
    """Two members of an archive, the source and the target lines."""

    archive: str
    source: str
    target: str


def _named(value: Any) -> Any:
    return dict(zip(("archive", "source", "target"), value, strict=True)) if isinstance(value, list) else value


Named = Annotated[CorpusSource, BeforeValidator(_named)]


class LanguagePair(Strict):
    """The data set of a language pair: training corpora, newstest2013 and newstest2014."""

    source: str
    target: str
    merges: PositiveInt
    held_out_every: PositiveInt
    train: list[Named]
    valid: Named
    test: Named


class DataManifest(Strict):
    """Archives and the data sets made of them."""

    archives: dict[str, Archive]
    pairs: dict[str, LanguagePair]

    @model_validator(mode="after")
    def _archives_exist(self) -> "DataManifest":
        for pair in self.pairs.values():
            for corpus in (*pair.train, pair.valid, pair.test):
                if corpus.archive not in self.archives:
                    raise ValueError(f"archive {corpus.archive!r} is not in the list of archives")
        return self


@cache
def read_manifest(file: Path = MANIFEST) -> DataManifest:
    """Read and check the manifest."""
    return DataManifest.model_validate(OmegaConf.to_container(OmegaConf.load(file)))
