"""What programs of the campaign read and leave: models, artifacts, recipes, scripts, records."""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaign.fault import LOST, Bad
from campaign.processes import TEMPORARY, TMP

TFOPT = ("-m", "tfopt")
# What Python and TensorFlow write: a killed process of TensorFlow leaves the last.
OF_OTHERS = (".pyc", "__pycache__", "__autograph_generated_file")


def keras_file(place: Path) -> None:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu", name="hidden"), keras.layers.Dense(3, name="head")]
    keras.Sequential([keras.Input((4,), name="x"), *layers], name="tiny").save(place / "model.keras")


def artifact(place: Path, name: str = "model") -> None:
    import keras

    import tfopt

    keras_file(place)
    tfopt.export(keras.models.load_model(place / "model.keras"), place / name)


def two_artifacts(place: Path) -> None:
    import tfopt

    artifact(place)
    tfopt.export(place / "model.keras", place / "smaller", tfopt.ExportConfig(precision="float16"))


def over_an_earlier_one(place: Path) -> None:
    import tfopt

    keras_file(place)
    tfopt.export(place / "model.keras", place / "model", tfopt.ExportConfig(precision="float16"))


TRAINING = """
    import sys, numpy as np, keras, tfopt
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    y = (x[:, :1] > 0).astype("int32")
    config = tfopt.TrainingConfig(precision="float32", jit_compile=False, global_batch_size=16, epochs=6,
        strategy=STRATEGY, checkpoint_dir="checkpoints", checkpoint_every=7, resume="auto")
    plan = tfopt.plan(config)
    with plan.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.2),
            keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    tfopt.compile(model, plan, optimizer=plan.optimizer(steps_per_epoch=16), loss=loss)
    model.fit(plan.pipeline((x, y)), epochs=6, verbose=0)
    if CHIEF:
        np.savez("weights.npz", *model.get_weights())
"""


def training_script(strategy: str, chief: str) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        text = textwrap.dedent(TRAINING).replace("STRATEGY", strategy).replace("CHIEF", chief)
        (place / "train.py").write_text(text)

    return make


RECIPE = """
name = "signals"
task = "regression"
export_dir = "out"
model = {builder = "mlp", arguments = {units = [16]}}
data = {source = "diabetes"}
training = {epochs = 2, precision = "float32", jit_compile = false, checkpoint_dir = "checkpoints"}
"""


def recipe(place: Path) -> None:
    (place / "mine.toml").write_text(RECIPE)


def weights(place: Path, output: str) -> Any:
    import numpy as np

    with np.load(place / "weights.npz") as found:
        return dict(found)


def artifacts(place: Path, output: str) -> Any:
    """Returns the names and the outputs of all artifacts. Their bytes differ: TensorFlow numbers its functions."""
    from tfopt.exporting.manifest import read_intact_manifest

    found = sorted(place.rglob("manifest.json"))
    return {str(each.parent.relative_to(place)): _files(read_intact_manifest(each.parent)) for each in found}


def _files(manifest: Any) -> Any:
    return [sorted(manifest.files), manifest.check.to_dict()["outputs"]]


def records(place: Path, output: str) -> Any:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted((place / "records").iterdir())}


def check_whole(place: Path) -> None:
    """Raises Bad if a file under its final name is not whole."""
    from tfopt.errors import TfoptError
    from tfopt.exporting.manifest import read_intact_manifest

    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place).parts
        if inside[0] == TMP or any(TEMPORARY.fullmatch(name) for name in inside) or "tmp" in inside:
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".npz" and zipfile.ZipFile(path).testzip() is not None:
                raise Bad(LOST, f"half-written: {path.name}")
            elif path.name in ("saved_model.pb", "manifest.json"):
                read_intact_manifest(path.parent)
        except (TfoptError, ValueError, zipfile.BadZipFile) as error:
            raise Bad(LOST, f"half-written: {path.name}: {error}") from error


def names_in(place: Path) -> list[str]:
    """Returns the names of all files. What is drawn in a name, such as a moment, counts as one name."""
    names = {re.sub(r"\d{3,}", "#", str(each.relative_to(place))) for each in place.rglob("*")}
    return sorted(name for name in names if not any(word in name for word in OF_OTHERS))
