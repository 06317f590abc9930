"""Prepares data sets of tensorflow-datasets, by download or from local files, without TensorFlow.

Before a download the network is probed for seconds: tensorflow-datasets itself tries for minutes.

array_record stores rows as tf.train.Example, which has no float64 and no None: columns that are
neither texts nor int64 are stored as JSON, and the metadata names them.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import pathlib
import re
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.base.errors import UserError, did_you_mean, refused
from fp8rl_jax.envs.answers import text_of_json
from fp8rl_jax.envs.tfds import FORMAT, JSON_COLUMNS

GSM8K = "gsm8k"
CATALOGUE = "https://www.tensorflow.org/datasets/catalog"
_PROBE_SECONDS = 5.0
_GSM8K_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/README.md"
_OTHER_URL = "https://storage.googleapis.com/tfds-data"


def check_known(name: str) -> None:
    """Raises UserError if tensorflow-datasets has no data set NAME[/CONFIG][:VERSION]."""
    if _plain(name) == GSM8K:
        return
    import tensorflow_datasets as tfds

    known = sorted({*tfds.list_builders(with_community_datasets=False), GSM8K})
    if _plain(name) not in known:
        hint = did_you_mean(_plain(name), known, f"{CATALOGUE} names them", most=3)
        raise UserError(f"tensorflow-datasets has no data set {_plain(name)!r}; {hint}")


def _plain(name: str) -> str:
    return re.split("[/:]", name)[0]


def ways(name: str) -> str:
    """Returns a text with three ways to get a data set without a network."""
    return (
        f"copy a prepared directory {_plain(name)} there, or name a local file "
        f"(--config.env.task=train.jsonl), or run `fp8rl data prepare {name}` on a machine with a "
        "network"
    )


def prepare(name: str, root: pathlib.Path) -> pathlib.Path:
    """Downloads and prepares a data set by its builder; returns its directory.

    Raises:
      UserError: the name is unknown, there is no network, or the builder fails.
    """
    check_known(name)
    url = _GSM8K_URL if _plain(name) == GSM8K else _OTHER_URL
    if not _reachable(url):
        raise UserError(
            f"{name} is not prepared in {root}, and {url.split('/')[2]} cannot be "
            f"reached to download it: {ways(name)}"
        )
    return _run(_builder(name, root), ways(name))


def _builder(name: str, root: pathlib.Path) -> Any:
    import tensorflow_datasets as tfds

    if _plain(name) == GSM8K:
        from tensorflow_datasets.text.gsm8k.gsm8k import Gsm8k  # not registered

        return Gsm8k(data_dir=str(root), file_format=FORMAT)
    with refused(f"tensorflow-datasets refuses {name!r}", "write tfds:NAME[/CONFIG]"):
        return tfds.builder(name, data_dir=str(root), file_format=FORMAT)


def _run(builder: Any, advice: str) -> pathlib.Path:
    """Runs a builder; returns the directory of its files."""
    with (
        refused(f"{builder.data_dir} could not be prepared", advice),
        contextlib.redirect_stdout(io.StringIO()),  # prints more than progress bars
    ):
        builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def _reachable(url: str) -> bool:
    """Returns within seconds whether the host answers, even if the lookup of its name hangs."""
    answers = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_PROBE_SECONDS):
                answers.append(True)
        except urllib.error.HTTPError:  # an answer, too
            answers.append(True)
        except (OSError, http.client.HTTPException):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(1.5 * _PROBE_SECONDS)
    return bool(answers)


def prepare_gsm8k(files: Mapping[str, pathlib.Path], root: pathlib.Path) -> pathlib.Path:
    """Prepares GSM8K from its JSONL files, by tensorflow-datasets' builder; returns its directory.

    Args:
      files: paths of the published files, {'train': ..., 'test': ...}.
      root: directory of prepared data sets.

    Raises:
      UserError: the builder cannot read the files.
    """
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    builder = _builder(GSM8K, root)
    builder._make_download_manager = lambda **_: types.SimpleNamespace(
        downloaded_size=0,  # bytes that came over the network
        download_and_extract=lambda urls: {s: files[s] for s in urls if s in files},
    )
    return _run(builder, "name its files as published, train.jsonl and test.jsonl")


def prepare_rows(
    name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]], root: pathlib.Path
) -> pathlib.Path:
    """Prepares a data set from {split: rows}, in their order; returns its directory.

    Raises:
      UserError: the name is not valid, or the files cannot be written.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise UserError(
            f"fp8rl data prepare: {name!r} is no name for a data set; write small letters, digits "
            "and _"
        )
    import numpy as np
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    types = _types([row for part in rows.values() for row in part])
    features = {
        column: np.int64 if kind is int else tfds.features.Text() for column, kind in types.items()
    }
    encoded = [column for column, kind in types.items() if kind is None]

    def written(row: Mapping[str, Any]) -> dict[str, Any]:
        return {
            column: text_of_json(row.get(column)) if kind is None else row.get(column)
            for column, kind in types.items()
        }

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                metadata=tfds.core.MetadataDict({JSON_COLUMNS: encoded}),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: enumerate(map(written, part)) for split, part in rows.items()}

        def _generate_examples(self):
            raise NotImplementedError

    Builder.name = name
    return _run(Builder(data_dir=str(root), file_format=FORMAT), "look at --from and --out")


def _types(rows: Sequence[Mapping[str, Any]]) -> dict[str, type | None]:
    """Returns {column: str or int (int64) if all rows have that type, else None (JSON)}."""
    types: dict[str, type | None] = {}
    for column in dict.fromkeys(column for row in rows for column in row):
        kinds = {type(row.get(column)) for row in rows}
        small = kinds == {int} and all(-(2**63) <= row[column] < 2**63 for row in rows)
        types[column] = str if kinds == {str} else int if small else None
    return types
